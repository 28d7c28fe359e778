"""Boxes in columns: rows of (offset, shape), int64, right-aligned to one number of axes; and flat ranges of boxes.

A box of fewer axes is padded on the left with offset 0 and shape 1, so that tensors of any rank share one column and
row-major order isn't changed by the padding. There is always at least one axis: a scalar is the box ``[0], [1]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
Record = TypeVar("Record")


def box_column(rows: Sequence[Sequence[int]], fill: int, axes: int = 0) -> Column:
    """Return rows of unequal length as one right-aligned int64 column.

    Args:
        rows: shapes or offsets, each of any number of axes.
        fill: the value for axes that a row doesn't have: 0 for offsets, 1 for shapes.
        axes: the least number of axes of the result.

    Returns:
        int64 (rows, axes).

    Examples:
        >>> box_column([(4, 2), (), (7,)], fill=1).tolist()
        [[4, 2], [1, 1], [1, 7]]
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = max(1, axes, int(lengths.max(initial=0)))
    # One pass over all numbers, instead of an array for each row.
    numbers = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
    if numbers.size == len(rows) * width:
        return numbers.reshape(-1, width)
    column = np.full((len(rows), width), fill, dtype=np.int64)
    column[np.arange(width) >= width - lengths[:, None]] = numbers
    return column


def widen(column: Column, axes: int, fill: int) -> Column:
    """Return a column of boxes with at least the given number of axes, padded on the left.

    Examples:
        >>> widen(np.array([[3, 4]]), 3, fill=1).tolist()
        [[1, 3, 4]]
    """
    missing = axes - column.shape[1]
    return column if missing <= 0 else np.pad(column, ((0, 0), (missing, 0)), constant_values=fill)


def narrowed(column: NDArray[Any]) -> NDArray[Any]:
    """Return integers in the narrowest type that holds them all, for a message; anything else unchanged.

    Examples:
        >>> [narrowed(np.array(values)).dtype.name for values in ([-1, 300], [0, 255], [2**32], [True])]
        ['int16', 'uint8', 'int64', 'bool']
    """
    if column.dtype != np.int64:
        return column
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    kinds = (np.int8, np.int16, np.int32) if low < 0 else (np.uint8, np.uint16, np.uint32)
    found = next((kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max), np.int64)
    return column.astype(found, copy=False)


def as_int64(column: NDArray[Any]) -> NDArray[Any]:
    """Return what `narrowed` got.

    Examples:
        >>> as_int64(narrowed(np.array([1, 2]))).dtype, as_int64(np.array([True])).dtype
        (dtype('int64'), dtype('bool'))
    """
    return column if column.dtype == np.bool_ else column.astype(np.int64)


def box_slices(offset: Column, shape: Column, axes: int) -> tuple[slice, ...]:
    """Return one row's box as slices, without the axes that `widen` added.

    Args:
        offset: int64 (axes or more,).
        shape: likewise.
        axes: how many the box has of its own.

    Examples:
        >>> box_slices(np.array([0, 3, 4]), np.array([1, 2, 2]), 2)
        (slice(3, 5, None), slice(4, 6, None))
    """
    spans = zip(offset.tolist(), shape.tolist(), strict=True)
    return tuple(slice(low, low + size) for low, size in spans)[offset.size - axes :]


def volumes(shape: Column) -> Column:
    """Return the number of elements of each box.

    Examples:
        >>> volumes(np.array([[4, 2], [3, 0]])).tolist()
        [8, 0]
    """
    product = np.ones(shape.shape[0], dtype=np.int64)
    for axis in range(shape.shape[1]):  # NumPy's `prod` takes ten times as long for rows of two or three
        product *= shape[:, axis]
    return product


def row_major_strides(shape: Column) -> Column:
    """Return, for each box and axis, how many elements apart neighbours along that axis are.

    Examples:
        >>> row_major_strides(np.array([[4, 2, 3]])).tolist()
        [[6, 3, 1]]
    """
    strides = np.ones_like(shape)
    np.cumprod(shape[:, :0:-1], axis=1, out=strides[:, -2::-1])
    return strides


def intersect(
    left_offset: Column, left_shape: Column, right_offset: Column, right_shape: Column
) -> tuple[Column, Column]:
    """Return the boxes that rows of two columns have in common, as offsets and shapes.

    Rows that have nothing in common get a shape with a zero in it.

    Examples:
        >>> offset, shape = intersect(*(np.array([row]) for row in ([0, 0], [4, 4], [2, 1], [4, 2])))
        >>> offset.tolist(), shape.tolist()
        ([[2, 1]], [[2, 2]])
    """
    offset = np.maximum(left_offset, right_offset)
    shape = np.minimum(left_offset + left_shape, right_offset + right_shape) - offset
    return offset, np.maximum(shape, 0)


# Distinct values and rows, found by sorting: since 2.4 NumPy's `unique` hashes, which is a hundred times slower for a
# million integers.

_ROOM = 2**62


def distinct(values: Column) -> Column:
    """Return the different values, ascending.

    Examples:
        >>> distinct(np.array([3, 1, 3])).tolist()
        [1, 3]
    """
    ordered = np.sort(values)
    return ordered[begins(ordered)]


def begins(*columns: Column) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows of sorted columns differ from the row before, bool (rows,).

    Args:
        columns: of one length, sorted together.

    Examples:
        >>> begins(np.array([1, 1, 2, 2]), np.array([5, 5, 5, 6])).tolist()
        [True, False, True, True]
    """
    new = np.ones(len(columns[0]), dtype=np.bool_)
    if new.size:
        np.not_equal(columns[0][1:], columns[0][:-1], out=new[1:])
    for column in columns[1:]:
        new[1:] |= column[1:] != column[:-1]
    return new


def rows_of(columns: Record, rows: Column | NDArray[np.bool_] | slice) -> Record:
    """Return some rows of a record all of whose slots are columns, in the order given.

    Examples:
        >>> from shardtree.plans import Runs
        >>> rows_of(Runs(*(np.arange(3) for _ in range(5))), np.array([2, 0])).byte
        array([2, 0])
    """
    kind: Any = type(columns)
    found: Record = kind(*(getattr(columns, name)[rows] for name in kind.__slots__))
    return found


def joined_rows(parts: Sequence[Record]) -> Record:
    """Return the rows of several records, one at least, all of whose slots are columns, as one.

    Examples:
        >>> class Pairs:
        ...     __slots__ = ("left", "right")
        ...
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> both = joined_rows([Pairs(np.array([1]), np.array([2])), Pairs(np.array([3]), np.array([4]))])
        >>> both.left, both.right
        (array([1, 3]), array([2, 4]))
    """
    kind: Any = type(parts[0])
    found: Record = kind(*(np.concatenate([getattr(part, name) for part in parts]) for name in kind.__slots__))
    return found


def row_numbers(columns: Iterable[Column]) -> tuple[Column, int]:
    """Return the number of each row among all distinct rows in order, and how many distinct ones there are.

    The columns of a row become one integer, which sorts many times faster than several.

    Args:
        columns: of one length, the most significant first.

    Returns:
        int64 (rows,), and the count.

    Examples:
        >>> row_numbers([np.array([1, 0, 1]), np.array([7, 9, 7])])
        (array([1, 0, 1]), 2)
    """
    code, size = np.zeros(0, dtype=np.int64), 0
    for column in columns:
        column, width = _from_zero(column)
        code, size = (code, size) if size else (np.zeros(column.size, dtype=np.int64), 1)
        # Before the code would overflow, values are replaced by their ranks, of which there are at most as many as
        # rows.
        if size * width > _ROOM:
            (code, size), (column, width) = _ranks(code), _ranks(column)
        code, size = code * width + column if width > 1 else code, size * width
    return _ranks(code)


def _from_zero(column: Column) -> tuple[Column, int]:
    """Return a column that begins at 0, and one more than its largest value."""
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    return (column - low, high - low + 1) if high - low < _ROOM else _ranks(column)


def _ranks(values: Column) -> tuple[Column, int]:
    """Return each value's rank among the distinct values, and how many of those there are."""
    # Any order of equal values will do, so the default sort, which isn't stable but faster, is enough.
    order = np.argsort(values)
    new = begins(values[order])
    number = np.empty(values.size, dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return number, int(new.sum())


# Flat ranges, slices of a row-major flattened box, divided into boxes


def flat_boxes(shape: Column, start: Column, stop: Column) -> tuple[Column, Column, Column, Column]:
    """Return the boxes that flat ranges consist of: at most ``2 * axes - 1`` a range, each contiguous in its range.

    From the last axis to the first, each completes its current row, until whole rows of the axis before it fit;
    back from the first to the last, each takes the whole rows that fit before the end.

    Args:
        shape: the flattened boxes, int64 (ranges, axes).
        start: first element of each range in its flattened box, int64 (ranges,).
        stop: one past the last element, int64 (ranges,).

    Returns:
        ``(row, offset, shape, position)``: the range that a box belongs to, its offset within the flattened box,
        its shape, and the element of the range that it begins at. Ordered by row, then position.

    Examples:
        >>> row, offset, part, position = flat_boxes(*map(np.array, ([[3, 4]], [2], [9])))
        >>> for columns in zip(offset.tolist(), part.tolist(), position.tolist()): print(*columns)
        [0, 2] [1, 2] 0
        [1, 0] [1, 4] 2
        [2, 0] [1, 1] 6
    """
    axes = shape.shape[1]
    # Boxes without elements have strides of 0, by which nothing can be divided.
    strides = np.maximum(row_major_strides(shape), 1)
    cursor = np.array(start, dtype=np.int64)
    pieces: list[tuple[Column, Column, Column, Column]] = []
    climbing = [(axis, True) for axis in range(axes - 1, 0, -1)]
    for axis, climb in [*climbing, *((axis, False) for axis in range(axes))]:
        stride = strides[:, axis]
        until = stop // stride * stride
        if climb:
            above = strides[:, axis - 1]
            until = np.minimum(until, -(-cursor // above) * above)
        rows = np.flatnonzero(until > cursor)
        if rows.size:
            pieces.append(_axis_boxes(shape[rows], strides[rows], axis, rows, cursor[rows], until[rows], start[rows]))
            # All ranges advance together, axis by axis: the loop is over axes, and not over ranges.
            cursor = np.maximum(cursor, until)
    return _in_order(pieces, axes)


def _axis_boxes(
    shape: Column, strides: Column, axis: int, rows: Column, begin: Column, until: Column, start: Column
) -> tuple[Column, Column, Column, Column]:
    """Return boxes one row wide above `axis` and whole below it."""
    offset = begin[:, None] // strides % np.maximum(shape, 1)
    part = shape.copy()
    part[:, :axis] = 1
    part[:, axis] = (until - begin) // strides[:, axis]
    return rows, offset, part, begin - start


def _in_order(pieces: list[tuple[Column, Column, Column, Column]], axes: int) -> tuple[Column, Column, Column, Column]:
    if not pieces:
        empty = np.zeros(0, dtype=np.int64)
        return empty, np.zeros((0, axes), dtype=np.int64), np.zeros((0, axes), dtype=np.int64), empty
    row, offset, part, position = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.lexsort((position, row))
    return row[order], offset[order], part[order], position[order]


# Flat ranges of narrowed boxes.

Run = tuple[slice, slice]


def narrow_flat_range(
    local_shape: tuple[int, ...], start: int, stop: int, dim: int, narrow_start: int, length: int
) -> tuple[Run, ...]:
    """Return the maximal runs that a flat range and a narrowed box have in common.

    A run is contiguous twice: in the 1-D data that holds elements [start, stop) of the row-major flattened box, and
    in the row-major flattening of the box narrowed to [narrow_start, narrow_start + length) along `dim`.

    Args:
        local_shape: the box, before narrowing.
        start: the first element of the flattened box that the data holds.
        stop: one past the last element.
        dim: the axis to narrow, in [0, len(local_shape)).
        narrow_start: the first index to keep along `dim`.
        length: how many indices to keep.

    Returns:
        (slice of the data, slice of the flattened narrowed box) for each run, in the data's order; empty runs are
        left out, so there may be none.

    Examples:
        >>> narrow_flat_range((2, 4), 1, 8, 1, 2, 2)  # keep the last two columns of two rows
        ((slice(1, 3, None), slice(0, 2, None)), (slice(5, 7, None), slice(2, 4, None)))
        >>> narrow_flat_range((2, 4), 1, 8, 0, 1, 1)  # keep the last row
        ((slice(3, 7, None), slice(0, 4, None)),)
        >>> narrow_flat_range((2, 4), 0, 4, 0, 1, 1)
        ()
    """
    if start >= stop or length == 0:
        return ()
    if length == local_shape[dim]:  # nothing is cut: one run, where rows would each give one
        return ((slice(0, stop - start), slice(start, stop)),)
    return tuple(_row_runs(prod(local_shape[dim + 1 :]), local_shape[dim], start, stop, narrow_start, length))


def _row_runs(inner: int, size: int, start: int, stop: int, narrow_start: int, length: int) -> Iterator[Run]:
    row, kept, skipped = size * inner, length * inner, narrow_start * inner
    for index in range(start // row, -(-stop // row)):
        first = max(start, index * row + skipped)
        last = min(stop, index * row + skipped + kept)
        if first < last:
            shift = skipped + index * (row - kept)
            yield slice(first - start, last - start), slice(first - shift, last - shift)
