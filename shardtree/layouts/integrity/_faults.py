"""Where main replicas don't tile their tensors, as columns: a fault is a box, or a flat range of one, like a shard."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ...geometry import Column, box_column, coverage_faults, held_elements, overlapping_groups, volumes
from .._columns import ShardColumns, select_rows, shard_boxes

_MOST = 2**63 - 1
_ROUNDED = 2.0**62
"""Products that are this large as floats are computed again as Python ints: an int64 could overflow."""
_COLUMNS = ("key", "offset", "shape", "start", "stop", "doubled")

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class Faults:
    """Places that no main replica holds, or more than one, a place a row.

    Attributes:
        key: which tensor, ascending, int64 (faults,).
        offset: int64 (faults, axes), right-aligned.
        shape: int64 (faults, axes).
        start: first element of the flat range, -1 for a whole box, int64 (faults,).
        stop: one past its last element, -1 for a whole box, int64 (faults,).
        doubled: True where it is held more than once, False where not at all, bool (faults,).
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
    """Return every place that doesn't belong to exactly one of the given shards.

    Faults of a tensor whose flat ranges belong to disjoint boxes are flat ranges, since its user thinks in them; those
    of any other are boxes.

    Args:
        main: the main replicas of all ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))
        >>> faults = sharding_faults(st.layouts.shard_columns([half]))
        >>> faults.offset.tolist(), faults.shape.tolist(), faults.doubled.tolist()
        ([[2, 0]], [[2, 3]], [False])
    """
    return _faults(main, with_gaps=True)


def doubled_faults(shards: ShardColumns) -> Faults:
    """Return every place that belongs to more than one of the given shards.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))
        >>> [len(doubled_faults(st.layouts.shard_columns(shards))) for shards in ([half], [half, half])]
        [0, 1]
    """
    return _faults(shards, with_gaps=False)


def _faults(shards: ShardColumns, *, with_gaps: bool) -> Faults:
    regions = box_column([kind.global_shape for kind in shards.kinds], fill=1, axes=shards.offset.shape[1])
    areas, of_shard = _flat_areas(shards)
    in_ranges = _reported_in_ranges(shards, areas, regions)
    key, offset, shape = _boxes(shards, areas, in_ranges)
    found = [_box_faults(key, offset, shape, regions, with_gaps=with_gaps)]
    ranges = np.flatnonzero((shards.start >= 0) & in_ranges[shards.key])
    if ranges.size:
        parts = select_rows(shards, ranges)
        # Areas of other keys are reported as boxes: here they get no elements, and so lack none.
        sizes = np.where(in_ranges[areas.key], volumes(areas.shape), 0)
        lines = _box_faults(
            of_shard[ranges],
            parts.start[:, None],
            (parts.stop - parts.start)[:, None],
            sizes[:, None],
            with_gaps=with_gaps,
        )
        # A flattened area is a box of one axis, and a flat range an interval of it: the same check serves both.
        start, stop = lines.offset[:, 0], lines.offset[:, 0] + lines.shape[:, 0]
        area = select_rows(areas, lines.key)
        found.append(Faults(area.key, area.offset, area.shape, start, stop, lines.doubled))
    return _in_order(found)


def _flat_areas(shards: ShardColumns) -> tuple[ShardColumns, Column]:
    """Return a row for each box that is flattened, and for each shard the number of its box."""
    flat = np.flatnonzero(shards.start >= 0)
    boxes = np.column_stack([shards.key[flat], shards.offset[flat], shards.shape[flat]])
    _, first, number = np.unique(boxes, axis=0, return_index=True, return_inverse=True)
    of_shard = np.full(len(shards), -1, dtype=np.int64)
    of_shard[flat] = number.reshape(-1)
    return select_rows(shards, flat[first]), of_shard


def _reported_in_ranges(shards: ShardColumns, areas: ShardColumns, regions: Column) -> Mask:
    """Return which tensors have flat ranges, of boxes that lie in the tensor and apart from others."""
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
    # Flat ranges and boxes may hold a tensor together, each element once, in areas that overlap: reported in ranges, a
    # legal layout would lack elements.
    overlap = overlapping_groups(key, *_clipped(key, offset, shape, regions), _sizes(regions))
    return np.asarray(in_ranges & ~overlap)


def _boxes(shards: ShardColumns, areas: ShardColumns, in_ranges: Mask) -> tuple[Column, Column, Column]:
    """Return the boxes of all shards; where flat ranges are reported as such, the boxes that contain them."""
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
    """Return where the boxes of each group don't tile its region."""
    sizes = _sizes(regions)
    offset, shape = _clipped(group, offset, shape, regions)
    # One vectorised pass over all groups finds which are wrong. Only those are carved up box by box, to name places.
    wrong = overlapping_groups(group, offset, shape, sizes)
    if with_gaps:
        wrong |= held_elements(group, shape, sizes.size) != sizes
    rows = np.flatnonzero(wrong[group])
    rows = rows[np.argsort(group[rows], kind="stable")]
    numbers = np.flatnonzero(wrong)
    begins = np.searchsorted(group[rows], numbers)
    ends = np.searchsorted(group[rows], numbers, side="right")
    found = [_no_faults(offset.shape[1])]
    for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True):
        own = rows[begin:end]
        missing, doubled = coverage_faults(offset[own], shape[own], tuple(regions[number].tolist()))
        found += [_whole_boxes(number, *missing, doubled=False)] if with_gaps else []
        found.append(_whole_boxes(number, *doubled, doubled=True))
    return _in_order(found)


def _clipped(group: Column, offset: Column, shape: Column, regions: Column) -> tuple[Column, Column]:
    """Return boxes without what lies beyond their regions."""
    whole = regions.take(group, axis=0)
    begin = np.minimum(offset, whole)
    return begin, np.minimum(offset + shape, whole) - begin


def _sizes(regions: Column) -> Column:
    """Return how many elements each region has, at most `_MOST`."""
    sizes = volumes(regions)
    for row in np.flatnonzero(regions.prod(axis=1, dtype=np.float64) >= _ROUNDED).tolist():
        sizes[row] = min(prod(regions[row].tolist()), _MOST)
    return sizes


def _whole_boxes(key: int, offset: Column, shape: Column, *, doubled: bool) -> Faults:
    count = len(offset)
    no_range = np.full(count, -1, dtype=np.int64)
    keys = np.full(count, key, dtype=np.int64)
    return Faults(keys, offset, shape, no_range, no_range, np.full(count, doubled))


def _no_faults(axes: int) -> Faults:
    none = np.zeros((0, axes), dtype=np.int64)
    return _whole_boxes(0, none, none, doubled=False)


def _in_order(found: list[Faults]) -> Faults:
    """Return faults as one, by key; of one key in the order given."""
    columns = {name: np.concatenate([getattr(each, name) for each in found]) for name in _COLUMNS}
    together = Faults(**columns)
    return select_faults(together, np.argsort(together.key, kind="stable"))


def select_faults(faults: Faults, rows: Column) -> Faults:
    """Return the given rows of faults, in the order given.

    Examples:
        >>> import torch, shardtree as st
        >>> none = sharding_faults(st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))]))
        >>> len(select_faults(none, np.arange(0)))
        0
    """
    return Faults(**{name: getattr(faults, name)[rows] for name in _COLUMNS})
