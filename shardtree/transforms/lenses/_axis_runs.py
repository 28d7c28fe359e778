"""Where the indices of one axis are stored: runs that go to consecutive places of some part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...errors import ShapeError, error_text
from ...geometry import Column

PADDING = -1
"""The part of what isn't stored at all."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisRuns:
    """Where each index of an axis, as the model holds it, is stored. Runs are in the order of the held axis, no gaps.

    Attributes:
        length: of each run, int64 (runs,).
        part: which stored tensor a run lies in; `PADDING` where it isn't stored, int64 (runs,).
        start: the first place of a run along the stored tensor's axis, int64 (runs,).
        sizes: how long the stored tensors are along the axis, one for each part.

    Examples:
        >>> rows = AxisRuns(np.array([2, 2, 2, 2]), np.array([0, 1, 0, 1]), np.array([0, 0, 2, 2]), (4, 4))
        >>> rows.total  # gate, up, gate, up, as two ranks hold them
        8
    """

    length: Column
    part: Column
    start: Column
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """How long the held axis is."""
        return int(self.length.sum())


class Block(NamedTuple):
    """A stretch of a stored axis, and where the model holds it.

    Attributes:
        part: which stored tensor.
        start: the first place along its axis.
        places: for each of its places, where it is held, counted from the interval's begin, int64 (places,).
    """

    part: int
    start: int
    places: Column


def grouped_runs(total: int, groups: int, sizes: Sequence[int]) -> AxisRuns:
    """Return the runs of an axis of several groups, each of which has a segment of each part, one after the other.

    Args:
        total: how long the axis is: `groups` times the sum of the sizes.
        groups: how many there are.
        sizes: how long a part's segment is in each group.

    Examples:
        >>> runs = grouped_runs(12, 2, (4, 1, 1))  # q q q q k v, twice
        >>> runs.part.tolist(), runs.start.tolist(), runs.sizes
        ([0, 1, 2, 0, 1, 2], [0, 0, 0, 4, 1, 1], (8, 2, 2))
    """
    length = np.tile(np.array(sizes, dtype=np.int64), groups)
    part = np.tile(np.arange(len(sizes)), groups)
    start = length * np.repeat(np.arange(groups), len(sizes))
    runs = AxisRuns(length, part, start, tuple(size * groups for size in sizes))
    if runs.total != total:
        found, expected = f"{groups} groups of {sum(sizes)}", f"{total} in all"
        raise ShapeError(error_text("an axis that isn't made of such groups", found=found, expected=expected))
    return runs


def joined_parts(runs: AxisRuns, order: Sequence[int] | None = None) -> AxisRuns:
    """Return the same runs with all parts in one stored tensor, one part behind the other.

    Args:
        runs: of one part or more.
        order: of the parts; by default their own.

    Examples:
        >>> joined_parts(grouped_runs(4, 2, (1, 1))).start.tolist()
        [0, 2, 1, 3]
    """
    ordered = list(range(len(runs.sizes)) if order is None else order)
    base = np.zeros(len(runs.sizes), dtype=np.int64)
    base[ordered] = np.cumsum([0, *(runs.sizes[part] for part in ordered)])[:-1]
    is_stored = runs.part != PADDING
    start = np.where(is_stored, runs.start + base[runs.part], 0)
    return AxisRuns(runs.length, np.where(is_stored, 0, PADDING), start, (sum(runs.sizes),))


def stored_blocks(runs: AxisRuns, begin: int, end: int) -> list[Block]:
    """Return where an interval of the held axis is stored: the fewest blocks, by part, then place.

    Examples:
        >>> rows = grouped_runs(8, 2, (2, 2))
        >>> [(part, start, places.tolist()) for part, start, places in stored_blocks(rows, 1, 8)]
        [(0, 1, [0, 3, 4]), (1, 0, [1, 2, 5, 6])]
    """
    held = np.cumsum(runs.length) - runs.length
    first, last = np.maximum(held, begin), np.minimum(held + runs.length, end)
    rows = np.flatnonzero((first < last) & (runs.part != PADDING))
    part, start = runs.part[rows], runs.start[rows] + first[rows] - held[rows]
    place, length = first[rows] - begin, last[rows] - first[rows]
    order = np.lexsort((start, part))
    part, start, place, length = part[order], start[order], place[order], length[order]
    follows = (part[1:] == part[:-1]) & (start[1:] == start[:-1] + length[:-1])
    bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(rows)]
    return [
        Block(int(part[low]), int(start[low]), _spread(place[low:high], length[low:high]))
        for low, high in pairwise(bounds)
        if low < high
    ]


def _spread(start: Column, length: Column) -> Column:
    """Return all places of intervals, one interval after the other."""
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(length.sum())
