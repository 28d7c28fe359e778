"""What executors of a plan are made of: bytes taken out of shards into buffers, and put from buffers into shards.

An executor calls `copy_own`, for each step `packed`, what moves the buffers, and `unpack`, and at last `copy_doubled`.
A buffer holds what one rank sends to another in one step of a schedule, as bytes: tensors of large items first, else in
the schedule's order, so that every piece is aligned. What is cast is converted straight into it: it travels in the
target's dtype. `pack_into`, `unpack`, `copy_own` and `copy_doubled` write into what they are given; nothing else here
does.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..geometry import Column
from ..plans import ReshardPlan, Schedule
from ..plans.moving import (
    Memories,
    copy_boxes,
    copy_transfers,
    memory_of,
    shard_regions,
    target_regions,
    write_boxes,
)
from ._buffers import BufferPieces, buffered, check_buffers, got_pieces, piece_boxes, select_pieces, sent_pieces


def outgoing_bytes(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> dict[int, int]:
    """Return how many bytes a rank sends to each other rank in a step; ranks that get none aren't there.

    Args:
        plan: what moves.
        schedule: of that plan.
        step: which one, from 0.
        rank: who sends.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> tree = {"w": torch.arange(4, dtype=torch.int8)}
        >>> halves, whole = shard(tree, Mesh(dp=2), PartitionSpec("dp")), shard(tree, Mesh(dp=1), PartitionSpec())
        >>> plan = st.plan_reshard(halves, whole)
        >>> outgoing_bytes(plan, plan.schedule(), 0, 1)
        {0: 2}
    """
    return sent_pieces(plan, schedule, step, rank).sizes


def incoming_bytes(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> dict[int, int]:
    """Return how many bytes a rank gets from each other rank in a step; ranks that send none aren't there.

    Args:
        plan: what moves.
        schedule: of that plan.
        step: which one, from 0.
        rank: who gets them.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> tree = {"w": torch.arange(4, dtype=torch.int8)}
        >>> halves, whole = shard(tree, Mesh(dp=2), PartitionSpec("dp")), shard(tree, Mesh(dp=1), PartitionSpec())
        >>> plan = st.plan_reshard(halves, whole)
        >>> incoming_bytes(plan, plan.schedule(), 0, 0)
        {1: 2}
    """
    return got_pieces(plan, schedule, step, rank).sizes


def packed(
    plan: ReshardPlan, schedule: Schedule, step: int, rank: int, sources: Memories, targets: Memories
) -> dict[int, torch.Tensor]:
    """Return what a rank sends to each other rank in a step, as new buffers.

    Args:
        plan: what moves.
        schedule: of that plan.
        step: which one, from 0.
        rank: who sends.
        sources: the data of the rank's shards by their row in `plan.source`, strided in any way.
        targets: the data of its target shards by their row in `plan.target`: what it passes on, it has got there.

    Returns:
        uint8 (bytes,) for each rank that gets something, on the device of the first shard that it is from.

    Raises:
        KeyMismatch: a shard has no tensor.
        ShapeError: a tensor isn't its shard's, or has an integer that the target's dtype can't hold.
        UnsupportedValue: a tensor isn't dense, or quantised.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> tree = {"w": torch.arange(4, dtype=torch.int8)}
        >>> halves, whole = shard(tree, Mesh(dp=2), PartitionSpec("dp")), shard(tree, Mesh(dp=1), PartitionSpec())
        >>> plan = st.plan_reshard(halves, whole)
        >>> packed(plan, plan.schedule(), 0, 1, {1: halves[1]["w"].data}, {})
        {0: tensor([2, 3], dtype=torch.uint8)}
    """
    pieces = sent_pieces(plan, schedule, step, rank)
    first = dict(zip(pieces.peer[::-1].tolist(), pieces.transfer[::-1].tolist(), strict=True))
    moved = plan.transfers
    ends = ((plan.source, sources), (plan.target, targets))
    devices = {}
    for peer, row in first.items():
        columns, memories = ends[int(moved.hop[row] > 0)]
        devices[peer] = memory_of(columns, int(moved.source[row]), memories).device
    buffers = {peer: torch.empty(size, dtype=torch.uint8, device=devices[peer]) for peer, size in pieces.sizes.items()}
    _write(plan, pieces, sources, targets, buffers)
    return buffers


def pack_into(
    plan: ReshardPlan,
    schedule: Schedule,
    step: int,
    rank: int,
    sources: Memories,
    targets: Memories,
    buffers: Mapping[int, torch.Tensor],
) -> None:
    """Write what a rank sends to each other rank in a step into given buffers.

    Args:
        plan: what moves.
        schedule: of that plan.
        step: which one, from 0.
        rank: who sends.
        sources: as in `packed`.
        targets: as in `packed`.
        buffers: written: uint8, of the sizes that `outgoing_bytes` says; each begins at a multiple of 16 bytes.

    Raises:
        KeyMismatch: a shard has no tensor, or a rank no buffer.
        ShapeError: a tensor isn't its shard's, or has an integer that the target's dtype can't hold; or a buffer has
            another size.
        UnsupportedValue: a tensor isn't dense, or quantised.

    Examples:
        >>> import shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.arange(4, dtype=torch.int8))
        >>> plan = st.plan_reshard([[whole], []], [[], [whole]])
        >>> schedule, kept = plan.schedule(), torch.empty(4, dtype=torch.uint8)
        >>> pack_into(plan, schedule, 0, 0, {0: whole.data}, {}, {1: kept})
        >>> kept
        tensor([0, 1, 2, 3], dtype=torch.uint8)
    """
    pieces = sent_pieces(plan, schedule, step, rank)
    check_buffers(pieces.sizes, buffers)
    _write(plan, pieces, sources, targets, buffers)


def unpack(
    plan: ReshardPlan,
    schedule: Schedule,
    step: int,
    rank: int,
    targets: Memories,
    buffers: Mapping[int, torch.Tensor],
) -> None:
    """Write what a rank got from each other rank in a step into its target shards.

    Args:
        plan: what moves.
        schedule: of that plan.
        step: which one, from 0.
        rank: who got it.
        targets: written: the data of the rank's target shards, by their row in `plan.target`.
        buffers: what each rank sent, uint8, of the sizes that `incoming_bytes` says.

    Raises:
        KeyMismatch: a shard has no tensor, or a rank no buffer.
        ShapeError: a tensor isn't its shard's, or a buffer has another size.
        UnsupportedValue: a tensor isn't dense, or quantised.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> tree = {"w": torch.arange(4, dtype=torch.int8)}
        >>> halves, whole = shard(tree, Mesh(dp=2), PartitionSpec("dp")), shard(tree, Mesh(dp=1), PartitionSpec())
        >>> plan = st.plan_reshard(halves, whole)
        >>> target = torch.zeros(4, dtype=torch.int8)
        >>> unpack(plan, plan.schedule(), 0, 0, {0: target}, {1: torch.tensor([8, 9], dtype=torch.uint8)})
        >>> target
        tensor([0, 0, 8, 9], dtype=torch.int8)
    """
    pieces = got_pieces(plan, schedule, step, rank)
    check_buffers(pieces.sizes, buffers)
    moved = plan.transfers
    piece, boxes, position = piece_boxes(plan, pieces, moved.target, moved.target_element, moved.target_stride)
    came = buffered(pieces, piece, position, boxes.shape, buffers)
    copy_boxes(boxes.shape, came, target_regions(plan.target, boxes, targets))


def copy_own(plan: ReshardPlan, rank: int, sources: Memories, targets: Memories) -> None:
    """Write what stays on a rank into its target shards, straight from its own shards. Executors do this first.

    Args:
        plan: what moves and what stays.
        rank: whose.
        sources: the data of the rank's shards by their row in `plan.source`, strided in any way.
        targets: written: the data of its target shards, by their row in `plan.target`.

    Raises:
        KeyMismatch: a shard has no tensor.
        ShapeError: a tensor isn't its shard's, or has an integer that the target's dtype can't hold.
        UnsupportedValue: a tensor isn't dense, or quantised.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.layouts import Mesh, PartitionSpec, shard
        >>> tree = {"w": torch.arange(4, dtype=torch.int8)}
        >>> halves, whole = shard(tree, Mesh(dp=2), PartitionSpec("dp")), shard(tree, Mesh(dp=1), PartitionSpec())
        >>> plan = st.plan_reshard(halves, whole)
        >>> target = torch.zeros(4, dtype=torch.int8)
        >>> copy_own(plan, 0, {0: halves[0]["w"].data}, {0: target})
        >>> target
        tensor([0, 1, 0, 0], dtype=torch.int8)
    """
    own = _own_rows(plan, rank)
    copy_transfers(plan, own[plan.transfers.hop[own] == 0], sources, targets)


def copy_doubled(plan: ReshardPlan, rank: int, targets: Memories) -> None:
    """Write what several target shards of a rank want into all of them, once one has it. Executors do this last.

    Args:
        plan: what moves and what stays.
        rank: whose.
        targets: read and written: the data of the rank's target shards, by their row in `plan.target`.

    Raises:
        KeyMismatch: a shard has no tensor.
        ShapeError: a tensor isn't its shard's.
        UnsupportedValue: a tensor isn't dense, or quantised.

    Examples:
        >>> import shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> plan = st.plan_reshard([[whole], []], [[], [whole, whole]])  # rank 1 wants it twice, and gets it once
        >>> targets = {0: whole.data, 1: torch.zeros(4, dtype=torch.int64)}
        >>> copy_doubled(plan, 1, targets)
        >>> targets[1]
        tensor([0, 1, 2, 3])
    """
    own = _own_rows(plan, rank)
    hop = plan.transfers.hop[own]
    for turn in np.unique(hop[hop > 0]).tolist():
        copy_transfers(plan, own[hop == turn], {}, targets)


def _own_rows(plan: ReshardPlan, rank: int) -> Column:
    return np.flatnonzero((plan.transfers.from_rank == rank) & (plan.transfers.to_rank == rank))


def _write(
    plan: ReshardPlan, pieces: BufferPieces, sources: Memories, targets: Memories, buffers: Mapping[int, torch.Tensor]
) -> None:
    moved = plan.transfers
    for passed_on, columns, memories in ((False, plan.source, sources), (True, plan.target, targets)):
        some = select_pieces(pieces, np.flatnonzero((moved.hop[pieces.transfer] > 0) == passed_on))
        piece, boxes, position = piece_boxes(plan, some, moved.source, moved.source_element, moved.source_stride)
        into = buffered(some, piece, position, boxes.shape, buffers)
        rows = some.transfer[piece]
        write_boxes(plan, rows, boxes.shape, shard_regions(columns, boxes, memories), into)
