"""The mapping of one axis to stored tensors (parts): runs of its indices, each stored at consecutive indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..core.geometry import Column, integer, integers, refuse
from ..errors import ShapeError, error_text

PADDING = -1
"""The part number of indices that aren't stored."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisRuns:
    """The mapping of one axis to stored tensors, as runs of consecutive indices that tile the model's axis in order.

    Each index of a stored tensor belongs to exactly one run.

    Attributes:
        length: Length of each run, int64 (runs,).
        part: Number of the stored tensor that has each run, or `PADDING` if the run is not stored, int64 (runs,).
        start: Offset of each run along the stored tensor's axis, int64 (runs,).
        sizes: Length of the axis in each stored tensor.

    Raises:
        ShapeError: The columns are not integers or differ in length, a run exceeds its stored tensor, or an index of a
            stored tensor belongs to no run or to several.

    Examples:
        >>> rows = AxisRuns(np.array([2, 2, 2, 2]), np.array([0, 1, 0, 1]), np.array([0, 0, 2, 2]), (4, 4))
        >>> rows.total  # gate, up, gate, up, as two ranks hold them
        8
    """

    length: Column
    part: Column
    start: Column
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("length", "part", "start"):
            object.__setattr__(self, name, _column(name, getattr(self, name)))
        object.__setattr__(self, "sizes", integers("AxisRuns", "sizes", self.sizes))
        _check_runs(self)

    @property
    def total(self) -> int:
        """Length of the model's axis."""
        return int(self.length.sum())


def _column(name: str, values: Any) -> Column:
    try:
        column = np.asarray(values)
    except ValueError:
        column = np.asarray("lists of other lengths")
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        found = f"{column.dtype} of shape {column.shape}"
        refuse("AxisRuns", name, found, "one axis of integers", "Pass one number for each run.", error=ShapeError)
    return column.astype(np.int64)


def _check_runs(runs: AxisRuns) -> None:
    """Raise ShapeError unless each stored index belongs to exactly one run."""
    counts = {len(runs.length), len(runs.part), len(runs.start)}
    if len(counts) > 1 or (runs.length < 0).any():
        fix = "Pass one length, part and start for each run, none of them negative."
        refuse("AxisRuns", "length", runs.length.tolist()[:10], "a length for each run", fix, error=ShapeError)
    if ((runs.part < PADDING) | (runs.part >= len(runs.sizes))).any():
        expected = f"PADDING, or 0 to {len(runs.sizes) - 1}, as there are {len(runs.sizes)} sizes"
        refuse("AxisRuns", "part", sorted(set(runs.part.tolist()))[:10], expected, "", error=ShapeError)
    # This check makes lenses of an axis invertible: a stored index in two runs would lose an element, and an index in
    # no run would be written by no rank.
    for number, size in enumerate(runs.sizes):
        rows = (runs.part == number) & (runs.length > 0)
        start, length = runs.start[rows], runs.length[rows]
        order = np.argsort(start, kind="stable")
        ends = np.concatenate([[0], (start + length)[order]])
        if not np.array_equal(ends, np.concatenate([start[order], [size]])):
            pairs = zip(start[order].tolist(), ends[1:].tolist(), strict=True)
            found = ", ".join(f"[{first}:{end}]" for first, end in list(pairs)[:10])
            expected = f"each of its {size} indices exactly once"
            refuse("AxisRuns", f"part {number}", found or "nothing", expected, "", error=ShapeError)


@dataclass(frozen=True, slots=True, eq=False)
class AxisBlock:
    """An interval of a stored tensor's axis, and its indices in a box of the model's tensor.

    Attributes:
        part: Number of the stored tensor.
        start: Offset of the interval along the stored tensor's axis.
        places: Index along the box's axis for each index of the interval, counted from the box's begin, int64
            (indices,).
    """

    part: int
    start: int
    places: Column


def grouped_runs(total: int, groups: int, sizes: Sequence[int]) -> AxisRuns:
    """Return the runs of an axis that consists of equal groups, each with one segment of every stored tensor in turn.

    Args:
        total: Length of the axis, which must be `groups` times the sum of the sizes.
        groups: Number of groups.
        sizes: Length of each stored tensor's segment in one group.

    Raises:
        MetadataError: A number isn't an integer.
        ShapeError: The axis has another length.

    Examples:
        >>> runs = grouped_runs(12, 2, (4, 1, 1))  # q q q q k v, twice
        >>> runs.part.tolist(), runs.start.tolist(), runs.sizes
        ([0, 1, 2, 0, 1, 2], [0, 0, 0, 4, 1, 1], (8, 2, 2))
    """
    doing = "grouped_runs"
    whole, count, group_sizes = (
        integer(doing, "total", total),
        integer(doing, "groups", groups),
        integers(doing, "sizes", sizes),
    )
    if count < 0 or count * sum(group_sizes) != whole:
        heading, fix = "grouped_runs: groups * sum(sizes) is not equal to total", "Correct total=, groups= or sizes=."
        found, expected = f"{count} groups of {sum(group_sizes)} indices", f"{whole} indices in total"
        raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))
    length = np.tile(np.array(group_sizes, dtype=np.int64), count)
    part = np.tile(np.arange(len(group_sizes)), count)
    start = length * np.repeat(np.arange(count), len(group_sizes))
    return AxisRuns(length, part, start, tuple(size * count for size in group_sizes))


def joined_parts(runs: AxisRuns, order: Sequence[int] | None = None) -> AxisRuns:
    """Return the runs that result if all stored tensors are concatenated into one.

    Args:
        runs: Runs with one stored tensor or several.
        order: Numbers of the stored tensors in the order of their concatenation; ascending by default.

    Raises:
        ShapeError: The order does not have each number once.

    Examples:
        >>> joined_parts(grouped_runs(4, 2, (1, 1))).start.tolist()
        [0, 2, 1, 3]
    """
    parts = list(range(len(runs.sizes)) if order is None else integers("joined_parts", "order", order))
    if sorted(parts) != list(range(len(runs.sizes))):
        refuse("joined_parts", "order", parts, f"each of {len(runs.sizes)} parts once", "", error=ShapeError)
    base = np.zeros(len(runs.sizes), dtype=np.int64)
    base[parts] = np.cumsum([0, *(runs.sizes[part] for part in parts)])[:-1]
    is_stored = runs.part != PADDING
    start = np.where(is_stored, runs.start + base[runs.part], 0)
    return AxisRuns(runs.length, np.where(is_stored, 0, PADDING), start, (sum(runs.sizes),))


def stored_blocks(runs: AxisRuns, begin: int, end: int) -> list[AxisBlock]:
    """Return the stored intervals for a range of the model's axis: as few as possible, sorted by part and offset.

    Args:
        runs: Mapping of the whole axis.
        begin: First index of the range.
        end: End of the range, exclusive.

    Examples:
        >>> rows = grouped_runs(8, 2, (2, 2))
        >>> [(block.part, block.start, block.places.tolist()) for block in stored_blocks(rows, 1, 8)]
        [(0, 1, [0, 3, 4]), (1, 0, [1, 2, 5, 6])]
    """
    begins = np.cumsum(runs.length) - runs.length
    first, last = np.maximum(begins, begin), np.minimum(begins + runs.length, end)
    rows = np.flatnonzero((first < last) & (runs.part != PADDING))
    part, start = runs.part[rows], runs.start[rows] + first[rows] - begins[rows]
    place, length = first[rows] - begin, last[rows] - first[rows]
    order = np.lexsort((start, part))
    part, start, place, length = part[order], start[order], place[order], length[order]
    # Runs that are neighbours in storage become one block: the fewest boxes, wherever the model has their indices.
    follows = (part[1:] == part[:-1]) & (start[1:] == start[:-1] + length[:-1])
    bounds = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(rows)]
    return [
        AxisBlock(int(part[low]), int(start[low]), _interval_places(place[low:high], length[low:high]))
        for low, high in pairwise(bounds)
        if low < high
    ]


def _interval_places(start: Column, length: Column) -> Column:
    """Return all indices of several intervals, one interval after the other."""
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(length.sum())
