"""Transfers copied straight from shard to shard, where both lie in this process's memory."""

from __future__ import annotations

from ...geometry import Column
from ..resharding import ReshardPlan
from ._regions import Boxes, Memories, copy_boxes, shard_regions, target_regions


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
    copy_boxes(shape, shard_regions(columns, taken, memories), target_regions(plan.target, put, targets))
