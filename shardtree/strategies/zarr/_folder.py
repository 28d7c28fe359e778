"""Finding the arrays in a folder: those of zarr v2 and v3, in groups however deep, and Megatron-Core's object files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...codec import parse_json
from ...errors import CorruptCheckpoint, MetadataError, error_text
from ...mapping import ShardedObject
from ...storage import Storage
from ._array import StoredArray
from ._group import Object
from ._v2 import ARRAY_FILE, decode_v2
from ._v3 import NODE_FILE, decode_v3

_DEEPEST = 32
_LOCKS = ".sync"
_METADATA_FILES = frozenset({ARRAY_FILE, NODE_FILE, ".zattrs", ".zgroup", ".zmetadata"})
_OBJECT_SUFFIX = ".pt"

logger = logging.getLogger("shardtree")


def find_arrays(storage: Storage) -> tuple[list[StoredArray], list[Object]]:
    """Return the arrays in a folder and the folders in it, and the objects that lie in files of their own.

    Arrays of what torch has no dtype for, such as texts and dates, are left out, with a warning in the log.

    Raises:
        CorruptCheckpoint: the metadata of an array isn't sound.
    """
    arrays, objects = [], []
    for folder, names, node in _folders(storage, "", 0):
        array = _array(storage, folder, names, node)
        if array is not None:
            arrays.append(array)
        objects += _objects(storage, folder, names)
    return arrays, objects


def metadata_files(storage: Storage) -> Iterator[str]:
    """Yield the names of the files that describe arrays and groups, of zarr v2 and v3."""
    for folder, names, _ in _folders(storage, "", 0):
        for name in names:
            if name in _METADATA_FILES:
                yield f"{folder}/{name}" if folder else name


Node = dict[str, Any]


def _folders(storage: Storage, folder: str, depth: int) -> Iterator[tuple[str, tuple[str, ...], Node | None]]:
    """Yield every folder that isn't a part of an array, with the names in it and the content of its zarr.json."""
    names = storage.names(folder)
    node = read_node(storage, folder) if folder and NODE_FILE in names else None
    yield folder, names, node
    if depth == _DEEPEST or (folder and ARRAY_FILE in names) or (node is not None and node["node_type"] == "array"):
        return
    for name in names:
        inner = f"{folder}/{name}" if folder else name
        if _is_text(name) and storage.is_folder(inner):
            yield from _folders(storage, inner, depth + 1)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of a file name that aren't UTF-8
        return False
    return True


def read_node(storage: Storage, folder: str) -> Node:
    """Return the content of a folder's zarr.json.

    Raises:
        CorruptCheckpoint: it isn't that of a zarr v3 group or array.
    """
    name = f"{folder}/{NODE_FILE}" if folder else NODE_FILE
    fields = parse_json(storage.read(name), storage.where(name))
    is_node = isinstance(fields, dict) and fields.get("node_type") in ("array", "group")
    if not is_node or fields.get("zarr_format") != 3:
        what = f"open: {storage.where(name)!r} is not sound"
        raise CorruptCheckpoint(error_text(what, expected="the metadata of a zarr v3 group or array"))
    return dict(fields)


def _array(storage: Storage, folder: str, names: tuple[str, ...], node: Node | None) -> StoredArray | None:
    """Return the array that a folder is, None if it is none."""
    if folder and ARRAY_FILE in names:
        name = f"{folder}/{ARRAY_FILE}"
        if folder.endswith(_LOCKS) and not storage.length(name):
            return None  # locks of zarr's ProcessSynchronizer
        array = decode_v2(storage.read(name), folder, storage.where(name))
    elif node is not None and node["node_type"] == "array":
        array = decode_v3(node, folder, storage.where(f"{folder}/{NODE_FILE}"))
    else:
        return None
    if array is None:
        logger.warning("open: %s is left out: torch has no dtype for it", storage.where(folder))
    return array


def _objects(storage: Storage, folder: str, names: tuple[str, ...]) -> list[Object]:
    files = {}
    for name in names:
        unique_key = f"{folder}/{name.removesuffix(_OBJECT_SUFFIX)}"
        if folder and name.endswith(_OBJECT_SUFFIX) and _is_unique_key(unique_key):
            length = storage.length(f"{folder}/{name}")
            files.update({} if length is None else {unique_key: (f"{folder}/{name}", length)})
    whole = whole_keys(list(files))
    return [(whole[unique_key], name, length) for unique_key, (name, length) in files.items()]


def whole_keys(unique_keys: Sequence[str]) -> dict[str, str]:
    """Return each unique key as it was meant: old releases left out the grid's last size.

    The cells tell it, where all of them are there.

    Args:
        unique_keys: of all cells of one object.

    Examples:
        >>> whole_keys(["rng/shard_0.0_1", "rng/shard_0.1_1"])
        {'rng/shard_0.0_1': 'rng/shard_0.0_1.2', 'rng/shard_0.1_1': 'rng/shard_0.1_1.2'}
        >>> whole_keys(["rng/shard_0.1_1"])
        {'rng/shard_0.1_1': 'rng/shard_0.1_1'}
    """
    items = {unique_key: ShardedObject.empty_from_unique_key(unique_key) for unique_key in unique_keys}
    shapes = {item.global_shape for item in items.values()}
    shape = min(shapes, default=())
    whole = (*shape[:-1], 1 + max((item.global_offset[-1] for item in items.values() if item.global_offset), default=0))
    if len(shapes) != 1 or shape[-1:] != (-1,) or prod(whole) != len(items):
        return {unique_key: unique_key for unique_key in unique_keys}
    return {unique_key: replace(item, global_shape=whole).unique_key for unique_key, item in items.items()}


def _is_unique_key(text: str) -> bool:
    try:
        ShardedObject.empty_from_unique_key(text)
    except MetadataError:
        return False
    return True
