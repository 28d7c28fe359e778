"""Which boxes of two columns overlap, found by sorting rather than by trying all pairs."""

from __future__ import annotations

import numpy as np

from ._boxes import Column


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
    box then meets one stretch of them, which the other axes thin out.

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
    lefts, rights = _not_empty(left_shape), _not_empty(right_shape)
    pairs = _candidates(
        left_group[lefts],
        left_offset[lefts],
        left_shape[lefts],
        right_group[rights],
        right_offset[rights],
        right_shape[rights],
    )
    left, right = lefts[pairs[0]], rights[pairs[1]]
    begins_before = left_offset[left] < right_offset[right] + right_shape[right]
    ends_after = right_offset[right] < left_offset[left] + left_shape[left]
    meets = (begins_before & ends_after).all(axis=1)
    left, right = left[meets], right[meets]
    order = np.lexsort((right, left))
    return left[order], right[order]


def _not_empty(shape: Column) -> Column:
    return np.flatnonzero((shape > 0).all(axis=1))


def _candidates(
    left_group: Column,
    left_offset: Column,
    left_shape: Column,
    right_group: Column,
    right_offset: Column,
    right_shape: Column,
) -> tuple[Column, Column]:
    """Return the pairs that meet on their group's sorting axis."""
    if not left_group.size or not right_group.size:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    groups, numbers = np.unique(np.concatenate([left_group, right_group]), return_inverse=True)
    left_number, right_number = np.split(numbers, [left_group.size])
    axis = _sorting_axis(right_number, right_offset, groups.size)
    left_begin, left_end = _interval(left_offset, left_shape, axis[left_number])
    right_begin, right_end = _interval(right_offset, right_shape, axis[right_number])

    # Coordinates become ranks, so that (group, coordinate) fits one int64 whatever the tensors' sizes.
    places = np.unique(np.concatenate([left_begin, left_end, right_begin, right_end]))
    left_low, left_high = (left_number * places.size + np.searchsorted(places, at) for at in (left_begin, left_end))
    right_low, right_high = (
        right_number * places.size + np.searchsorted(places, at) for at in (right_begin, right_end)
    )
    order = np.lexsort((right_high, right_low))
    first = np.searchsorted(np.maximum.accumulate(right_high[order]), left_low, side="right")
    last = np.searchsorted(right_low[order], left_high, side="left")
    counts = np.maximum(last - first, 0)
    left = np.repeat(np.arange(left_group.size), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    right = order[np.repeat(first, counts) + within]
    same = left_number[left] == right_number[right]
    return left[same], right[same]


def _sorting_axis(group: Column, offset: Column, groups: int) -> Column:
    """Return, for each group, the axis along which its boxes begin at the most different places."""
    different = np.stack([_distinct(group, offset[:, axis], groups) for axis in range(offset.shape[1])])
    return np.asarray(np.argmax(different, axis=0))


def _distinct(group: Column, value: Column, groups: int) -> Column:
    order = np.lexsort((value, group))
    sorted_group, sorted_value = group[order], value[order]
    new = np.ones(order.size, dtype=bool)
    new[1:] = (sorted_group[1:] != sorted_group[:-1]) | (sorted_value[1:] != sorted_value[:-1])
    return np.bincount(sorted_group[new], minlength=groups)


def _interval(offset: Column, shape: Column, axis: Column) -> tuple[Column, Column]:
    rows = np.arange(offset.shape[0])
    begin = offset[rows, axis]
    return begin, begin + shape[rows, axis]
