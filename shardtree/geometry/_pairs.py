"""Which boxes of two columns overlap, found by sorting rather than by trying all pairs."""

from __future__ import annotations

import numpy as np

from ._boxes import Column
from ._distinct import begins, distinct
from ._reach import reach_of, rows_in_reach, rows_with_elements
from ._slabs import GroupedBoxes, in_slabs

_PLENTY = 8
"""So many times as many candidates as boxes are too many."""
_FEW = 2
"""So many times as many pairs as boxes are compared at once: to sort the boxes would take longer."""


def overlapping_pairs(
    left_group: Column,
    left_offset: Column,
    left_shape: Column,
    right_group: Column,
    right_offset: Column,
    right_shape: Column,
) -> tuple[Column, Column]:
    """Return the pairs of rows (left, right) of one group whose boxes share an element.

    Within each group the right boxes are sorted along the axis on which they begin at the most different places; a left
    box then meets one stretch of them, which the other axes thin out. Where that leaves many boxes side by side, groups
    are divided into slabs across another axis first.

    Args:
        left_group: the group (tensor) that each left box belongs to, int64 (lefts,).
        left_offset: int64 (lefts, axes).
        left_shape: int64 (lefts, axes).
        right_group: int64 (rights,).
        right_offset: int64 (rights, axes).
        right_shape: int64 (rights, axes).

    Returns:
        ``(left, right)``: row numbers, int64 (pairs,), ordered by left, then right.

    Examples:
        >>> group, shape = np.zeros(2, dtype=np.int64), np.array([[2, 4], [2, 4]])
        >>> lefts, rights = np.array([[0, 0], [1, 0]]), np.array([[0, 0], [2, 0]])
        >>> left, right = overlapping_pairs(group, lefts, shape, group, rights, shape)
        >>> list(zip(left.tolist(), right.tolist()))
        [(0, 0), (1, 0), (1, 1)]
    """
    reach = reach_of(left_group, left_offset, left_shape)
    near, number = rows_in_reach(reach, right_group, right_offset, right_shape)
    # What a group's only left box reaches is that box itself: whatever lies in it, meets it.
    is_only = reach.count.take(number) == 1
    one, other = reach.row.take(number[is_only]), near[is_only]
    if not is_only.all():
        left = _in_groups(left_group, left_offset, left_shape, reach.group[reach.count > 1])
        right = _boxes_at(near[~is_only], right_group, right_offset, right_shape)
        more, others = _pairs_to_try(left, right)
        meets = _meets(left_offset, left_shape, more, right_offset, right_shape, others)
        one, other = np.concatenate([one, more[meets]]), np.concatenate([other, others[meets]])
    # In several slabs a pair is found several times.
    pairs = distinct(one * len(right_group) + other)
    one = pairs // max(len(right_group), 1)
    return one, pairs - one * len(right_group)


def _in_groups(group: Column, offset: Column, shape: Column, groups: Column) -> GroupedBoxes:
    """Return the boxes of some groups that have elements."""
    rows = rows_with_elements(shape)
    own = group.take(rows)
    place = np.minimum(np.searchsorted(groups, own), groups.size - 1)
    return _boxes_at(rows[groups[place] == own], group, offset, shape)


def _boxes_at(rows: Column, group: Column, offset: Column, shape: Column) -> GroupedBoxes:
    return GroupedBoxes(rows, group.take(rows), offset.take(rows, axis=0), shape.take(rows, axis=0))


def _meets(
    left_offset: Column, left_shape: Column, left: Column, right_offset: Column, right_shape: Column, right: Column
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether two rows of boxes share an element, bool (pairs,)."""
    meets = np.ones(left.size, dtype=np.bool_)
    for axis in range(left_offset.shape[1]):
        low, size = left_offset[:, axis][left], left_shape[:, axis][left]
        begin, length = right_offset[:, axis][right], right_shape[:, axis][right]
        meets &= (low < begin + length) & (begin < low + size)
    return meets


def _pairs_to_try(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column]:
    """Return pairs of rows, among them all that share an element; some maybe more than once."""
    pairs = _few_pairs(left, right)
    return _candidates(*_thinned(*_numbered(left, right))) if pairs is None else pairs


def _few_pairs(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column] | None:
    """Return all pairs of each group, None where these are more than a few for each box."""
    order = np.argsort(right.group, kind="stable")
    groups = right.group[order]
    first = np.searchsorted(groups, left.group, side="left")
    counts = np.searchsorted(groups, left.group, side="right") - first
    if counts.sum() > _FEW * (len(left) + len(right)):
        return None
    one, other = _each_with(first, counts)
    return left.row[one], right.row[order[other]]


def _each_with(first: Column, counts: Column) -> tuple[Column, Column]:
    """Return pairs: each row with each number of its own stretch."""
    one = np.repeat(np.arange(counts.size), counts)
    within = np.arange(one.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return one, np.repeat(first, counts) + within


def _numbered(left: GroupedBoxes, right: GroupedBoxes) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Return boxes of groups that both sides have, whose numbers count from 0."""
    both = np.sort(np.concatenate([distinct(left.group), distinct(right.group)]))
    groups = both[1:][both[1:] == both[:-1]]
    one, other = (_of_groups(side, groups) for side in (left, right))
    return one, other


def _of_groups(boxes: GroupedBoxes, groups: Column) -> GroupedBoxes:
    number = np.searchsorted(groups, boxes.group)
    rows = np.flatnonzero(np.append(groups, -1)[number] == boxes.group) if groups.size else number[:0]
    return GroupedBoxes(boxes.row[rows], number[rows], boxes.offset[rows], boxes.shape[rows])


def _thinned(left: GroupedBoxes, right: GroupedBoxes) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Return boxes in slabs, where otherwise there are too many candidates."""
    for number in range(1, right.offset.shape[1]):
        _, _, counts = _stretches(left, right)
        if counts.sum() <= _PLENTY * (len(left) + len(right)):
            break
        axis = _sorting_axes(right)[number]
        left, right = _numbered(*in_slabs(left, right, axis))
    return left, right


def _candidates(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column]:
    """Return the pairs that meet on their group's sorting axis."""
    order, first, counts = _stretches(left, right)
    one, place = _each_with(first, counts)
    other = order[place]
    same = left.group[one] == right.group[other]
    return left.row[one[same]], right.row[other[same]]


def _stretches(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column, Column]:
    """Return the order of right boxes along the sorting axes, and for each left box the stretch that it meets."""
    if not len(left):
        return left.row, left.row, left.row
    axis = _sorting_axes(right)[0]
    left_begin, left_end = left.interval(axis[left.group])
    right_begin, right_end = right.interval(axis[right.group])

    # Coordinates become ranks, so that (group, coordinate) fits one int64 whatever the tensors' sizes.
    places = distinct(np.concatenate([left_begin, left_end, right_begin, right_end]))
    left_low, left_high = (left.group * places.size + np.searchsorted(places, at) for at in (left_begin, left_end))
    right_low, right_high = (right.group * places.size + np.searchsorted(places, at) for at in (right_begin, right_end))
    order = np.lexsort((right_high, right_low))
    first = np.searchsorted(np.maximum.accumulate(right_high[order]), left_low, side="right")
    last = np.searchsorted(right_low[order], left_high, side="left")
    return order, first, np.maximum(last - first, 0)


def _sorting_axes(boxes: GroupedBoxes) -> Column:
    """Return, for each group, the axes, those first along which its boxes begin at the most different places."""
    groups = int(boxes.group.max()) + 1
    axes = range(boxes.offset.shape[1])
    different = np.stack([_distinct(boxes.group, boxes.offset[:, axis], groups) for axis in axes])
    return np.argsort(-different, axis=0, kind="stable")


def _distinct(group: Column, value: Column, groups: int) -> Column:
    order = np.lexsort((value, group))
    sorted_group = group[order]
    return np.bincount(sorted_group[begins(sorted_group, value[order])], minlength=groups)
