"""Folders that our `save` writes. Other readers can read them as zarr: objects, common state and index are byte arrays.

Keys are removed safely: a new index is written before files are removed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ...errors import CorruptCheckpoint, StrategyError, error_text
from ...kit import (
    Buffer,
    Checkpoint,
    Fields,
    Index,
    PendingSave,
    Storage,
    StoredFile,
    can,
    canonical_json,
    checked_entry,
    decode_tree,
    encode_tree,
    load_common,
    locked,
    make_folder,
    parse_json,
    read_checked,
    read_metadata,
    remove_files,
    remove_folder,
    replace_metadata,
    sound_index,
    sync_folder,
    without_prefix,
    write_hashed,
)
from ._array import StoredArray
from ._layout import array_name
from ._metadata import NODE_FILE, OURS, encode_v3

FOLDER = "_shardtree"

MEGATRON = 1
"""Version of the format of Megatron-Core's old releases."""

Document = dict[str, Any]


def is_own(fields: Fields) -> bool:
    """Return whether the fields of metadata.json say that our own `save` wrote the arrays."""
    return "index" in fields and fields["sharded_backend_version"] != MEGATRON


def group_document(members: dict[str, Document] | None = None) -> Document:
    """Return the zarr.json of a group. For the outermost group, pass `members`: each zarr.json below it, by folder.

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
    """Return the chunk file's name and the zarr.json of a one-dimensional array of bytes.

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


def write_blob(
    storage: Storage,
    name: str,
    buffers: Iterable[Buffer],
    document: Document,
    *,
    durable: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> StoredFile:
    """Write the chunk file of an array of bytes, then its zarr.json; return the name, length and hashes of the file."""
    folder = name.rpartition("/")[0]
    make_folder(storage, folder, durable=durable)
    file = write_hashed(storage, name, buffers, durable=durable, progress=progress)
    write_document(storage, folder, document, durable=durable)
    if durable:
        sync_folder(storage, folder)
    return file


def encode_columns(index: Index) -> bytes:
    """Return the columns of an index, encoded as a tree of plain values."""
    return encode_tree(index.columns())


def decode_columns(data: Buffer, where: str) -> Index:
    """Return the index that `encode_columns` encoded as these bytes; `where` names their file in errors.

    Raises:
        CorruptCheckpoint: The bytes aren't a sound index.
    """
    columns = decode_tree(data)
    return sound_index(columns if isinstance(columns, dict) else {}, where)


# The common state is encoded as a tree of plain values.

BACKEND, VERSION = "zarr", 3


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common state as an array of bytes. Return the fields of metadata.json that describe its file."""
    data = encode_tree(common, allow_pickle=pending.options.allow_pickle)
    name, document = blob("common", len(data))
    write_blob(pending.storage, name, [memoryview(data)], document, durable=pending.options.durable)
    return {"common": checked_entry(name, data)}


def load_own_common(checkpoint: Checkpoint) -> Any:
    """Return the common state, with holes in place of shards; an empty dict if another program wrote the arrays."""
    return load_common(checkpoint) if "common" in checkpoint.fields else {}


# To remove tensors and objects, a new index is written first, then arrays that became unused are removed.

_CHUNK_FILE = re.compile(r"(?P<folder>.+)/c(\.\d+)*")
_INDEX_FOLDER = re.compile(rf"{FOLDER}/index(-(?P<number>\d{{1,9}}))?")
_NUMBERS = 10**9


def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove every stored tensor and object whose key begins with a prefix, and the arrays that become unused.

    Raises:
        StrategyError: Another program wrote the arrays.
    """
    storage = checkpoint.storage
    if not is_own(checkpoint.fields):
        fix = "remove_sharded_tensors only changes checkpoints of this library; delete the arrays with zarr itself."
        raise StrategyError(error_text(f"remove: {storage.where()!r} was written by another program", fix=fix))
    before, fields = read_metadata(storage)
    current = replace(checkpoint, fields=fields)
    old = decode_columns(*read_checked(current, "index"))
    if (thinner := without_prefix(old, key_prefix)) is None:
        return
    members, (new, unused_names) = group_members(current), thinner
    removed_keys = set(old.keys()) - set(new.keys())
    old_index = str(fields["index"]["name"]).rpartition("/")[0]
    removed_folders = {
        old_index,
        *(set(map(array_name, removed_keys)) | folders_of(unused_names)).intersection(members),
    }
    data = encode_columns(new)
    name, document = blob(_next_index(old_index, storage), len(data))
    write_blob(storage, name, [memoryview(data)], document, durable=True)
    documents = {folder: member for folder, member in members.items() if folder not in removed_folders}
    documents[name.rpartition("/")[0]] = document
    group = canonical_json(group_document({folder: documents[folder] for folder in sorted(documents)}))
    fields["index"], fields["group"] = checked_entry(name, data), checked_entry(NODE_FILE, group)
    # metadata.json, which this package reads, comes first, then the group, which other programs read, then the files:
    # after an interruption, every array that is still listed exists. The lock is needed since a checkpoint that
    # replaces this one has files with the same names.
    with locked(storage):
        replace_metadata(storage, before, fields, durable=True)
        storage.replace(NODE_FILE, group, durable=True)
        _remove(storage, unused_names, removed_folders)


def group_members(checkpoint: Checkpoint) -> dict[str, Document]:
    """Return the zarr.json of every array and group, by folder, as the outermost group's zarr.json has them.

    Raises:
        CorruptCheckpoint: The outermost group's zarr.json isn't what was saved.
    """
    data, where = read_checked(checkpoint, "group")
    node: Any = parse_json(data, where)
    for name in ("consolidated_metadata", "metadata"):
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        raise CorruptCheckpoint(
            error_text(f"open: {where!r} has no consolidated metadata, the list of all arrays and their metadata")
        )
    return node


def folders_of(files: Iterable[str]) -> set[str]:
    """Return the folders of the chunk files among some files; a chunk file is recognised by its name.

    Examples:
        >>> sorted(folders_of(["w/c.0.1", "w/c.0.0", "s/c", "notes/cat.0"]))
        ['s', 'w']
    """
    return {match["folder"] for match in map(_CHUNK_FILE.fullmatch, files) if match}


def _next_index(folder: str, storage: Storage) -> str:
    """Return the name of the next index, "index-" and a number; `folder` is the folder of the present index."""
    match = _INDEX_FOLDER.fullmatch(folder)
    number = int(match["number"] or 0) + 1 if match else 1
    # A late request of an earlier removal may still arrive under the next number, and mustn't replace the new index.
    more = secrets.randbelow(_NUMBERS - 1) if can(storage).late_requests else 0
    return f"index-{(number + more) % _NUMBERS}"


def _remove(storage: Storage, files: Iterable[str], folders: Iterable[str]) -> None:
    # A crafted index may name other files, so that only names that a save gives are removed.
    remove_files(storage, sorted(name for name in files if _CHUNK_FILE.fullmatch(name)))
    nodes = [f"{folder}/{NODE_FILE}" for folder in sorted(folders)]
    remove_files(storage, [*nodes, *(f"{folder}/c.0" for folder in folders if _INDEX_FOLDER.fullmatch(folder))])
    for folder in sorted(folders):
        remove_folder(storage, folder)
