"""What boxes of a group reach between them, and which other boxes lie in that: a look at each, without sorting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._boxes import Column
from ._distinct import begins

_AT_ONCE = 1 << 15
"""Boxes that are looked at together: so few that what is computed of them stays in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """The smallest box around the boxes of each group, a row a group.

    Attributes:
        group: ascending, int64 (groups,).
        low: where it begins, int64 (groups, axes).
        high: where it ends, int64 (groups, axes).
        row: one of the group's boxes, int64 (groups,).
        count: how many boxes the group has, int64 (groups,).
    """

    group: Column
    low: Column
    high: Column
    row: Column
    count: Column


def reach_of(group: Column, offset: Column, shape: Column) -> Reach:
    """Return what the boxes of each group reach; boxes without elements don't count.

    Examples:
        >>> reach = reach_of(np.array([4, 4]), np.array([[0], [6]]), np.array([[2], [3]]))
        >>> reach.group.tolist(), reach.low.tolist(), reach.high.tolist(), reach.count.tolist()
        ([4], [[0]], [[9]], [2])
    """
    rows = rows_with_elements(shape)
    rows = rows[np.argsort(group[rows], kind="stable")]
    first = np.flatnonzero(begins(group[rows]))
    if not rows.size:
        none = np.zeros((0, offset.shape[1]), dtype=np.int64)
        return Reach(rows, none, none, rows, rows)
    low, end = offset.take(rows, axis=0), (offset + shape).take(rows, axis=0)
    return Reach(
        group[rows[first]],
        np.minimum.reduceat(low, first),
        np.maximum.reduceat(end, first),
        rows[first],
        np.diff(first, append=rows.size),
    )


def rows_in_reach(reach: Reach, group: Column, offset: Column, shape: Column) -> tuple[Column, Column]:
    """Return the boxes that have an element in what their group reaches, by group, and the number of the group.

    Args:
        reach: of some groups.
        group: the group that each box belongs to, int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: int64 (boxes, axes).

    Returns:
        ``(rows, number)``: int64 (found,) each; ``reach.group[number]`` is the group.

    Examples:
        >>> reach = reach_of(np.array([4]), np.array([[0]]), np.array([[3]]))
        >>> rows, number = rows_in_reach(reach, np.array([4, 4, 5]), np.array([[2], [3], [2]]), np.ones((3, 1), int))
        >>> rows.tolist(), number.tolist()
        ([0], [0])
    """
    order = None if (group[1:] >= group[:-1]).all() else np.argsort(group, kind="stable")
    none = np.zeros(0, dtype=np.int64)
    found = [(none, none)]
    for rows, groups, count in _stretches(reach.group, group if order is None else group[order]):
        near = rows if order is None else order[rows]
        # The first axis is compared for all, beside edges that are repeated for each; it leaves few.
        low, high = np.repeat(reach.low[groups, 0], count), np.repeat(reach.high[groups, 0], count)
        places = np.flatnonzero(_meet(offset[:, 0][near], shape[:, 0][near], low, high))
        number = groups.start + np.searchsorted(np.cumsum(count), places, side="right")
        near = _numbers(near).take(places)
        for axis in range(1, offset.shape[1]):
            low, high = reach.low[:, axis][number], reach.high[:, axis][number]
            kept = np.flatnonzero(_meet(offset[:, axis][near], shape[:, axis][near], low, high))
            near, number = near.take(kept), number.take(kept)
        found.append((near, number))
    rows, numbers = (np.concatenate(column) for column in zip(*found, strict=True))
    kept = rows_with_elements(shape[rows])
    return rows.take(kept), numbers.take(kept)


def rows_with_elements(shape: Column) -> Column:
    """Return the rows of boxes that have elements.

    Examples:
        >>> rows_with_elements(np.array([[2, 3], [2, 0]])).tolist()
        [0]
    """
    some = np.ones(len(shape), dtype=np.bool_)
    for axis in range(shape.shape[1]):
        some &= shape[:, axis] > 0
    return np.flatnonzero(some)


def _stretches(groups: Column, ordered: Column) -> Iterator[tuple[Column | slice, slice, Column]]:
    """Yield the rows of some groups a few at a time, as a slice where nothing is between, and how many of which."""
    first, last = np.searchsorted(ordered, groups, side="left"), np.searchsorted(ordered, groups, side="right")
    for low in range(int(first.min(initial=0)), int(last.max(initial=0)), _AT_ONCE):
        begin = int(np.searchsorted(last, low, side="right"))
        end = int(np.searchsorted(first, low + _AT_ONCE, side="left"))
        start = np.maximum(first[begin:end], low)
        count = np.minimum(last[begin:end], low + _AT_ONCE) - start
        total = int(count.sum())
        if total and start[0] + total == start[-1] + count[-1]:
            yield slice(int(start[0]), int(start[0]) + total), slice(begin, end), count
        else:
            yield np.arange(total) + np.repeat(start - np.cumsum(count) + count, count), slice(begin, end), count


def _meet(begin: Column, size: Column, low: Column, high: Column) -> NDArray[np.bool_]:
    """Return which ranges meet those between two edges; one without elements does where it lies inside."""
    end = begin.copy()  # its own memory, in one piece, is quicker to compare than a column of a table
    flags = end < high
    end += size
    flags &= end > low
    return flags


def _numbers(rows: Column | slice) -> Column:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
