"""Objects, the common state and the index, as arrays of bytes in a folder of our own: other readers see valid zarr."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ...codec import canonical_json, decode_tree, encode_tree
from ...storage import Buffer, Storage, digest, make_folder, sync_folder
from .._metadata import read_checked
from .._values import Checkpoint, Fields, PendingSave
from ..index import COLUMNS, Index, sound_index, unsound_index
from ._array import StoredArray
from ._metadata import NODE_FILE, OURS, encode_v3

FOLDER = "_shardtree"

Document = dict[str, Any]


def group_document(members: dict[str, Document] | None = None) -> Document:
    """Return the zarr.json of a group; the outermost one consolidates that of all members.

    Examples:
        >>> group_document()
        {'zarr_format': 3, 'node_type': 'group', 'attributes': {}}
    """
    plain: Document = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    if members is None:
        return plain
    inline = {"kind": "inline", "must_understand": False, "metadata": members}
    return plain | {"attributes": {OURS: {"version": 3}}, "consolidated_metadata": inline}


def blob(name: str, length: int, attributes: dict[str, Any] | None = None) -> tuple[str, Document]:
    """Return the name of the file that holds an array of bytes, and the array's zarr.json.

    Examples:
        >>> blob("common", 7)[0]
        '_shardtree/common/c.0'
    """
    folder = f"{FOLDER}/{name}"
    array = StoredArray(folder, folder, torch.uint8, (length,), (max(1, length),))
    document = encode_v3(array)
    return array.file_name((0,)), document | {"attributes": attributes or {}}


def write_document(storage: Storage, folder: str, document: Document, *, durable: bool) -> None:
    """Write the zarr.json of an array or a group."""
    name = f"{folder}/{NODE_FILE}" if folder else NODE_FILE
    storage.write(name, [memoryview(canonical_json(document))], durable=durable)


def write_blob(storage: Storage, name: str, buffers: Iterable[Buffer], document: Document, *, durable: bool) -> None:
    """Write an array of bytes: its file, then its zarr.json."""
    folder = name.rpartition("/")[0]
    make_folder(storage, folder, durable=durable)
    storage.write(name, buffers, durable=durable)
    write_document(storage, folder, document, durable=durable)
    if durable:
        sync_folder(storage, folder)


def encode_columns(index: Index) -> bytes:
    """Return an index as bytes: its columns in the common codec."""
    return encode_tree({name: np.ascontiguousarray(getattr(index, name)) for name in COLUMNS})


def decode_columns(data: Buffer, where: str) -> Index:
    """Return the index that bytes hold.

    Raises:
        CorruptCheckpoint: they don't hold one that is sound.
    """
    columns = decode_tree(data)
    if not isinstance(columns, dict) or not all(isinstance(columns.get(name), np.ndarray) for name in COLUMNS):
        raise unsound_index(where, "other columns than an index has")
    return sound_index(Index(**{name: columns[name] for name in COLUMNS}), where)


# The common state, encoded by the common codec

BACKEND, VERSION = "zarr", 3


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree as one array of bytes, and return its fields of metadata.json."""
    data = encode_tree(common, allow_pickle=pending.options.allow_pickle)
    name, document = blob("common", len(data))
    write_blob(pending.storage, name, [memoryview(data)], document, durable=pending.options.durable)
    return {"common": {"name": name, "length": len(data), "digest": digest(data)}}


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where shards were; an empty one if another program wrote the arrays."""
    if "common" not in checkpoint.fields:
        return {}
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)
