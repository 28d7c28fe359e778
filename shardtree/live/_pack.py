"""The parts of an executor of plans: packing shards into buffers, and unpacking buffers into shards.

An executor calls `copy_own`; for each step `packed`, its transport, and `unpack`; and at last `copy_doubled`.
A buffer holds what one rank sends to another in one step of a schedule, as bytes: tensors of large items first, else in
the schedule's order, so that every piece is aligned. What is cast is converted while packing, and sent in the
target's dtype. `pack_into`, `unpack`, `copy_own` and `copy_doubled` write into what they are given; nothing else here
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import KeyMismatch, ShapeError, error_text
from ..geometry import Column, flat_boxes, row_major_strides
from ..plans import ReshardPlan, Schedule
from ..plans.moving import (
    CARRIERS,
    Boxes,
    Memories,
    Regions,
    copy_boxes,
    copy_transfers,
    memory_of,
    shard_regions,
    target_regions,
    write_boxes,
)

# The pieces that a rank sends and receives in a step, and their places in buffers.


@dataclass(frozen=True, slots=True, eq=False)
class BufferPieces:
    """The pieces that one rank sends, or receives, in one step, in the order of the buffers.

    Attributes:
        peer: the other rank, ascending, int64 (pieces,).
        transfer: the row in the plan's transfers, int64 (pieces,).
        start: first element of the transfer's box, int64 (pieces,).
        stop: one past the last, int64 (pieces,).
        item_size: bytes of an element, int64 (pieces,).
        byte: where the piece begins in its buffer, int64 (pieces,).
    """

    peer: Column
    transfer: Column
    start: Column
    stop: Column
    item_size: Column
    byte: Column

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of each peer's buffer."""
        ends = self.byte + (self.stop - self.start) * self.item_size
        return dict(zip(self.peer.tolist(), ends.tolist(), strict=True))  # a peer's last piece ends its buffer


def sent_pieces(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> BufferPieces:
    """Return what a rank sends in a step."""
    return _pieces(plan, schedule, step, rank, schedule.from_rank, schedule.to_rank)


def received_pieces(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> BufferPieces:
    """Return what a rank receives in a step."""
    return _pieces(plan, schedule, step, rank, schedule.to_rank, schedule.from_rank)


def _pieces(plan: ReshardPlan, schedule: Schedule, step: int, rank: int, own: Column, other: Column) -> BufferPieces:
    """Return the pieces of a step that a rank sends or receives, with the other rank as the peer."""
    first, last = np.searchsorted(schedule.step, [step, step + 1])
    row = first + np.flatnonzero(own[first:last] == rank)
    size = plan.target.item_size[plan.transfers.key[schedule.transfer[row]]]
    # Large items first: each piece then begins at a multiple of its item size, without padding.
    order = np.lexsort((row, -size, other[row]))
    row, size = row[order], size[order]
    peer = other[row]
    end = np.cumsum(schedule.nbytes[row])
    begin = end - schedule.nbytes[row]
    group = np.searchsorted(peer, peer)  # the first piece of the same buffer
    return BufferPieces(
        peer, schedule.transfer[row], schedule.start[row], schedule.stop[row], size, begin - begin[group]
    )


def select_pieces(pieces: BufferPieces, rows: Column) -> BufferPieces:
    """Return the given rows of pieces; where they lie in the buffers stays."""
    return BufferPieces(*(getattr(pieces, name)[rows] for name in pieces.__slots__))


def piece_boxes(
    plan: ReshardPlan, pieces: BufferPieces, shard: Column, element: Column, stride: Column
) -> tuple[Column, Boxes, Column]:
    """Return the boxes that pieces consist of: piece, box in the shard's data, first element in the piece."""
    whole = plan.transfers.shape[pieces.transfer]
    piece, inside, shape, position = flat_boxes(whole, pieces.start, pieces.stop)
    row = pieces.transfer[piece]
    begin = element[row] + (inside * stride[row]).sum(axis=1)
    return piece, Boxes(shard[row], begin, stride[row], shape), position


def buffer_regions(
    pieces: BufferPieces, piece: Column, position: Column, shape: Column, buffers: Mapping[int, torch.Tensor]
) -> Regions:
    """Return the places of pieces' boxes in buffers.

    Args:
        pieces: what the buffers hold.
        piece: that each box belongs to, int64 (boxes,).
        position: of the box's first element in the piece, int64 (boxes,).
        shape: int64 (boxes, axes).
        buffers: by peer.
    """
    # One view for each peer and item size: pieces then differ only in where they begin.
    views: dict[tuple[int, int], torch.Tensor] = {}
    keys = list(zip(pieces.peer[piece].tolist(), pieces.item_size[piece].tolist(), strict=True))
    for peer, size in dict.fromkeys(keys):
        buffer = buffers[peer]
        views[peer, size] = buffer[: buffer.numel() // size * size].view(CARRIERS[size])
    size = pieces.item_size[piece]
    first = np.array([views[key].storage_offset() for key in keys], dtype=np.int64)
    begin = first + pieces.byte[piece] // size + position
    return Regions([views[key] for key in keys], begin, row_major_strides(shape))


def check_buffers(sizes: Mapping[int, int], buffers: Mapping[int, torch.Tensor]) -> None:
    """Raise unless there is a buffer of the right size for each peer.

    Raises:
        KeyMismatch: a rank has no buffer.
        ShapeError: a buffer has another size or dtype, or isn't contiguous.
    """
    missing = [str(peer) for peer in sizes if peer not in buffers]
    if missing:
        fix = "Give one for each rank that the plan names."
        raise KeyMismatch(error_text("reshard: no buffer for ranks", offenders=missing, fix=fix))
    wrong = [
        f"rank {peer}: found {tuple(buffers[peer].shape)} {buffers[peer].dtype}, expected {(size,)} {torch.uint8}"
        for peer, size in sizes.items()
        if (buffers[peer].dtype, tuple(buffers[peer].shape)) != (torch.uint8, (size,))
        or not buffers[peer].is_contiguous()
    ]
    if wrong:
        fix = "Make contiguous ones of the sizes that the plan says."
        raise ShapeError(error_text("reshard: buffers of another size", offenders=wrong, fix=fix))


def outgoing_bytes(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> dict[int, int]:
    """Return how many bytes a rank sends to each other rank in a step; ranks that get none are left out.

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
    """Return how many bytes a rank gets from each other rank in a step; ranks that send none are left out.

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
    return received_pieces(plan, schedule, step, rank).sizes


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
        targets: the data of its target shards by their row in `plan.target`, where it received what it passes on.

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
    _pack(plan, pieces, sources, targets, buffers)
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
    _pack(plan, pieces, sources, targets, buffers)


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
    pieces = received_pieces(plan, schedule, step, rank)
    check_buffers(pieces.sizes, buffers)
    moved = plan.transfers
    piece, boxes, position = piece_boxes(plan, pieces, moved.target, moved.target_element, moved.target_stride)
    came = buffer_regions(pieces, piece, position, boxes.shape, buffers)
    copy_boxes(boxes.shape, came, target_regions(plan.target, boxes, targets))


def copy_own(plan: ReshardPlan, rank: int, sources: Memories, targets: Memories) -> None:
    """Write what stays on a rank into its target shards, directly from its source shards. Executors do this first.

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
    """Copy what several target shards of a rank want from the one that received it. Executors do this last.

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
    for hop_number in np.unique(hop[hop > 0]).tolist():
        copy_transfers(plan, own[hop == hop_number], {}, targets)


def _own_rows(plan: ReshardPlan, rank: int) -> Column:
    return np.flatnonzero((plan.transfers.from_rank == rank) & (plan.transfers.to_rank == rank))


def _pack(
    plan: ReshardPlan, pieces: BufferPieces, sources: Memories, targets: Memories, buffers: Mapping[int, torch.Tensor]
) -> None:
    moved = plan.transfers
    for passed_on, columns, memories in ((False, plan.source, sources), (True, plan.target, targets)):
        some = select_pieces(pieces, np.flatnonzero((moved.hop[pieces.transfer] > 0) == passed_on))
        piece, boxes, position = piece_boxes(plan, some, moved.source, moved.source_element, moved.source_stride)
        into = buffer_regions(some, piece, position, boxes.shape, buffers)
        rows = some.transfer[piece]
        write_boxes(plan, rows, boxes.shape, shard_regions(columns, boxes, memories), into)
