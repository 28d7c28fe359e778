"""Which boxes of two columns overlap, found by sorting rather than by trying all pairs."""

from __future__ import annotations

import numpy as np

from ._boxes import Column
from ._slabs import GroupedBoxes, in_slabs

_PLENTY = 8
"""So many times as many candidates as boxes are too many."""


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
    left, right = _grouped(left_group, left_offset, left_shape), _grouped(right_group, right_offset, right_shape)
    if not len(left) or not len(right):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    one, other = _candidates(*_thinned(*_numbered(left, right)))
    begins_before = left_offset[one] < right_offset[other] + right_shape[other]
    ends_after = right_offset[other] < left_offset[one] + left_shape[one]
    meets = (begins_before & ends_after).all(axis=1)
    # In several slabs a pair is found several times.
    rights = len(right_group)
    pairs = np.sort(one[meets] * rights + other[meets])  # np.unique is much slower
    pairs = pairs[np.flatnonzero(np.diff(pairs, prepend=-1))]
    return pairs // rights, pairs % rights


def _grouped(group: Column, offset: Column, shape: Column) -> GroupedBoxes:
    """Return the boxes that have elements, with their numbers."""
    rows = np.flatnonzero((shape > 0).all(axis=1))
    return GroupedBoxes(rows, group[rows], offset[rows], shape[rows])


def _numbered(left: GroupedBoxes, right: GroupedBoxes) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Return boxes of groups that both sides have, whose numbers count from 0."""
    groups = np.intersect1d(left.group, right.group)
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
    one = np.repeat(np.arange(len(left)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    other = order[np.repeat(first, counts) + within]
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
    places = np.unique(np.concatenate([left_begin, left_end, right_begin, right_end]))
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
    sorted_group, sorted_value = group[order], value[order]
    new = np.ones(order.size, dtype=bool)
    new[1:] = (sorted_group[1:] != sorted_group[:-1]) | (sorted_value[1:] != sorted_value[:-1])
    return np.bincount(sorted_group[new], minlength=groups)
