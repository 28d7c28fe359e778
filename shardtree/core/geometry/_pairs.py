"""Pairs of overlapping boxes from two columns of boxes, found by sorting instead of comparing all pairs.

Boxes are in groups, such as tensors, and a pair is in one group. A group's boxes are sorted by their begins along its
sorting axis, the axis with the most distinct begins. A candidate is a pair that may overlap along this axis. A slab is
the part of a group between two coordinates of another axis; it becomes a group with fewer candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._boxes import Column, Mask, begins, distinct, span_numbers

# A filter before any sorting drops boxes outside of the bounding box of their group's requests.

_AT_ONCE = 1 << 15
"""Number of boxes at a time, small enough that intermediate columns stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """The bounding box of each group of boxes, with one row for each group.

    Attributes:
        group: Group number, ascending, int64 (groups,).
        low: Lower corner of the box, int64 (groups, axes).
        high: Upper corner of the box, exclusive, int64 (groups, axes).
        row: Row of the group's first box in the columns that `reach_of` got, int64 (groups,).
        count: Number of boxes in the group, int64 (groups,).
    """

    group: Column
    low: Column
    high: Column
    row: Column
    count: Column


def reach_of(group: Column, offset: Column, shape: Column) -> Reach:
    """Return the bounding box of each group; boxes without elements are ignored.

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
    """Return the boxes that share an element with their group's bounding box, ordered by group.

    Args:
        reach: Bounding boxes of some groups.
        group: Group number of each box, int64 (boxes,).
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes).

    Returns:
        ``(rows, number)``, int64 (found,) each: the rows of these boxes, and the rows of their groups in `reach`.

    Examples:
        >>> reach = reach_of(np.array([4]), np.array([[0]]), np.array([[3]]))
        >>> rows, number = rows_in_reach(reach, np.array([4, 4, 5]), np.array([[2], [3], [2]]), np.ones((3, 1), int))
        >>> rows.tolist(), number.tolist()
        ([0], [0])
    """
    order = None if (group[1:] >= group[:-1]).all() else np.argsort(group, kind="stable")
    none = np.zeros(0, dtype=np.int64)
    chunks = [(none, none)]
    for rows, groups, count in _group_runs(reach.group, group if order is None else group[order]):
        near = rows if order is None else order[rows]
        # The first axis is compared for all boxes, later axes only for the boxes that overlap along the earlier ones.
        low, high = np.repeat(reach.low[groups, 0], count), np.repeat(reach.high[groups, 0], count)
        places = np.flatnonzero(_meet(offset[:, 0][near], shape[:, 0][near], low, high))
        number = groups.start + np.searchsorted(np.cumsum(count), places, side="right")
        near = _numbers(near).take(places)
        for axis in range(1, offset.shape[1]):
            low, high = reach.low[:, axis][number], reach.high[:, axis][number]
            inside = np.flatnonzero(_meet(offset[:, axis][near], shape[:, axis][near], low, high))
            near, number = near.take(inside), number.take(inside)
        chunks.append((near, number))
    rows, numbers = (np.concatenate(column) for column in zip(*chunks, strict=True))
    inside = rows_with_elements(shape[rows])
    return rows.take(inside), numbers.take(inside)


def rows_with_elements(shape: Column) -> Column:
    """Return the rows of the boxes that have elements.

    Examples:
        >>> rows_with_elements(np.array([[2, 3], [2, 0]])).tolist()
        [0]
    """
    some = np.ones(len(shape), dtype=np.bool_)
    for axis in range(shape.shape[1]):
        some &= shape[:, axis] > 0
    return np.flatnonzero(some)


def _group_runs(groups: Column, sorted_group: Column) -> Iterator[tuple[Column | slice, slice, Column]]:
    """Yield the boxes of some groups in batches of bounded size, as ``(rows, part, count)``.

    `sorted_group` has the group of each box, and `groups` the wanted groups, both ascending. `rows` are positions in
    `sorted_group`, `part` is a slice of `groups`, and `count` is the number of the batch's boxes in each such group.
    """
    first, last = (np.searchsorted(sorted_group, groups, side=side) for side in ("left", "right"))
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
    """Return whether each range overlaps the interval from `low` to `high`; an empty range must be strictly inside."""
    end = begin.copy()  # contiguous memory compares faster than a strided column
    flags = end < high
    end += size
    flags &= end > low
    return flags


def _numbers(rows: Column | slice) -> Column:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


# Groups divided into slabs, so that a sort along another axis has fewer boxes side by side.

_MOST_COPIES = 3
"""Upper bound of the growth by slabs: a box is copied for each slab that it meets, and slabs are made so thick that the
copies are at most this many times as many as the boxes."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedBoxes:
    """Boxes in groups; each box has elements.

    Attributes:
        row: Row of each box in the caller's columns, int64 (boxes,).
        group: Group number of each box, int64 (boxes,).
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes).
    """

    row: Column
    group: Column
    offset: Column
    shape: Column

    def __len__(self) -> int:
        return len(self.row)

    def interval(self, axis: Column) -> tuple[Column, Column]:
        """Return the begin and the end of each box along the axis ``axis[box]``, int64 (boxes,) each."""
        rows = np.arange(len(self))
        begin = self.offset[rows, axis]
        return begin, begin + self.shape[rows, axis]


def in_slabs(left: GroupedBoxes, right: GroupedBoxes, axis: Column) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Divide groups into slabs along an axis, and return the boxes with the slabs as their groups.

    A box occurs once for each slab that it overlaps, so that two overlapping boxes are together in at least one slab.

    Args:
        left: Boxes; their groups are numbered from 0.
        right: Boxes in the same groups. Each slab but a group's first begins where one of these boxes begins.
        axis: Axis along which each group is divided, int64 (groups,).

    Examples:
        >>> row, zero = np.arange(4), np.zeros(4, dtype=np.int64)
        >>> boxes = GroupedBoxes(row, zero, row[:, None], np.ones((4, 1), dtype=np.int64))
        >>> one = GroupedBoxes(zero[:1], zero[:1], np.array([[1]]), np.array([[2]]))
        >>> one, boxes = in_slabs(one, boxes, np.array([0]))
        >>> one.group.tolist(), boxes.row.tolist(), boxes.group.tolist()
        ([0, 1], [0, 1, 2, 3], [0, 0, 1, 1])
    """
    places = distinct(np.concatenate([*left.interval(axis[left.group]), *right.interval(axis[right.group])]))
    left_places, right_places = _group_places(left, axis, places), _group_places(right, axis, places)
    groups, begins = np.arange(axis.size) * places.size, np.sort(right_places[0])
    thickness = max(1, int(np.sqrt(len(right) / axis.size)))
    while thickness < len(right):
        bounds = distinct(np.concatenate([groups, begins[::thickness]]))
        (first, count), (other_first, other_count) = _spans(bounds, *left_places), _spans(bounds, *right_places)
        if count.sum() + other_count.sum() <= _MOST_COPIES * (len(left) + len(right)):
            return _repeat(left, first, count), _repeat(right, other_first, other_count)
        thickness *= 4
    return left, right


def _group_places(boxes: GroupedBoxes, axis: Column, places: Column) -> tuple[Column, Column]:
    """Return each box's begin and end along its group's axis, encoded as integers that sort by group, then coordinate.

    An integer is ``group * places.size`` plus the coordinate's index in `places`, which has all coordinates, ascending.
    `axis` has the axis of each group.
    """
    begin, end = boxes.interval(axis[boxes.group])
    base = boxes.group * places.size
    return base + np.searchsorted(places, begin), base + np.searchsorted(places, end)


def _spans(bounds: Column, begin: Column, end: Column) -> tuple[Column, Column]:
    """Return each interval's first slab, and the number of slabs that it overlaps; slab i begins at ``bounds[i]``."""
    first = np.searchsorted(bounds, begin, side="right") - 1
    return first, np.searchsorted(bounds, end, side="left") - first


def _repeat(boxes: GroupedBoxes, first: Column, count: Column) -> GroupedBoxes:
    row, group = span_numbers(first, count)
    return GroupedBoxes(boxes.row[row], group, boxes.offset[row], boxes.shape[row])


_PLENTY = 8
"""Greatest average number of candidates of a box; if there are more, slabs reduce them."""
_FEW = 2
"""Greatest average number of pairs of a box that are all compared, since sorting the boxes would take longer."""


def overlapping_pairs(
    left_group: Column,
    left_offset: Column,
    left_shape: Column,
    right_group: Column,
    right_offset: Column,
    right_shape: Column,
) -> tuple[Column, Column]:
    """Return the rows of all pairs of a left and a right box of the same group that share an element.

    Within each group, the right boxes are sorted along the axis with the most distinct begins. A left box's candidates
    are then one interval of the sorted right boxes, filtered by the other axes. If too many candidates remain,
    groups are first divided into slabs along another axis.

    Args:
        left_group: Group number of each left box, such as its tensor's index, int64 (lefts,).
        left_offset: Offset of each left box, int64 (lefts, axes).
        left_shape: Shape of each left box, int64 (lefts, axes).
        right_group: Group number of each right box, int64 (rights,).
        right_offset: Offset of each right box, int64 (rights, axes).
        right_shape: Shape of each right box, int64 (rights, axes).

    Returns:
        ``(left, right)``: rows of the left and the right boxes, int64 (pairs,) each, ordered by left, then right.

    Examples:
        >>> group, shape = np.zeros(2, dtype=np.int64), np.array([[2, 4], [2, 4]])
        >>> lefts, rights = np.array([[0, 0], [1, 0]]), np.array([[0, 0], [2, 0]])
        >>> left, right = overlapping_pairs(group, lefts, shape, group, rights, shape)
        >>> list(zip(left.tolist(), right.tolist()))
        [(0, 0), (1, 0), (1, 1)]
    """
    reach = reach_of(left_group, left_offset, left_shape)
    near, number = rows_in_reach(reach, right_group, right_offset, right_shape)
    # The bounding box of a group with a single left box is that box: all right boxes that passed the filter overlap it.
    is_only = reach.count.take(number) == 1
    one, other = reach.row.take(number[is_only]), near[is_only]
    if not is_only.all():
        left = _in_groups(left_group, left_offset, left_shape, reach.group[reach.count > 1])
        right = _boxes_at(near[~is_only], right_group, right_offset, right_shape)
        # The candidates include all pairs that share an element, perhaps more than once.
        pairs = _few_pairs(left, right)
        more, others = _candidates(*_cut_into_slabs(*_renumber(left, right))) if pairs is None else pairs
        meets = _meets(left_offset, left_shape, more, right_offset, right_shape, others)
        one, other = np.concatenate([one, more[meets]]), np.concatenate([other, others[meets]])
    # A pair that shares several slabs occurs several times.
    code = distinct(one * len(right_group) + other)
    one = code // max(len(right_group), 1)
    return one, code - one * len(right_group)


def _in_groups(group: Column, offset: Column, shape: Column, groups: Column) -> GroupedBoxes:
    """Return the nonempty boxes whose `group` is one of `groups`."""
    rows = rows_with_elements(shape)
    own = group.take(rows)
    place = np.minimum(np.searchsorted(groups, own), groups.size - 1)
    return _boxes_at(rows[groups[place] == own], group, offset, shape)


def _boxes_at(rows: Column, group: Column, offset: Column, shape: Column) -> GroupedBoxes:
    return GroupedBoxes(rows, group.take(rows), offset.take(rows, axis=0), shape.take(rows, axis=0))


def _meets(
    left_offset: Column, left_shape: Column, left: Column, right_offset: Column, right_shape: Column, right: Column
) -> Mask:
    """Return whether the boxes of each pair share an element, bool (pairs,)."""
    meets = np.ones(left.size, dtype=np.bool_)
    for axis in range(left_offset.shape[1]):
        low, size = left_offset[:, axis][left], left_shape[:, axis][left]
        begin, length = right_offset[:, axis][right], right_shape[:, axis][right]
        meets &= (low < begin + length) & (begin < low + size)
    return meets


def _few_pairs(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column] | None:
    """Return the rows of all pairs (left box, right box) within groups; None if they exceed two per box on average."""
    order = np.argsort(right.group, kind="stable")
    groups = right.group[order]
    first = np.searchsorted(groups, left.group, side="left")
    counts = np.searchsorted(groups, left.group, side="right") - first
    if counts.sum() > _FEW * (len(left) + len(right)):
        return None
    one, other = span_numbers(first, counts)
    return left.row[one], right.row[order[other]]


def _renumber(left: GroupedBoxes, right: GroupedBoxes) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Return the boxes of the groups that occur on both sides, with the groups renumbered from 0."""
    both = np.sort(np.concatenate([distinct(left.group), distinct(right.group)]))
    groups = both[1:][both[1:] == both[:-1]]
    one, other = (_of_groups(side, groups) for side in (left, right))
    return one, other


def _of_groups(boxes: GroupedBoxes, groups: Column) -> GroupedBoxes:
    number = np.searchsorted(groups, boxes.group)
    rows = np.flatnonzero(np.append(groups, -1)[number] == boxes.group) if groups.size else number[:0]
    return GroupedBoxes(boxes.row[rows], number[rows], boxes.offset[rows], boxes.shape[rows])


def _cut_into_slabs(left: GroupedBoxes, right: GroupedBoxes) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Divide groups into slabs, one axis after another, until there are few candidates per box; return the boxes."""
    for number in range(1, right.offset.shape[1]):
        _, _, counts = _candidate_runs(left, right)
        if counts.sum() <= _PLENTY * (len(left) + len(right)):
            break
        axis = _sorting_axes(right)[number]
        left, right = _renumber(*in_slabs(left, right, axis))
    return left, right


def _candidates(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column]:
    """Return the pairs of boxes that may overlap, as rows of the left and of the right boxes, int64 (pairs,) each."""
    order, first, counts = _candidate_runs(left, right)
    one, place = span_numbers(first, counts)
    other = order[place]
    same = left.group[one] == right.group[other]
    return left.row[one[same]], right.row[other[same]]


def _candidate_runs(left: GroupedBoxes, right: GroupedBoxes) -> tuple[Column, Column, Column]:
    """Return each left box's candidates as a run of right boxes, sorted by group and begin along the sorting axis.

    Returns:
        ``(order, first, count)``: the rows of `right` in sorted order, (rights,), and the first position and the length
        of each left box's run in this order, (lefts,) each.
    """
    if not len(left):
        return left.row, left.row, left.row
    axis = _sorting_axes(right)[0]
    left_begin, left_end = left.interval(axis[left.group])
    right_begin, right_end = right.interval(axis[right.group])

    # Coordinates are replaced by their indices, so that group and coordinate together fit an int64 for any sizes.
    places = distinct(np.concatenate([left_begin, left_end, right_begin, right_end]))
    left_low, left_high = (left.group * places.size + np.searchsorted(places, at) for at in (left_begin, left_end))
    right_low, right_high = (right.group * places.size + np.searchsorted(places, at) for at in (right_begin, right_end))
    order = np.lexsort((right_high, right_low))
    # Ends aren't sorted if boxes differ in length. Their running maximum is, and skips only boxes that end too early.
    first = np.searchsorted(np.maximum.accumulate(right_high[order]), left_low, side="right")
    last = np.searchsorted(right_low[order], left_high, side="left")
    return order, first, np.maximum(last - first, 0)


def _sorting_axes(boxes: GroupedBoxes) -> Column:
    """Return each group's axes, sorted by its boxes' number of distinct begins, most first, int64 (axes, groups)."""
    groups = int(boxes.group.max()) + 1
    axes = range(boxes.offset.shape[1])
    different = np.stack([_distinct(boxes.group, boxes.offset[:, axis], groups) for axis in axes])
    return np.argsort(-different, axis=0, kind="stable")


def _distinct(group: Column, value: Column, groups: int) -> Column:
    order = np.lexsort((value, group))
    sorted_group = group[order]
    return np.bincount(sorted_group[begins(sorted_group, value[order])], minlength=groups)
