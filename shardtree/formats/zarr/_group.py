"""The index of a folder of zarr arrays, for planning loads as for other formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ...errors import CorruptCheckpoint, error_text
from ...kit import (
    Checkpoint,
    Column,
    Index,
    ShardColumns,
    Storage,
    StoredFile,
    TensorKind,
    build_index,
    files_in,
    int64,
    is_folder,
    is_unicode,
    parse_json,
    stored_columns,
    volumes,
    widen,
)
from ..manifest import MANIFEST_FILE
from ..unique_keys import is_object
from ._array import Shape, StoredArray
from ._cells import (
    MOST_CELLS,
    count_pieces,
    inner_cells,
    inner_counts,
    missing_cells,
    pieces,
    read_shard_index,
    stored_cells,
)
from ._extensions import check_group
from ._metadata import ARRAY_FILE, NODE_FILE, decode_v2, decode_v3, whole_keys

Object = tuple[str, str, int]
"""An object's unique key, the name of its file, and its length in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The content of a folder of arrays.

    Attributes:
        index: Index of the tensors and objects. Some of its files are virtual: their bytes are decoded or filled in.
        arrays: All arrays.
        sources: Array and cell of each virtual file, by the file's number. The cell is that of a chunk file, which must
            be decoded, or None for a virtual file that is full of the fill value.
        untaken: Reason why an array or a file isn't in the index, by its name.
        gaps: Reason why elements without a chunk have no value, by the tensor's key.
    """

    index: Index
    arrays: tuple[StoredArray, ...]
    sources: dict[int, tuple[StoredArray, Shape | None]]
    untaken: Mapping[str, str] = field(default_factory=dict)
    gaps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Boxes of a tensor, and their places in files.

    Attributes:
        offset: Offset of each box in the tensor, int64 (rows, axes).
        shape: Shape of each box, int64 (rows, axes).
        file: Number of each box's file, int64 (rows,).
        byte: Offset of each box in its file, in bytes, int64 (rows,).
    """

    offset: Column
    shape: Column
    file: Column
    byte: Column


@dataclass(slots=True, eq=False)
class _Files:
    room: int  # All arrays together may have this many further cells without a file.
    files: list[StoredFile] = field(default_factory=list)
    sources: dict[int, tuple[StoredArray, Shape | None]] = field(default_factory=dict)

    def add(self, names: Sequence[str], lengths: Sequence[int]) -> Column:
        """Add files, and return their numbers."""
        first = len(self.files)
        self.files += [StoredFile(name, length) for name, length in zip(names, lengths, strict=True)]
        return np.arange(first, len(self.files), dtype=np.int64)


def read_group(
    storage: Storage,
    arrays: Sequence[StoredArray],
    objects: Sequence[Object] = (),
    untaken: Mapping[str, str] | None = None,
) -> Group:
    """Return the content of a folder, after listing its chunk files.

    Args:
        storage: Storage of the folder.
        arrays: Arrays, as their metadata describes them.
        objects: Objects that have files of their own.
        untaken: Reason why an array or a file isn't in `arrays` or `objects`, by its name.

    Raises:
        CorruptCheckpoint: Two arrays have one key, or a file with several chunks isn't sound.
    """
    # All boxes get as many axes as the tensor with most axes.
    files = _Files(MOST_CELLS // max((len(array.box) for array in arrays), default=1))
    # Two folders may decode to one key if another program escapes names differently.
    arrays = sorted(arrays, key=lambda array: array.key)
    twice = [repr(array.key) for array, following in pairwise(arrays) if array.key == following.key]
    if twice:
        heading, fix = f"open: two arrays in {storage.where()!r} have the same key", "Rename the folder of one of them."
        raise CorruptCheckpoint(error_text(heading, offenders=twice, fix=fix))
    rows = [_array_rows(storage, array, files) for array in arrays]
    numbers = files.add([name for _, name, _ in objects], [length for *_, length in objects]).tolist()
    object_rows = [(key, number, 0, length) for number, (key, _, length) in zip(numbers, objects, strict=True)]
    index = build_index(*array_columns(arrays, rows), files=files.files, objects=object_rows)
    gaps = {array.key: array.without_fill for array in arrays if array.without_fill}
    return Group(index, tuple(arrays), files.sources, untaken or {}, gaps)


def array_columns(arrays: Sequence[StoredArray], rows: Sequence[Rows]) -> tuple[ShardColumns, Column, Column]:
    """Return the boxes of all arrays as columns, the number of each box's file, and the box's offset in the file.

    Args:
        arrays: Arrays, sorted by key.
        rows: Boxes of each array, with their places in files.
    """
    axes = max((len(array.box) for array in arrays), default=1)
    counts = [len(array_rows.file) for array_rows in rows]
    empty = np.zeros((0, axes), dtype=np.int64)
    columns = stored_columns(
        {array.key: TensorKind(array.dtype, array.shape, 0) for array in arrays},
        np.repeat(np.arange(len(arrays)), counts),
        np.concatenate([empty, *(widen(array_rows.offset, axes, 0) for array_rows in rows)]),
        np.concatenate([empty, *(widen(array_rows.shape, axes, 1) for array_rows in rows)]),
    )
    file = np.concatenate([int64([]), *(array_rows.file for array_rows in rows)])
    byte = np.concatenate([int64([]), *(array_rows.byte for array_rows in rows)])
    return columns, file, byte


def _array_rows(storage: Storage, array: StoredArray, files: _Files) -> Rows:
    cells = stored_cells(storage, array)
    # Edges may cut a chunk into as many runs as it has elements. Such files are read whole, like compressed ones, and
    # listed as virtual files of plain bytes, so that plans needn't know codecs.
    too_fine = count_pieces(cells * np.array(array.step), array.step, array.box) > MOST_CELLS
    if not array.raw or too_fine:
        parts = [_decoded_rows(array, cells, files)]
    elif array.inner is not None:
        parts = _sharded_rows(storage, array, cells, files)
    else:
        names = [array.file_name(tuple(cell)) for cell in cells.tolist()]
        parts = [chunk_rows(array, cells, array.step, files.add(names, [array.file_bytes] * len(names)))]
    if array.fill is not None:
        absent = missing_cells(array, cells, files.room * len(array.box))
        files.room -= len(absent)
        parts.append(_filled_rows(array, absent, files, array.step))
    return _join(parts, len(array.box))


def chunk_rows(array: StoredArray, cells: Column, step: Shape, file: Column, begin: Column | None = None) -> Rows:
    """Return the boxes of chunks that are plain row-major bytes, and their places in files.

    Args:
        array: Array of the chunks.
        cells: Cell of each chunk in the grid of all chunks, int64 (chunks, axes).
        step: Shape of the chunks, and so of the grid's cells.
        file: Number of each chunk's file, int64 (chunks,).
        begin: Offset of each chunk in its file, in bytes, int64 (chunks,); 0 by default.
    """
    boxes = pieces(cells * np.array(step, dtype=np.int64), step, array.box)
    byte = boxes.element * array.dtype.itemsize
    return Rows(boxes.offset, boxes.shape, file[boxes.row], byte if begin is None else byte + begin[boxes.row])


def _sharded_rows(storage: Storage, array: StoredArray, cells: Column, files: _Files) -> list[Rows]:
    parts, inner = [], array.inner or ()
    counts = np.array([-(-size // step) for size, step in zip(array.shape, inner, strict=True)])
    for cell in cells:
        name = array.file_name(tuple(cell.tolist()))
        numbers, begin = read_shard_index(storage, array, name)
        file = files.add([name], [storage.length(name) or 0])
        places = inner_cells(array, cell, numbers)
        # A file at an edge may have inner chunks beyond it, which have no element of the tensor.
        inside = (places < counts).all(axis=1)
        parts.append(chunk_rows(array, places[inside], inner, np.repeat(file, inside.sum()), begin[inside]))
        if array.fill is not None:
            absent = np.setdiff1d(np.arange(prod(inner_counts(array))), numbers)
            places = inner_cells(array, cell, absent)
            parts.append(_filled_rows(array, places[(places < counts).all(axis=1)], files, inner))
    return parts


def _decoded_rows(array: StoredArray, cells: Column, files: _Files) -> Rows:
    offset = cells * np.array(array.step, dtype=np.int64)
    shape = np.minimum(np.array(array.step), np.array(array.box) - offset)
    places = [tuple(cell) for cell in cells.tolist()]
    lengths = (volumes(shape) * array.dtype.itemsize).tolist()
    file = files.add([array.file_name(place) for place in places], lengths)
    files.sources.update({number: (array, place) for number, place in zip(file.tolist(), places, strict=True)})
    return Rows(offset, shape, file, np.zeros(len(file), dtype=np.int64))


def _filled_rows(array: StoredArray, cells: Column, files: _Files, step: Shape) -> Rows:
    """Return the boxes of chunks that aren't stored. They share one virtual file, which is full of the fill value."""
    offset = cells * np.array(step, dtype=np.int64)
    shape = np.minimum(np.array(step), np.array(array.box) - offset)
    file = np.zeros(len(cells), dtype=np.int64)
    if len(cells):
        file += files.add([f"{array.name}#fill"], [prod(step) * array.dtype.itemsize])
        files.sources[int(file[0])] = (array, None)
    return Rows(offset, shape, file, np.zeros(len(cells), dtype=np.int64))


def _join(parts: Sequence[Rows], axes: int) -> Rows:
    empty = np.zeros((0, axes), dtype=np.int64)
    return Rows(
        np.concatenate([empty, *(part.offset for part in parts)]),
        np.concatenate([empty, *(part.shape for part in parts)]),
        np.concatenate([int64([]), *(part.file for part in parts)]),
        np.concatenate([int64([]), *(part.byte for part in parts)]),
    )


# This section finds arrays of zarr v2 and v3 in a folder and in nested groups, and Megatron-Core's object files.

_DEEPEST = 32
"""Upper bound of the depth of nested groups."""
_LOCKS = ".sync"
_METADATA_FILES = (NODE_FILE, ARRAY_FILE, ".zattrs", ".zgroup", ".zmetadata")
_OBJECT_SUFFIX = ".pt"


def find_arrays(storage: Storage) -> tuple[list[StoredArray], list[Object], dict[str, str]]:
    """Return the arrays and objects in a folder and its subfolders, and the reasons why others are left out.

    Left out are arrays of dtypes that torch lacks, such as strings and dates, and ``.pt`` files whose names aren't the
    unique keys of objects. Each reason is stored under the name of the array's folder or of the file.

    Raises:
        CorruptCheckpoint: The metadata of an array isn't sound.
    """
    arrays, objects, untaken = [], [], dict[str, str]()
    for folder, names, node in _folders(storage, "", 0):
        if _is_array(storage, folder, names, node):
            array = _array(storage, folder, names, node)
            if array is not None:
                arrays.append(array)
            else:
                untaken[folder] = "torch has no such dtype"
        folder_objects, others = _objects(storage, folder, names)
        objects += folder_objects
        untaken |= dict.fromkeys(others, "its name is not that of a sharded object")
    return arrays, objects, untaken


def metadata_files(storage: Storage) -> Iterator[str]:
    """Yield the names of the files that describe arrays and groups, of zarr v2 and v3."""
    for folder, names, _ in _folders(storage, "", 0):
        for name in names:
            if name in _METADATA_FILES:
                yield f"{folder}/{name}" if folder else name


Node = dict[str, Any]


def _folders(storage: Storage, folder: str, depth: int) -> Iterator[tuple[str, tuple[str, ...], Node | None]]:
    """Yield every folder that isn't part of an array, with the names in it and the content of its zarr.json."""
    names = storage.names(folder)
    node = read_node(storage, folder) if NODE_FILE in names and (folder or _is_v3(storage, names)) else None
    node = node if folder else None  # The outermost folder is a group, whatever its metadata says.
    yield folder, names, node
    if depth == _DEEPEST or (folder and ARRAY_FILE in names) or (node is not None and node["node_type"] == "array"):
        return
    for name in names:
        inner = f"{folder}/{name}" if folder else name
        if is_unicode(name) and is_folder(storage, inner):
            yield from _folders(storage, inner, depth + 1)


def _is_v3(storage: Storage, names: Sequence[str]) -> bool:
    """Return whether the outermost zarr.json is metadata of zarr v3.

    The name may also belong to a stray file in a v2 group, or to the folder of a tensor.
    """
    return ".zgroup" not in names and not is_folder(storage, NODE_FILE)


def read_node(storage: Storage, folder: str) -> Node:
    """Return the content of a folder's zarr.json.

    Raises:
        CorruptCheckpoint: The file isn't the metadata of a zarr v3 group or array.
        UnsupportedValue: A group has an unknown extension.
    """
    name = f"{folder}/{NODE_FILE}" if folder else NODE_FILE
    fields = parse_json(storage.read(name), storage.where(name))
    is_node = isinstance(fields, dict) and fields.get("node_type") in ("array", "group")
    if not is_node or fields.get("zarr_format") != 3:
        heading, fix = (
            f"open: {storage.where(name)!r} has invalid zarr metadata",
            "The file was damaged; load another checkpoint.",
        )
        raise CorruptCheckpoint(error_text(heading, expected="the metadata of a zarr v3 group or array", fix=fix))
    if fields["node_type"] == "group":
        check_group(fields, repr(storage.where(name)))
    return dict(fields)


def _is_array(storage: Storage, folder: str, names: tuple[str, ...], node: Node | None) -> bool:
    if folder and ARRAY_FILE in names:
        # Locks of zarr's ProcessSynchronizer look like arrays with empty metadata.
        return not folder.endswith(_LOCKS) or bool(storage.length(f"{folder}/{ARRAY_FILE}"))
    return node is not None and node["node_type"] == "array"


def _array(storage: Storage, folder: str, names: tuple[str, ...], node: Node | None) -> StoredArray | None:
    """Return the array in a folder; None if torch lacks its dtype."""
    if ARRAY_FILE in names:
        name = f"{folder}/{ARRAY_FILE}"
        return decode_v2(storage.read(name), folder, storage.where(name))
    return decode_v3(node or {}, folder, storage.where(f"{folder}/{NODE_FILE}"))


def _objects(storage: Storage, folder: str, names: tuple[str, ...]) -> tuple[list[Object], list[str]]:
    """Return the objects in a folder, and the names of files that have an object's suffix but no object's name."""
    files, others = {}, []
    for name in names if folder else ():
        length = storage.length(f"{folder}/{name}") if name.endswith(_OBJECT_SUFFIX) else None
        unique_key = f"{folder}/{name.removesuffix(_OBJECT_SUFFIX)}"
        if length is not None and is_object(unique_key):
            files[unique_key] = (f"{folder}/{name}", length)
        elif length is not None:
            others.append(f"{folder}/{name}")
    whole = whole_keys(list(files))
    return [(whole[unique_key], name, length) for unique_key, (name, length) in files.items()], others


# This section lists the files of a folder of zarr arrays: those that are needed, and those that exist.

_MOST_MISSING = 1000
"""Upper bound of the names of an array's missing chunks."""


def needed_files(storage: Storage, group: Group) -> dict[str, int]:
    """Return the files that the group's tensors and objects need: minimum length by name, 0 if it is not known.

    A missing chunk's file is needed only if its array has no fill value; arrays that Megatron-Core wrote have none.
    """
    needed: dict[str, int] = {}
    names = group.index.file_names()
    for number, (name, length) in enumerate(zip(names, group.index.file_length.tolist(), strict=True)):
        if number not in group.sources:
            needed[name] = length
        elif group.sources[number][1] is not None:  # The virtual file of a fill value isn't needed.
            needed[name] = 0  # Only the codec of a packed chunk knows its length.
    for array in group.arrays:
        if array.fill is None:
            absent = missing_cells(array, stored_cells(storage, array))[:_MOST_MISSING].tolist()
            needed |= {array.file_name(tuple(cell)): 0 for cell in absent}
    return needed


_CHUNK_PART = re.compile(r"c|(c\.)?\d+(\.\d+)*")


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the arrays' metadata and chunks, of the groups' metadata, and of objects' files.

    Raises:
        CorruptCheckpoint: The metadata of an array isn't sound.
    """
    storage = checkpoint.storage
    arrays, objects, untaken = find_arrays(storage)
    folders = {array.name for array in arrays} | set(filter(partial(is_folder, storage), untaken))
    groups = {str(above) for name in folders for above in PurePosixPath(name).parents} - {"."}
    nodes = [f"{folder}/{node}" for folder in sorted(folders | groups) for node in _METADATA_FILES]
    chunks = [name for folder in sorted(folders) for name in files_in(storage, folder, _CHUNK_PART.fullmatch)]
    return (*_METADATA_FILES, MANIFEST_FILE, *nodes, *chunks, *(name for _, name, _ in objects))
