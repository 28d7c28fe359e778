"""How much memory a reshard takes on each rank."""

from __future__ import annotations

import numpy as np

from ...errors import MetadataError, error_text, plural
from ...geometry import Column, check_type
from ...layouts import ShardColumns
from ._plan import ReshardPlan
from ._schedule import Schedule


def peak_bytes(plan: ReshardPlan, schedule: Schedule) -> dict[int, int]:
    """Return how many bytes of tensors each rank has at most, while a plan is carried out by a schedule.

    Counted are the data of all its source shards and of all its target shards, both held from beginning to end, and
    the buffers of the step in which it has most of them: what it sends in that step and what it gets, each once, and
    freed before the next step. So no rank has more than its shards and `max_bytes_in_flight`. Not counted is what an
    executor or a communication library takes beside that; and where target shards share the memory of source shards,
    they are counted twice.

    Args:
        plan: what moves.
        schedule: that plan's.

    Raises:
        MetadataError: the schedule is another plan's.

    Examples:
        >>> import torch, shardtree as st
        >>> def tree(rank, axis):
        ...     part = torch.zeros(2, 2).chunk(2, axis)[rank]
        ...     return {"w": st.ShardedTensor.from_rank_offsets("w", part, (axis, rank, 2))}
        >>> plan = st.plan_reshard([tree(0, 0), tree(1, 0)], [tree(0, 1), tree(1, 1)])
        >>> peak_bytes(plan, plan.schedule()), peak_bytes(plan, plan.schedule(max_bytes_in_flight=4))
        ({0: 24, 1: 24}, {0: 20, 1: 20})
    """
    check_type("peak_bytes", "plan", plan, ReshardPlan, "Pass what `plan_reshard` returns.")
    check_type("peak_bytes", "schedule", schedule, Schedule, "Pass what `plan.schedule()` returns.")
    _check_schedule(plan, schedule)
    ranks = np.array(plan.ranks, dtype=np.int64)
    held = _shard_bytes(plan.source, ranks) + _shard_bytes(plan.target, ranks)
    places = [np.searchsorted(ranks, column) for column in (schedule.from_rank, schedule.to_rank)]
    # Rows of (step, rank), without a table of all steps by all ranks: there may be many of both.
    at, number = np.unique(schedule.step * ranks.size + np.stack(places), return_inverse=True)
    flying = np.zeros(at.size, dtype=np.int64)
    np.add.at(flying, number.ravel(), np.tile(schedule.nbytes, 2))
    most = np.zeros(ranks.size, dtype=np.int64)
    if at.size:
        np.maximum.at(most, at % ranks.size, flying)
    return dict(zip(ranks.tolist(), (held + most).tolist(), strict=True))


def _check_schedule(plan: ReshardPlan, schedule: Schedule) -> None:
    """Raise unless pieces are of transfers that are there, between the ranks that are said."""
    transfers, rows = plan.transfers, schedule.transfer
    if not rows.size or (
        rows.max() < len(transfers)
        and np.array_equal(transfers.from_rank[rows], schedule.from_rank)
        and np.array_equal(transfers.to_rank[rows], schedule.to_rank)
    ):
        return
    what, fix = "peak_bytes: the schedule is another plan's", "Pass plan.schedule(...) of the same plan."
    found, expected = f"{plural(len(schedule), 'piece')} of other transfers", "pieces of the plan's transfers"
    raise MetadataError(error_text(what, found=found, expected=expected, fix=fix))


def _shard_bytes(columns: ShardColumns, ranks: Column) -> Column:
    """Return the bytes of the shards of each rank."""
    held = np.zeros(ranks.size, dtype=np.int64)
    np.add.at(held, np.searchsorted(ranks, columns.rank), columns.elements * columns.item_size[columns.key])
    return held
