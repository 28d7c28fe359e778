"""Faults of layouts, and problems, which describe faults in words.

A fault is a box or flat range of a global tensor that has no main replica, or several. A problem describes a fault and
the shards in it or next to it. A flat shard is a range of a flattened box, which is called its area.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ...errors import TreePath, plural, rank_text
from .. import geometry
from ..geometry import Column, Mask
from ..offences import offence_text
from ._columns import ShardColumns, select_rows, shard_boxes

_MOST = 2**63 - 1
_ROUNDED = 2.0**62
"""Bound of products as floats: larger products are computed again as Python ints, since an int64 could overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class Faults:
    """Faults of global tensors, one a row: boxes and flat ranges without a main replica, or with several.

    Attributes:
        key: Index of the tensor's key in the shards' `keys`, ascending, int64 (faults,).
        offset: Offset of the box, int64 (faults, axes), right-aligned.
        shape: Shape of the box, int64 (faults, axes).
        start: First element of the flat range, -1 for a whole box, int64 (faults,).
        stop: One past its last element, -1 for a whole box, int64 (faults,).
        doubled: True for several main replicas, False for none, bool (faults,).
    """

    key: Column
    offset: Column
    shape: Column
    start: Column
    stop: Column
    doubled: Mask

    def __len__(self) -> int:
        return len(self.key)


def sharding_faults(main: ShardColumns) -> Faults:
    """Return the parts of global tensors that belong to none of the shards, or to several.

    A fault is a box or a flat range. Flat ranges are used for a tensor if the flattened boxes of its flat shards lie
    inside the tensor. These boxes and the shards that are boxes must not overlap each other.

    Args:
        main: Main replicas of all ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))
        >>> faults = sharding_faults(st.layouts.shard_columns([half]))
        >>> faults.offset.tolist(), faults.shape.tolist(), faults.doubled.tolist()
        ([[2, 0]], [[2, 3]], [False])
    """
    return _faults(main, with_gaps=True)


def doubled_faults(shards: ShardColumns) -> Faults:
    """Return the parts of global tensors that belong to more than one of the shards.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))
        >>> [len(doubled_faults(st.layouts.shard_columns(shards))) for shards in ([half], [half, half])]
        [0, 1]
    """
    return _faults(shards, with_gaps=False)


def _faults(shards: ShardColumns, *, with_gaps: bool) -> Faults:
    regions = geometry.box_column([kind.global_shape for kind in shards.kinds], fill=1, axes=shards.offset.shape[1])
    if _are_whole(shards, regions):
        return _whole_boxes(0, shards.offset[:0], shards.shape[:0], doubled=False)
    areas, of_shard = _flat_areas(shards)
    in_ranges = _reported_in_ranges(shards, areas, regions)
    key, offset, shape = _boxes(shards, areas, in_ranges)
    faults = [_box_faults(key, offset, shape, regions, with_gaps=with_gaps)]
    ranges = np.flatnonzero((shards.start >= 0) & in_ranges[shards.key])
    if ranges.size:
        parts = select_rows(shards, ranges)
        # Areas of other keys are reported as boxes; their size here is 0, so that no elements are missing.
        sizes = np.where(in_ranges[areas.key], geometry.volumes(areas.shape), 0)
        lines = _box_faults(
            of_shard[ranges],
            parts.start[:, None],
            (parts.stop - parts.start)[:, None],
            sizes[:, None],
            with_gaps=with_gaps,
        )
        # A flattened area is a box of one axis, and a flat range an interval of it, so that one check serves both.
        start, stop = lines.offset[:, 0], lines.offset[:, 0] + lines.shape[:, 0]
        area = select_rows(areas, lines.key)
        faults.append(Faults(area.key, area.offset, area.shape, start, stop, lines.doubled))
    return join_faults(faults)


def _are_whole(shards: ShardColumns, regions: Column) -> bool:
    """Return whether each tensor is a single whole shard, as in one process, so that there can be no faults."""
    if len(shards) != len(shards.keys) or shards.offset.any() or (shards.start >= 0).any():
        return False
    is_held = np.bincount(shards.key, minlength=len(shards)) == 1
    return bool(is_held.all()) and np.array_equal(shards.shape, regions.take(shards.key, axis=0))


def _flat_areas(shards: ShardColumns) -> tuple[ShardColumns, Column]:
    """Return the distinct flattened boxes of flat shards, and the row of each shard's; -1 for a shard that is a box."""
    flat = np.flatnonzero(shards.start >= 0)
    boxes = np.column_stack([shards.key[flat], shards.offset[flat], shards.shape[flat]])
    _, first, number = np.unique(boxes, axis=0, return_index=True, return_inverse=True)
    of_shard = np.full(len(shards), -1, dtype=np.int64)
    of_shard[flat] = number.reshape(-1)
    return select_rows(shards, flat[first]), of_shard


def _reported_in_ranges(shards: ShardColumns, areas: ShardColumns, regions: Column) -> Mask:
    """Return for each tensor whether its faults are reported as flat ranges, bool (keys,).

    It is true if the tensor has flat shards whose flattened boxes lie inside the tensor. These boxes and the shards
    that are boxes must not overlap each other.

    Args:
        shards: All shards.
        areas: Distinct flattened boxes of the flat shards.
        regions: Global shape of each tensor, int64 (keys, axes).
    """
    in_ranges = np.zeros(len(shards.keys), dtype=np.bool_)
    if not areas.key.size:
        return in_ranges
    in_ranges[areas.key] = True
    leaves = (areas.offset + areas.shape > regions[areas.key]).any(axis=1)
    in_ranges[areas.key[leaves]] = False
    whole = np.flatnonzero((shards.start < 0) & in_ranges[shards.key])
    key = np.concatenate([areas.key, shards.key[whole]])
    offset = np.concatenate([areas.offset, shards.offset[whole]])
    shape = np.concatenate([areas.shape, shards.shape[whole]])
    # Areas may overlap although their flat ranges and boxes together tile the tensor. Checked as ranges, such a legal
    # layout would lack elements.
    in_ranges[geometry.shared_groups(key, *_clipped(key, offset, shape, regions))] = False
    return in_ranges


def _boxes(shards: ShardColumns, areas: ShardColumns, in_ranges: Mask) -> tuple[Column, Column, Column]:
    """Return the boxes to search for faults: the index of each box's tensor, its offset and its shape.

    They are the boxes that make up all shards. If `in_ranges` is true for a tensor, its faults are reported as flat
    ranges, and its flat shards are replaced by `areas`, their distinct flattened boxes.
    """
    rows = np.flatnonzero((shards.start < 0) | ~in_ranges[shards.key])
    others = select_rows(shards, rows)
    boxes = shard_boxes(others.offset, others.shape, others.start, others.stop)
    kept = select_rows(areas, np.flatnonzero(in_ranges[areas.key]))
    return (
        np.concatenate([others.key[boxes.shard], kept.key]),
        np.concatenate([boxes.offset, kept.offset]),
        np.concatenate([boxes.shape, kept.shape]),
    )


def _box_faults(group: Column, offset: Column, shape: Column, regions: Column, *, with_gaps: bool) -> Faults:
    """Return the parts of each region that several boxes of its group cover.

    If `with_gaps` is set, parts that no box covers are included. `regions` has the shape of each group's region, int64
    (groups, axes).
    """
    sizes = _sizes(regions)
    offset, shape = _clipped(group, offset, shape, regions)
    # One vectorised pass finds the groups with faults. Only those are carved up box by box, to locate the faults.
    counts = geometry.group_sums(group, geometry.volumes(shape), sizes.size)
    wrong = counts != sizes if with_gaps else counts > sizes
    wrong[geometry.shared_groups(group, offset, shape)] = True
    rows = np.flatnonzero(wrong[group])
    rows = rows[np.argsort(group[rows], kind="stable")]
    numbers = np.flatnonzero(wrong)
    begins = np.searchsorted(group[rows], numbers)
    ends = np.searchsorted(group[rows], numbers, side="right")
    faults = [_whole_boxes(0, offset[:0], shape[:0], doubled=False)]
    for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True):
        members = rows[begin:end]
        missing, doubled = geometry.coverage_faults(offset[members], shape[members], tuple(regions[number].tolist()))
        faults += [_whole_boxes(number, *missing, doubled=False)] if with_gaps else []
        faults.append(_whole_boxes(number, *doubled, doubled=True))
    return join_faults(faults)


def _clipped(group: Column, offset: Column, shape: Column, regions: Column) -> tuple[Column, Column]:
    """Return the offsets and shapes of boxes, without parts that lie beyond the regions of their groups.

    `regions` has the shape of each group's region, int64 (groups, axes).
    """
    whole = regions.take(group, axis=0)
    begin = np.minimum(offset, whole)
    return begin, np.minimum(offset + shape, whole) - begin


def _sizes(regions: Column) -> Column:
    """Return the number of elements of each region, clamped to `_MOST`; a row of `regions` is a shape."""
    sizes = geometry.volumes(regions)
    for row in np.flatnonzero(regions.prod(axis=1, dtype=np.float64) >= _ROUNDED).tolist():
        sizes[row] = min(prod(regions[row].tolist()), _MOST)
    return sizes


def _whole_boxes(key: int, offset: Column, shape: Column, *, doubled: bool) -> Faults:
    count = len(offset)
    no_range = np.full(count, -1, dtype=np.int64)
    keys = np.full(count, key, dtype=np.int64)
    return Faults(keys, offset, shape, no_range, no_range, np.full(count, doubled))


def join_faults(found: list[Faults]) -> Faults:
    """Return several `Faults` as one, sorted by key; the order within a key is kept."""
    together = geometry.joined_rows(found)
    return geometry.rows_of(together, np.argsort(together.key, kind="stable"))


# Problems, and the text of boxes and flat ranges in them.


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a layout, the distribution of tensors, objects and common values over ranks.

    Attributes:
        key: Key of the tensor or object, or path of a common value.
        ranks: Ranks concerned, ascending.
        what: Description of the problem.
        box: Slices of the global tensor or array of objects; None if the problem concerns all of it.
        flat: Slice of the flattened box, if shards are flat ranges; None for all of it.
        fix: Advice; empty if there is none.
    """

    key: str | TreePath
    ranks: tuple[int, ...]
    what: str
    box: tuple[slice, ...] | None = None
    flat: slice | None = None
    fix: str = ""

    __str__ = offence_text

    @property
    def where(self) -> str:
        """The ranks, as text."""
        return f"({rank_text(self.ranks)})" if self.ranks else ""


def place_text(box: tuple[slice, ...], flat: slice | None = None) -> str:
    """Return a box, or a flat range of it, as text.

    Examples:
        >>> place_text((slice(0, 2), slice(3, 6))), place_text((slice(0, 4),), slice(1, 3))
        ('[0:2, 3:6]', 'elements [1:3] of [0:4]')
    """
    spans = "[" + ", ".join(f"{span.start}:{span.stop}" for span in box) + "]"
    return spans if flat is None else f"elements [{flat.start}:{flat.stop}] of {spans}"


# Faults as problems.

_SHOWN_OF_ONE = 20
_SHOWN_HOLDERS = 4

_NO_RANK = "; no rank holds any of it"
_NEXT_TO = "; beside it: "
_OTHERS = "; only other replicas: "
_HELD = ": "

_FILL = (
    "Where elements have no main replica, compare the shards' offsets, shapes and flat ranges, and check that all "
    "ranks take part, with all of their shards."
)
_FIXES = {
    _NO_RANK: _FILL,
    _NEXT_TO: _FILL,
    _OTHERS: (
        "Where only other replicas hold elements, give one of them replica_id 0, or a tuple of zeros: replica ids "
        "distinguish the ranks that hold the same box. For a pipeline stage's DTensors, pass the stage's mesh to "
        "from_dtensors, as within=."
    ),
    _HELD: (
        "Where several main replicas hold the same elements, give all but one a replica_id that is not 0; where their "
        "elements differ, give the shards different offsets, flat ranges or keys."
    ),
}


def fault_problems(columns: ShardColumns, faults: Faults, noun: str) -> tuple[Problem, ...]:
    """Return a problem for each of the first 20 faults of a key, and one that counts the others.

    Args:
        columns: All shards, replicas included.
        faults: Boxes and flat ranges without a main replica, or with several.
        noun: Unit of the shards, "element" or "object".

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=1)])
        >>> faults = st.core.layouts.sharding_faults(select_rows(columns, np.flatnonzero(columns.main)))
        >>> [str(problem) for problem in fault_problems(columns, faults, "element")]
        ["'w' (rank 0): [0:2] has no main replica (2 of 2 elements); only other replicas: rank 0 [0:2]"]
    """
    if not len(faults):
        return ()
    place = np.arange(len(faults)) - np.searchsorted(faults.key, faults.key)
    left = np.searchsorted(faults.key, faults.key, side="right") - np.arange(len(faults)) - 1
    shown = np.flatnonzero(place < _SHOWN_OF_ONE)
    # Only shards of tensors with faults are searched for pairs: mostly few rows of many.
    concerned = np.zeros(len(columns.keys), dtype=np.bool_)
    concerned[faults.key] = True
    shards = select_rows(columns, np.flatnonzero(concerned[columns.key]))
    holders = _holders(shards, geometry.rows_of(faults, shown))
    problems = []
    for row, related in zip(shown.tolist(), holders, strict=True):
        problems.append(_problem(shards, faults, row, related, noun))
        if place[row] == _SHOWN_OF_ONE - 1 and left[row]:
            more = f"and {plural(int(left[row]), 'more place')}"
            problems.append(Problem(columns.keys[int(faults.key[row])], (), more))
    return tuple(problems)


def _problem(shards: ShardColumns, faults: Faults, row: int, held: tuple[str, Column], noun: str) -> Problem:
    number = int(faults.key[row])
    whole = shards.kinds[number].global_shape
    box, flat = _place(faults, row, len(whole))
    part = prod(span.stop - span.start for span in box) if flat is None else flat.stop - flat.start
    verb, has = ("are", "have") if flat else ("is", "has")
    state = f"{verb} held by more than one main replica" if faults.doubled[row] else f"{has} no main replica"
    relation, holders = held
    shown, more = holders[:_SHOWN_HOLDERS].tolist(), len(holders) - _SHOWN_HOLDERS
    who = [f"rank {shards.rank[other]} {place_text(*_place(shards, other, len(whole)))}" for other in shown]
    who += [f"and {more} more"] if more > 0 else []
    text = f"{place_text(box, flat)} {state} ({part} of {plural(prod(whole), noun)}){relation}{', '.join(who)}"
    ranks = tuple(np.unique(shards.rank[holders]).tolist())
    return Problem(shards.keys[number], ranks, text, box, flat, _FIXES[relation])


def _holders(shards: ShardColumns, faults: Faults) -> list[tuple[str, Column]]:
    """Return ``(text, rows)`` for each fault: the text before a list of shards in its problem, and the shards' rows.

    If main replicas overlap, they are listed. If a main replica is missing, the other replicas with elements of the
    fault are listed. Without such replicas, the main replicas next to the fault are listed, if there are some.
    """
    mains, others = np.flatnonzero(shards.main), np.flatnonzero(~shards.main)
    doubled, gaps = np.flatnonzero(faults.doubled), np.flatnonzero(~faults.doubled)
    relations = [(_NO_RANK, np.zeros(0, dtype=np.int64))] * len(faults)
    for relation, rows, candidates, reach in (
        # Later rows replace earlier ones: a copy that could become the main replica is more helpful than a neighbour.
        (_NEXT_TO, gaps, mains, 1),
        (_OTHERS, gaps, others, 0),
        (_HELD, doubled, mains, 0),
    ):
        for row, near in _within_reach(select_rows(shards, candidates), geometry.rows_of(faults, rows), reach=reach):
            relations[int(rows[row])] = relation, candidates[near]
    return relations


def _within_reach(shards: ShardColumns, faults: Faults, *, reach: int) -> Iterator[tuple[int, Column]]:
    """Yield each fault's row and the rows of the shards within `reach` elements of it, unless it has no such shard."""
    places = shard_boxes(faults.offset, faults.shape, faults.start, faults.stop)
    boxes = shard_boxes(shards.offset, shards.shape, shards.start, shards.stop)
    fault, box = geometry.overlapping_pairs(
        faults.key[places.shard],
        places.offset - reach,
        places.shape + 2 * reach,
        shards.key[boxes.shard],
        boxes.offset,
        boxes.shape,
    )
    pairs = np.unique(np.column_stack([places.shard[fault], boxes.shard[box]]), axis=0)
    rows, first = np.unique(pairs[:, 0], return_index=True)
    return zip(rows.tolist(), np.split(pairs[:, 1], first[1:]), strict=False)


def _place(places: ShardColumns | Faults, row: int, axes: int) -> tuple[tuple[slice, ...], slice | None]:
    """Return the box in a row, as `axes` slices, and the flat range of this box; None if the row has no flat range.

    In the columns, boxes of tensors with fewer axes are padded on the left.
    """
    start, stop = int(places.start[row]), int(places.stop[row])
    return geometry.box_slices(places.offset[row], places.shape[row], axes), None if start < 0 else slice(start, stop)
