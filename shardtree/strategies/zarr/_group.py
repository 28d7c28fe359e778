"""A folder of zarr arrays, as an index that loads can plan on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np

from ...errors import CorruptCheckpoint, error_text
from ...geometry import Column, volumes, widen
from ...layouts import ShardColumns, TensorKind
from ...storage import Storage, StoredFile
from ..index import Index, build_index
from ._array import Shape, StoredArray
from ._cells import MOST_CELLS, count_pieces, missing_cells, pieces, stored_cells
from ._shard_index import inner_counts, read_shard_index

Object = tuple[str, str, int]
"""An object's unique key, the name of its file, and its length in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What a folder of arrays holds.

    Attributes:
        index: of its tensors and objects; some of its files are made when they are read.
        arrays: all of them.
        made: for each file that has to be decoded, or that isn't stored, by its number: array and place in its grid,
            None for a place that has the fill value.
    """

    index: Index
    arrays: tuple[StoredArray, ...]
    made: dict[int, tuple[StoredArray, Shape | None]]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Boxes of one tensor, and where they lie.

    Attributes:
        offset: int64 (rows, axes).
        shape: int64 (rows, axes).
        file: number of the file, int64 (rows,).
        byte: int64 (rows,).
    """

    offset: Column
    shape: Column
    file: Column
    byte: Column


@dataclass(slots=True, eq=False)
class _Files:
    room: int  # how many places without a file there may be
    files: list[StoredFile] = field(default_factory=list)
    made: dict[int, tuple[StoredArray, Shape | None]] = field(default_factory=dict)

    def add(self, names: Sequence[str], lengths: Sequence[int]) -> Column:
        """Return the numbers of new files."""
        first = len(self.files)
        self.files += [StoredFile(name, length) for name, length in zip(names, lengths, strict=True)]
        return np.arange(first, len(self.files), dtype=np.int64)


def read_group(storage: Storage, arrays: Sequence[StoredArray], objects: Sequence[Object] = ()) -> Group:
    """Return what a folder holds, after a look at which chunk files are there.

    Args:
        storage: the folder.
        arrays: what the metadata of its arrays says.
        objects: files that each hold one object.

    Raises:
        CorruptCheckpoint: two arrays say that they are the same tensor, or a file with several chunks isn't sound.
    """
    # All boxes are held with as many axes as the tensor with most of them has.
    files = _Files(MOST_CELLS // max((len(array.box) for array in arrays), default=1))
    ordered = sorted(arrays, key=lambda array: array.key)
    twice = [repr(one.key) for one, other in pairwise(ordered) if one.key == other.key]
    if twice:
        raise CorruptCheckpoint(error_text(f"open: {storage.where()!r} has tensors twice", offenders=twice))
    rows = [_array_rows(storage, array, files) for array in ordered]
    numbers = files.add([name for _, name, _ in objects], [length for *_, length in objects]).tolist()
    found = [(key, number, 0, length) for number, (key, _, length) in zip(numbers, objects, strict=True)]
    columns = array_columns(ordered, rows)
    file, byte = (np.concatenate([_none(), *(getattr(one, name) for one in rows)]) for name in ("file", "byte"))
    index = build_index(columns, file, byte, files=files.files, objects=found)
    return Group(index, tuple(ordered), files.made)


def array_columns(arrays: Sequence[StoredArray], rows: Sequence[Rows]) -> ShardColumns:
    """Return the rows of arrays, which are sorted by key, as columns."""
    axes = max((len(array.box) for array in arrays), default=1)
    counts = [len(one.file) for one in rows]
    total = sum(counts)
    empty = np.zeros((0, axes), dtype=np.int64)
    return ShardColumns(
        keys=tuple(array.key for array in arrays),
        kinds=tuple(TensorKind(array.dtype, array.shape, 0) for array in arrays),
        key=np.repeat(np.arange(len(arrays)), counts),
        offset=np.concatenate([empty, *(widen(one.offset, axes, 0) for one in rows)]),
        shape=np.concatenate([empty, *(widen(one.shape, axes, 1) for one in rows)]),
        start=np.full(total, -1, dtype=np.int64),
        stop=np.full(total, -1, dtype=np.int64),
        rank=np.zeros(total, dtype=np.int64),
        main=np.ones(total, dtype=np.bool_),
    )


def _array_rows(storage: Storage, array: StoredArray, files: _Files) -> Rows:
    cells = stored_cells(storage, array)
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
    return _joined(parts, len(array.box))


def chunk_rows(array: StoredArray, cells: Column, step: Shape, file: Column, begin: Column | None = None) -> Rows:
    """Return the boxes of plain chunks.

    Args:
        array: that they are of.
        cells: their places in a grid of that step, int64 (chunks, axes).
        step: the chunks' shape.
        file: the number of each one's file, int64 (chunks,).
        begin: the byte at which each begins in it, int64 (chunks,); 0 by default.
    """
    found = pieces(cells * np.array(step, dtype=np.int64), step, array.box)
    byte = found.element * array.dtype.itemsize
    return Rows(found.offset, found.shape, file[found.row], byte if begin is None else byte + begin[found.row])


def inner_cells(array: StoredArray, cell: Column, numbers: Column) -> Column:
    """Return the places, in the grid of inner chunks, of some of one file's chunks, int64 (chunks, axes).

    Args:
        array: that they are of.
        cell: the file's place in the grid of files, int64 (axes,).
        numbers: of the chunks in the file, int64 (chunks,).
    """
    counts = np.array(inner_counts(array), dtype=np.int64)
    strides = np.append(np.cumprod(counts[:0:-1])[::-1], 1).astype(np.int64)
    places: Column = cell * counts + numbers[:, None] // strides % counts
    return places


def _sharded_rows(storage: Storage, array: StoredArray, cells: Column, files: _Files) -> list[Rows]:
    parts, inner = [], array.inner or ()
    counts = np.array([-(-size // step) for size, step in zip(array.shape, inner, strict=True)])
    for cell in cells:
        name = array.file_name(tuple(cell.tolist()))
        numbers, begin = read_shard_index(storage, array, name)
        file = files.add([name], [storage.length(name) or 0])
        places = inner_cells(array, cell, numbers)
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
    files.made.update({number: (array, place) for number, place in zip(file.tolist(), places, strict=True)})
    return Rows(offset, shape, file, np.zeros(len(file), dtype=np.int64))


def _filled_rows(array: StoredArray, cells: Column, files: _Files, step: Shape) -> Rows:
    """Return the boxes of chunks that aren't stored: all lie in one file, which is made of the fill value."""
    offset = cells * np.array(step, dtype=np.int64)
    shape = np.minimum(np.array(step), np.array(array.box) - offset)
    file = np.zeros(len(cells), dtype=np.int64)
    if len(cells):
        file += files.add([f"{array.name}#fill"], [prod(step) * array.dtype.itemsize])
        files.made[int(file[0])] = (array, None)
    return Rows(offset, shape, file, np.zeros(len(cells), dtype=np.int64))


def _joined(parts: Sequence[Rows], axes: int) -> Rows:
    empty = np.zeros((0, axes), dtype=np.int64)
    return Rows(
        np.concatenate([empty, *(part.offset for part in parts)]),
        np.concatenate([empty, *(part.shape for part in parts)]),
        np.concatenate([_none(), *(part.file for part in parts)]),
        np.concatenate([_none(), *(part.byte for part in parts)]),
    )


def _none() -> Column:
    return np.zeros(0, dtype=np.int64)
