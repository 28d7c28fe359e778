"""Groups of boxes divided into slabs, so that in each only few boxes lie side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._boxes import Column
from ._distinct import distinct

_MOST_COPIES = 3
"""Slabs are so thick that all boxes together are in at most so many times their number."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedBoxes:
    """Boxes, none of them empty, each of one group.

    Attributes:
        row: what names a box, int64 (boxes,).
        group: int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: int64 (boxes, axes).
    """

    row: Column
    group: Column
    offset: Column
    shape: Column

    def __len__(self) -> int:
        return len(self.row)

    def interval(self, axis: Column) -> tuple[Column, Column]:
        """Return where boxes begin and end along an axis of each, int64 (boxes,)."""
        rows = np.arange(len(self))
        begin = self.offset[rows, axis]
        return begin, begin + self.shape[rows, axis]


def in_slabs(left: GroupedBoxes, right: GroupedBoxes, axis: Column) -> tuple[GroupedBoxes, GroupedBoxes]:
    """Return boxes with slabs for groups, each box once for every slab that it is in: two that meet do so in one.

    Args:
        left: of groups from 0.
        right: likewise; slabs begin where some of these do.
        axis: for each group, across which its slabs are, int64 (groups,).

    Examples:
        >>> row, zero = np.arange(4), np.zeros(4, dtype=np.int64)
        >>> boxes = GroupedBoxes(row, zero, row[:, None], np.ones((4, 1), dtype=np.int64))
        >>> one = GroupedBoxes(zero[:1], zero[:1], np.array([[1]]), np.array([[2]]))
        >>> one, boxes = in_slabs(one, boxes, np.array([0]))
        >>> one.group.tolist(), boxes.row.tolist(), boxes.group.tolist()
        ([0, 1], [0, 1, 2, 3], [0, 0, 1, 1])
    """
    places = distinct(np.concatenate([*left.interval(axis[left.group]), *right.interval(axis[right.group])]))
    one, other = _coded(left, axis, places), _coded(right, axis, places)
    groups, begins = np.arange(axis.size) * places.size, np.sort(other[0])
    thickness = max(1, int(np.sqrt(len(right) / axis.size)))
    while thickness < len(right):
        bounds = distinct(np.concatenate([groups, begins[::thickness]]))
        (first, count), (other_first, other_count) = _spans(bounds, *one), _spans(bounds, *other)
        if count.sum() + other_count.sum() <= _MOST_COPIES * (len(left) + len(right)):
            return _copied(left, first, count), _copied(right, other_first, other_count)
        thickness *= 4
    return left, right


def _coded(boxes: GroupedBoxes, axis: Column, places: Column) -> tuple[Column, Column]:
    """Return where boxes begin and end, as one number for the group and the rank of the place among all places."""
    begin, end = boxes.interval(axis[boxes.group])
    base = boxes.group * places.size
    return base + np.searchsorted(places, begin), base + np.searchsorted(places, end)


def _spans(bounds: Column, begin: Column, end: Column) -> tuple[Column, Column]:
    """Return the first slab that each interval is in, and how many these are."""
    first = np.searchsorted(bounds, begin, side="right") - 1
    return first, np.searchsorted(bounds, end, side="left") - first


def _copied(boxes: GroupedBoxes, first: Column, count: Column) -> GroupedBoxes:
    row = np.repeat(np.arange(len(boxes)), count)
    turn = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
    return GroupedBoxes(boxes.row[row], first[row] + turn, boxes.offset[row], boxes.shape[row])
