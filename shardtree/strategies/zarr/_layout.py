"""How a save cuts tensors into chunk files: along the ranks' shards, if these are a regular grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any
from urllib.parse import quote

import numpy as np

from ...codec import check_storable
from ...errors import IntegrityError, error_text
from ...geometry import Column, row_major_strides, volumes
from ...layouts import ShardColumns, select_rows
from ...storage import digest
from ._array import Shape, StoredArray

_UNQUOTED = "+=@,()[]"
_LONGEST = 200  # file systems allow 255 bytes in a name, and a temporary name is longer
_RESERVED = {"zarr.json", "metadata.json"}


def array_name(key: str) -> str:
    """Return the folder of a key's array: the key itself if its characters are harmless.

    Other characters are percent-encoded, as in a URL, and so is the first one of a name that is reserved or hidden. A
    name longer than 200 characters is cut, and ends with a hash of the key.

    Examples:
        >>> array_name("decoder.layers.0.weight"), array_name("a/b"), array_name(".."), array_name("_shardtree")
        ('decoder.layers.0.weight', 'a%2Fb', '%2E.', '%5Fshardtree')
        >>> array_name("x" * 300)[170:]
        'xxxxxxxxxxxxx~a5d1b4607dc83554'
    """
    name = quote(key, safe=_UNQUOTED)
    if name[0] in "._" or name in _RESERVED:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 17]}~{digest(key.encode())}"


@dataclass(frozen=True, slots=True, eq=False)
class ArrayLayout:
    """One tensor's array, and which shard goes to which of its files.

    Attributes:
        array: as its metadata will describe it.
        rows: of its shards among all that are written, those with elements, int64 (shards,).
        columns: these shards, on the tensor's own axes.
        cells: the cells of the grid that get a file, in row-major order, int64 (files, axes).
        file: the number of each shard's file, int64 (shards,).
        writer: the rank that writes each file, -1 if several do, int64 (files,).
        metadata_writer: the rank that writes the metadata.
    """

    array: StoredArray
    rows: Column
    columns: ShardColumns
    cells: Column
    file: Column
    writer: Column
    metadata_writer: int


def array_layouts(written: ShardColumns, rank: int | None = None) -> Iterator[ArrayLayout]:
    """Yield the layout of each tensor's array. Every rank computes the same one, so that none is exchanged.

    Args:
        written: the shards of all ranks, each once, in the replica that is written.
        rank: only tensors of which this rank writes something; None for all.

    Raises:
        IntegrityError: a file would have gaps, or two keys would have one name.
        UnsupportedValue: a dtype can't be stored.
    """
    numbers = np.unique(written.key if rank is None else written.key[written.rank == rank])
    # All rows of these tensors, tensor by tensor: a rank's share of the work doesn't grow with the others' tensors.
    rows = np.flatnonzero(np.isin(written.key, numbers))
    order = rows[np.argsort(written.key[rows], kind="stable")]
    begins = np.searchsorted(written.key[order], numbers).tolist()
    names: dict[str, str] = {}
    for number, (begin, end) in zip(numbers.tolist(), pairwise([*begins, len(order)]), strict=True):
        key = written.keys[number]
        other = names.setdefault(array_name(key), key)
        if other != key:
            what = f"save: tensors {other!r} and {key!r} would lie in the same folder"
            raise IntegrityError(error_text(what, fix="Rename one."))
        yield _array_layout(written, number, order[begin:end])


def _array_layout(written: ShardColumns, number: int, rows: Column) -> ArrayLayout:
    key, kind = written.keys[number], written.kinds[number]
    check_storable(kind.dtype, f"save: {key!r}")
    metadata_writer = int(written.rank[rows[0]])
    # A tensor without elements has no chunk file, only metadata.
    rows = rows[written.elements[rows] > 0]
    columns = _own_axes(select_rows(written, rows), max(1, len(kind.global_shape)))
    box = kind.global_shape or (1,)
    cell = _regular_cell(columns, box)
    # No regular grid: one chunk that is the whole tensor, to which each rank writes its bytes.
    step, inner = _file_shape(columns, box, cell) if cell else (tuple(max(1, size) for size in box), None)
    shapes = (step, inner) if kind.global_shape else ((), None)
    array = StoredArray(array_name(key), key, kind.dtype, kind.global_shape, shapes[0], inner=shapes[1])
    cells, file = _cells(columns, step, array.counts)
    _check_filled(array, columns, cells, file)
    return ArrayLayout(array, rows, columns, cells, file, _writers(columns.rank, file, len(cells)), metadata_writer)


def _cells(columns: ShardColumns, step: Shape, counts: Shape) -> tuple[Column, Column]:
    """Return the cells of the files that shards go to, in row-major order, and the number of each shard's file."""
    place = columns.offset // np.array(step, dtype=np.int64)
    strides = row_major_strides(np.array([counts], dtype=np.int64))
    _, first, file = np.unique((place * strides).sum(axis=1), return_index=True, return_inverse=True)
    return place[first], file.reshape(-1)


def _own_axes(columns: ShardColumns, axes: int) -> ShardColumns:
    words: dict[str, Any] = {"offset": columns.offset[:, -axes:], "shape": columns.shape[:, -axes:]}
    return ShardColumns(**{name: words.get(name, getattr(columns, name)) for name in ShardColumns.__slots__})


def _regular_cell(columns: ShardColumns, box: Shape) -> Shape | None:
    """Return the shape of the cells if all shards, or the boxes of flat ones, are a regular grid's; else None."""
    if not len(columns):
        return None
    cell = columns.shape.max(axis=0)
    at_edge = np.minimum(cell, np.array(box, dtype=np.int64) - columns.offset)
    regular = (columns.offset % cell == 0).all() and (columns.shape == at_edge).all()
    return tuple(cell.tolist()) if regular else None


def _file_shape(columns: ShardColumns, box: Shape, cell: Shape) -> tuple[Shape, Shape | None]:
    """Return the shape of a file and of its inner chunks, None for a single one."""
    # Neighbouring cells of one rank share a file: stacked layers would be a small file for each layer otherwise.
    counts = tuple(-(-size // step) for size, step in zip(box, cell, strict=True))
    whole = (columns.start < 0) | (columns.stop - columns.start == volumes(columns.shape))
    if len(columns) < 2 or not whole.all() or prod(counts) != len(columns):
        return cell, None
    writers = np.empty(counts, dtype=np.int64)
    writers[tuple((columns.offset // np.array(cell)).T)] = columns.rank
    factors = _common_blocks(writers)
    if prod(factors) == 1:
        return cell, None
    return tuple(size * factor for size, factor in zip(cell, factors, strict=True)), cell


def _common_blocks(writers: np.ndarray[Any, np.dtype[np.int64]]) -> Shape:
    """Return the shape of equal blocks of a grid in each of which all cells have one value; axis by axis the largest.

    Examples:
        >>> _common_blocks(np.array([[0, 1], [0, 1], [2, 2], [2, 2]]))
        (2, 1)
    """
    factors = []
    for axis, size in enumerate(writers.shape):
        for factor in (divisor for divisor in range(size, 0, -1) if size % divisor == 0):
            blocks = writers.reshape(*writers.shape[:axis], size // factor, factor, *writers.shape[axis + 1 :])
            first = blocks.take([0], axis=axis + 1)
            if (blocks == first).all():
                writers = first.squeeze(axis + 1)
                factors.append(factor)
                break
    return tuple(factors)


def _check_filled(array: StoredArray, columns: ShardColumns, cells: Column, file: Column) -> None:
    """Raise unless every file that is written is written whole."""
    # To other readers a gap would be zeros, without an error.
    step = np.array(array.step, dtype=np.int64)
    room = volumes(np.minimum(step, np.array(array.box, dtype=np.int64) - cells * step))
    found = np.bincount(file, weights=columns.elements, minlength=len(cells)).astype(np.int64)
    if (found != room).any():
        first = int(np.flatnonzero(found != room)[0])
        what = f"save: the shards of {array.key!r} leave gaps in chunk {tuple(cells[first].tolist())}"
        fix = "Save all of the tensor, or shards of a regular grid."
        raise IntegrityError(error_text(what, found=f"{found[first]} elements", expected=int(room[first]), fix=fix))


def _writers(rank: Column, file: Column, files: int) -> Column:
    low, high = np.full(files, np.iinfo(np.int64).max), np.full(files, -1, dtype=np.int64)
    np.minimum.at(low, file, rank)
    np.maximum.at(high, file, rank)
    return np.where(low == high, low, -1)
