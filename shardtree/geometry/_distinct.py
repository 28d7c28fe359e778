"""Different values and rows, found by sorting: NumPy's `unique` hashes, which is many times slower for integers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ._boxes import Column

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
    """Return the number of each row among all different rows in their order, and how many different ones there are.

    The columns of a row become one integer, which sorts many times faster than several.

    Args:
        columns: of one length, the first counts most.

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
        if size * width > _ROOM:
            (code, size), (column, width) = _ranked(code), _ranked(column)
        code, size = code * width + column if width > 1 else code, size * width
    return _ranked(code)


def _from_zero(column: Column) -> tuple[Column, int]:
    """Return a column that begins at 0, and one more than its largest value."""
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    return (column - low, high - low + 1) if high - low < _ROOM else _ranked(column)


def _ranked(values: Column) -> tuple[Column, int]:
    """Return for each value how many smaller ones there are, each counted once, and how many there are at all."""
    order = np.argsort(values)
    new = begins(values[order])
    number = np.empty(values.size, dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return number, int(new.sum())
