"""Boxes in columns: rows of (offset, shape), int64, right-aligned to one number of axes.

A box of fewer axes is padded on the left with offset 0 and shape 1, so that tensors of any rank share one column and
row-major order isn't changed by the padding. There is always at least one axis: a scalar is the box ``[0], [1]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]


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
