"""Which groups of boxes have two that share an element, whoever made the boxes: without looking at all pairs."""

from __future__ import annotations

import numpy as np

from ._boxes import Column
from ._distinct import begins, distinct
from ._pairs import overlapping_pairs
from ._reach import rows_with_elements
from ._tiling import tiled_groups

_FEW = 64
"""Boxes in a group. So few are compared in pairs, all such groups at once; for each box more, so many pairs are."""
_MOST_PAIRS = 1 << 18
"""That are tried at once."""


def shared_groups(group: Column, offset: Column, shape: Column) -> Column:
    """Return the groups in which two boxes share an element, ascending.

    A group of many boxes is cut in two until the boxes in each part tell: by their volumes, which are more than what
    is around them has, or by few enough pairs. So a million equal boxes take no more than a million that tile.

    Args:
        group: the group that each box belongs to, int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: int64 (boxes, axes).

    Examples:
        >>> offset, shape = np.array([[0], [2], [0], [1]]), np.array([[2], [2], [2], [2]])
        >>> shared_groups(np.array([0, 0, 1, 1]), offset, shape).tolist()
        [1]
    """
    rows = rows_with_elements(shape)
    rows = rows[np.argsort(group[rows], kind="stable")]
    rows = rows[_untold(group[rows], offset.take(rows, axis=0), shape.take(rows, axis=0))]
    group, offset, shape = group[rows], offset.take(rows, axis=0), shape.take(rows, axis=0)
    first = np.flatnonzero(begins(group))
    names, count = group[first], np.diff(first, append=group.size)
    small = np.repeat(count <= _FEW, count)
    left, right = overlapping_pairs(
        group[small], offset[small], shape[small], group[small], offset[small], shape[small]
    )
    ends = offset + shape
    large = [
        number
        for number, begin, size in zip(names.tolist(), first.tolist(), count.tolist(), strict=True)
        if size > _FEW and _shared(offset[begin : begin + size], ends[begin : begin + size])
    ]
    return distinct(np.concatenate([group[small][left[left != right]], np.array(large, dtype=np.int64)]))


def _untold(group: Column, offset: Column, shape: Column) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return the boxes, sorted by group, of groups that don't tile what is around them: those may share elements."""
    number = np.cumsum(begins(group)) - 1
    groups = int(number[-1]) + 1 if number.size else 0
    is_tiled = tiled_groups(number, offset, shape, groups)
    return np.asarray(~is_tiled[number])


def _shared(begin: Column, end: Column) -> bool:
    """Return whether two of some boxes, none of them empty, share an element."""
    if len(begin) < 2 or _overfull(begin, end):
        return len(begin) > 1
    crossings = [_crossings(begin[:, axis], end[:, axis]) for axis in range(begin.shape[1])]
    axis = int(np.argmin(crossings))
    if crossings[axis] <= _FEW * len(begin):
        return _meet(begin, end, axis)
    cut = _cut(begin, end)
    if cut is None:
        return _meet(begin, end, axis)
    axis, at = cut
    low, high = begin[:, axis] < at, end[:, axis] > at
    before, after = end[low].copy(), begin[high].copy()
    before[:, axis], after[:, axis] = np.minimum(before[:, axis], at), np.maximum(after[:, axis], at)
    return _shared(begin[low], before) or _shared(after, end[high])


def _overfull(begin: Column, end: Column) -> bool:
    """Return whether boxes hold more elements together than the smallest box around all of them, by a clear margin."""
    around = (end.max(axis=0) - begin.min(axis=0)).astype(np.float64).prod()
    return bool((end - begin).astype(np.float64).prod(axis=1).sum() > around * 1.001)


def _crossings(begin: Column, end: Column) -> int:
    """Return how many pairs of intervals share a point."""
    return int(np.searchsorted(np.sort(begin), end, side="left").sum()) - len(begin) * (len(begin) + 1) // 2


def _cut(begin: Column, end: Column) -> tuple[int, int] | None:
    """Return the axis and the place on it at which a cut leaves the fewest boxes in the larger part, if any helps."""
    best, most = None, len(begin)
    for axis in range(begin.shape[1]):
        at = int(np.median(np.concatenate([begin[:, axis], end[:, axis]])))
        parts = max(int((begin[:, axis] < at).sum()), int((end[:, axis] > at).sum()))
        if parts < most:
            best, most = (axis, at), parts
    return best


def _meet(begin: Column, end: Column, axis: int) -> bool:
    """Return whether two boxes meet, trying those that do so on one axis: first a few, which are often enough."""
    order = np.argsort(begin[:, axis], kind="stable")
    begin, end = begin[order], end[order]
    count = np.searchsorted(begin[:, axis], end[:, axis], side="left") - np.arange(len(begin)) - 1
    before = np.concatenate([[0], np.cumsum(count)])
    row, most = 0, _FEW * _FEW
    while row < len(begin):
        stop = max(row + 1, int(np.searchsorted(before, before[row] + most, side="right")) - 1)
        one = np.repeat(np.arange(row, stop), count[row:stop])
        other = np.arange(one.size) + before[row] - before[one] + one + 1
        if _any_meets(begin, end, one, other):
            return True
        row, most = stop, min(most * 4, _MOST_PAIRS)
    return False


def _any_meets(begin: Column, end: Column, one: Column, other: Column) -> bool:
    for axis in range(begin.shape[1]):
        low, high = begin[:, axis], end[:, axis]
        meets = np.flatnonzero((low[one] < high[other]) & (low[other] < high[one]))
        one, other = one.take(meets), other.take(meets)
    return one.size > 0
