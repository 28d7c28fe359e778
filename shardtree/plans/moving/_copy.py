"""Transfers copied or converted: boxes of shards into other shards, or into buffers, in this process's memory."""

from __future__ import annotations

import numpy as np
import torch

from ...geometry import Column
from .._convertible import convert
from ..resharding import ReshardPlan
from ._regions import Boxes, Memories, Regions, copy_boxes, region_views, select_regions, shard_regions, target_regions


def copy_transfers(plan: ReshardPlan, rows: Column, sources: Memories, targets: Memories) -> None:
    """Write transfers into target shards, straight from where they come from.

    Args:
        plan: what moves.
        rows: of its transfers, all of one hop.
        sources: the data of source shards, by row.
        targets: written: the data of target shards, by row.
    """
    moved = plan.transfers
    columns, memories = (plan.target, targets) if moved.hop[rows].any() else (plan.source, sources)
    shape = moved.shape[rows]
    taken = Boxes(moved.source[rows], moved.source_element[rows], moved.source_stride[rows], shape)
    put = Boxes(moved.target[rows], moved.target_element[rows], moved.target_stride[rows], shape)
    into = target_regions(plan.target, put, targets)
    write_boxes(plan, rows, shape, shard_regions(columns, taken, memories), into)


def write_boxes(plan: ReshardPlan, rows: Column, shape: Column, source: Regions, target: Regions) -> None:
    """Write boxes of transfers bit for bit, or converted where they come from a shard of another dtype.

    Args:
        plan: what moves.
        rows: the transfer that each box is of, int64 (boxes,).
        shape: int64 (boxes, axes).
        source: where they are, in the dtype that they have there.
        target: where they go, as the target's dtype: a shard, or a buffer on the way to one.

    Raises:
        ShapeError: an integer doesn't fit the target's dtype.
    """
    casts = _casts(plan, rows)
    if not casts:
        return copy_boxes(shape, source, target)
    key = plan.transfers.key[rows]
    converted = (plan.transfers.hop[rows] == 0) & np.isin(key, list(casts))
    own, rest = np.flatnonzero(converted), np.flatnonzero(~converted)
    ends = (region_views(shape[own], select_regions(one, own)) for one in (source, target))
    for number, taken, put in zip(key[own].tolist(), *ends, strict=True):
        before, after = casts[number]
        convert(plan.target.keys[number], taken.view(before), put.view(after), doing="reshard")
    return copy_boxes(shape[rest], select_regions(source, rest), select_regions(target, rest))


def _casts(plan: ReshardPlan, rows: Column) -> dict[int, tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes before and after of the tensors that change theirs in the given transfers, by number."""
    moved = plan.transfers
    first = rows[moved.hop[rows] == 0]  # what comes from a target shard has the target's dtype
    key, at = np.unique(moved.key[first], return_index=True)
    had = plan.source.key[moved.source[first[at]]]
    pairs = zip(key.tolist(), had.tolist(), strict=True)
    dtypes = {number: (plan.source.kinds[one].dtype, plan.target.kinds[number].dtype) for number, one in pairs}
    return {number: (before, after) for number, (before, after) in dtypes.items() if before != after}
