"""The executor of plans: each rank packs, exchanges and unpacks, step by step, by one schedule for all ranks.

A piece is a range of elements of one transfer; each row of a `Schedule` is a piece. All pieces that one rank sends to
another in one step form one message. A message begins with the pieces of the largest element size, so that every piece
is aligned; pieces of one element size keep the schedule's order. A tensor that is cast is converted by its sender while
packing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ..core.geometry import Column, flat_boxes, row_major_strides, rows_of
from ..core.lazy import flat_bytes
from ._memory import DOING, Buffers
from .resharding import (
    CARRIERS,
    Boxes,
    Memories,
    Regions,
    ReshardPlan,
    Schedule,
    copy_boxes,
    copy_transfers,
    region_views,
    select_regions,
    shard_regions,
    target_regions,
    write_boxes,
)

# The transport: the one part that users replace to move bytes by other means.


class Transport(Protocol):
    """A function that sends buffers to ranks and fills buffers with what ranks send.

    It is called once a step on every rank of the world, and returns when its own buffers may be used again: `incoming`
    is filled, and nothing reads `outgoing` any more. `World.exchange` is such a function. Every pair of ranks agrees
    about the bytes between them, because all ranks follow one schedule; no buffer is empty, and a rank that has nothing
    to do in a step gets two empty mappings. Buffers are reused from step to step.
    """

    def __call__(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], /) -> None:
        """Send the outgoing messages and fill the incoming buffers.

        Args:
            outgoing: Message for each receiving rank of the world, uint8 (bytes,), contiguous.
            incoming: Buffer to fill for each sending rank of the world, uint8 (bytes,), contiguous.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A rank's part in a redistribution: the plan, its shards' memory and its buffers.

    Attributes:
        plan: Plan of all ranks.
        schedule: Schedule of `plan`.
        rank: Number of the rank.
        sources: Data of the rank's source shards by their row in `plan.source`, with any strides.
        targets: Data of the rank's target shards by their row in `plan.target`, to be filled.
        buffers: Memory for the messages of one step.
        is_direct: Whether a contiguous part of a shard's memory may serve as a message; otherwise all messages go
            through `buffers`.
        doing: Name of the operation in error messages.
    """

    plan: ReshardPlan
    schedule: Schedule
    rank: int
    sources: Memories
    targets: Memories
    buffers: Buffers
    is_direct: bool = False
    doing: str = DOING


LONG = 8 * 1024 * 1024
"""Size in bytes from which a piece is a message of its own: it goes from one shard's memory into the other's without a
buffer. A separate step for a shorter piece would take longer than packing it."""


def long_pieces_apart(schedule: Schedule, long: int = LONG) -> Schedule:
    """Return a schedule in which each long piece is a message of its own, so that it needs no buffer.

    In the exchange of a load, this saves a tenth of the CPU time. `redistribute` does not use it: up to three times as
    many steps take longer on busy machines.

    Args:
        schedule: Schedule of a plan.
        long: Size in bytes from which a piece is long.

    Examples:
        >>> import shardtree as st
        >>> whole = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(size)) for key, size in (("a", 9), ("b", 1))]
        >>> schedule = st.plan_reshard({0: whole}, {1: whole}).schedule()
        >>> schedule.step.tolist(), long_pieces_apart(schedule, 36).step.tolist()
        ([0, 0], [0, 1])
    """
    is_long = schedule.nbytes >= long
    order = np.lexsort((~is_long, schedule.to_rank, schedule.from_rank, schedule.step))
    pair = np.stack([schedule.step, schedule.from_rank, schedule.to_rank])[:, order]
    begins = np.flatnonzero(np.append(True, (pair[:, 1:] != pair[:, :-1]).any(axis=0)))[: order.size]
    # Within a step and a pair of ranks, long pieces are numbered from 1 on, and short ones are 0.
    number = np.empty(order.size, dtype=np.int64)
    number[order] = np.arange(1, order.size + 1) - np.repeat(begins, np.diff(np.append(begins, order.size)))
    _, step = np.unique(np.stack([schedule.step, number * is_long]), axis=1, return_inverse=True)
    row = np.argsort(step.reshape(-1), kind="stable")
    names = ("transfer", "start", "stop", "from_rank", "to_rank", "nbytes")
    return replace(schedule, step=np.sort(step.reshape(-1)), **{name: getattr(schedule, name)[row] for name in names})


def move(route: Route, transport: Transport) -> Exception | None:
    """Send from a rank's source shards, and fill its target shards; collective.

    A rank that fails still makes the transport's calls, so that no other rank waits for it.

    Args:
        route: Plan, memory and buffers of this rank.
        transport: Function that exchanges the messages of a step.

    Returns:
        The first failure on this rank outside the transport, or None.

    Raises:
        Exception: An error of the transport, with the step as a note.
    """
    transfers = route.plan.transfers
    local = np.flatnonzero((transfers.from_rank == route.rank) & (transfers.to_rank == route.rank))
    copy_own = partial(copy_transfers, route.plan, sources=route.sources, targets=route.targets)
    failure = first_failure(None, partial(copy_own, local[transfers.hop[local] == 0]))
    for step in range(route.schedule.steps):
        sends, gets = step_pieces(route, step)
        outgoing, incoming = route.buffers.cut(sends.sizes, gets.sizes)
        arrivals: list[tuple[Column, Regions, Regions]] = []
        failure = first_failure(failure, partial(pack, route, sends, outgoing))
        failure = first_failure(failure, partial(_make_room, route, gets, incoming, arrivals))
        try:
            transport(outgoing, incoming)
        except Exception as error:
            error.add_note(f"{route.doing}: in the exchange of step {step + 1} of {route.schedule.steps}")
            raise
        for boxes in arrivals:
            failure = first_failure(failure, partial(copy_boxes, *boxes))
    # Last, elements that several shards of the rank want are copied from the shard that received them.
    return first_failure(failure, partial(copy_own, local[transfers.hop[local] > 0]))


def first_failure(failure: Exception | None, do: Callable[[], Any]) -> Exception | None:
    """Call a function unless there was a failure before, and return the first failure."""
    if failure is None:
        try:
            do()
        except Exception as error:
            return error
    return failure


@dataclass(frozen=True, slots=True, eq=False)
class MessagePieces:
    """The pieces that a rank sends or receives in one step, ordered by peer and by offset in the message.

    Attributes:
        peer: The other rank, ascending, int64 (pieces,).
        transfer: Row of the transfer in the plan's transfers, int64 (pieces,).
        start: First element in the transfer's box, int64 (pieces,).
        stop: End of the elements in the transfer's box, exclusive, int64 (pieces,).
        item_size: Bytes of an element, int64 (pieces,).
        byte: Offset of the piece in its message, int64 (pieces,).
    """

    peer: Column
    transfer: Column
    start: Column
    stop: Column
    item_size: Column
    byte: Column

    @property
    def sizes(self) -> dict[int, int]:
        """Size in bytes of the message to or from each peer."""
        ends = self.byte + (self.stop - self.start) * self.item_size
        return dict(zip(self.peer.tolist(), ends.tolist(), strict=True))  # a peer's last piece ends its message


def step_pieces(route: Route, step: int) -> tuple[MessagePieces, MessagePieces]:
    """Return the pieces that the route's rank sends in a step, and those that it receives."""
    plan, schedule = route.plan, route.schedule
    first, last = np.searchsorted(schedule.step, [step, step + 1])
    ends = (schedule.from_rank, schedule.to_rank)
    sides = []
    for near, far in (ends, ends[::-1]):
        row = first + np.flatnonzero(near[first:last] == route.rank)
        size = plan.target.item_size[plan.transfers.key[schedule.transfer[row]]]
        # Large items come first: each piece then begins at a multiple of its item size, without padding.
        order = np.lexsort((row, -size, far[row]))
        row, size = row[order], size[order]
        peer, end = far[row], np.cumsum(schedule.nbytes[row])
        begin = end - schedule.nbytes[row]
        byte = begin - begin[np.searchsorted(peer, peer)]  # from the first piece of the same message on
        sides.append(MessagePieces(peer, schedule.transfer[row], schedule.start[row], schedule.stop[row], size, byte))
    return sides[0], sides[1]


def pack(route: Route, pieces: MessagePieces, messages: dict[int, torch.Tensor]) -> None:
    """Write the pieces that a rank sends in one step into messages.

    Args:
        route: Route of the rank.
        pieces: Pieces that the rank sends.
        messages: Buffer for each receiving rank. A buffer is replaced by the shard's memory if that can be sent.
    """
    plan, transfers = route.plan, route.plan.transfers
    for passed_on, columns, memories in ((False, plan.source, route.sources), (True, plan.target, route.targets)):
        some = rows_of(pieces, np.flatnonzero((transfers.hop[pieces.transfer] > 0) == passed_on))
        piece, boxes, position = _boxes(plan, some, transfers.source, transfers.source_element, transfers.source_stride)
        regions = shard_regions(columns, boxes, memories)
        direct = _own_memory(route, pieces, some.peer[piece], some.transfer[piece], boxes.shape, regions)
        for row, memory in direct.items():
            messages[int(some.peer[piece[row]])] = memory
        packed = np.setdiff1d(np.arange(piece.size), [*direct])
        into = _message_regions(some, piece[packed], position[packed], boxes.shape[packed], messages)
        write_boxes(plan, some.transfer[piece[packed]], boxes.shape[packed], select_regions(regions, packed), into)


def _make_room(
    route: Route,
    pieces: MessagePieces,
    messages: dict[int, torch.Tensor],
    arrivals: list[tuple[Column, Regions, Regions]],
) -> None:
    """Choose the memory that a step's messages are received in: a shard's own memory if possible, else the buffer.

    Args:
        route: Route of the rank.
        pieces: Pieces that the rank receives.
        messages: Buffer for each sending rank; replaced by the shard's own memory where that can be filled directly.
        arrivals: List to which the copies from buffers to shards are added, as arguments of `copy_boxes`.
    """
    plan, transfers = route.plan, route.plan.transfers
    piece, boxes, position = _boxes(plan, pieces, transfers.target, transfers.target_element, transfers.target_stride)
    into = target_regions(plan.target, boxes, route.targets)
    direct = _own_memory(route, pieces, pieces.peer[piece], pieces.transfer[piece], boxes.shape, into)
    packed = np.setdiff1d(np.arange(piece.size), [*direct])
    source = _message_regions(pieces, piece[packed], position[packed], boxes.shape[packed], messages)
    arrivals.append((boxes.shape[packed], source, select_regions(into, packed)))
    for row, memory in direct.items():
        messages[int(pieces.peer[piece[row]])] = memory


def _boxes(
    plan: ReshardPlan, pieces: MessagePieces, shard: Column, element: Column, stride: Column
) -> tuple[Column, Boxes, Column]:
    """Return boxes that make up pieces, within the data of the sending shards or of the receiving shards.

    A piece is a range of a transfer's elements, so it may need several boxes.

    Args:
        plan: Plan of all ranks.
        pieces: Pieces of messages.
        shard: Row of each transfer's shard on the chosen side, int64 (transfers,).
        element: Offset of each transfer's first element in the shard's data, int64 (transfers,).
        stride: Strides of each transfer in the shard's data, int64 (transfers, axes).

    Returns:
        ``(piece, boxes, position)``: the row in `pieces` of the piece that contains each box, int64 (boxes,); the
        boxes; and the index of each box's first element in its piece, int64 (boxes,).
    """
    whole = plan.transfers.shape[pieces.transfer]
    piece, inside, shape, position = flat_boxes(whole, pieces.start, pieces.stop)
    row = pieces.transfer[piece]
    begin = element[row] + (inside * stride[row]).sum(axis=1)
    return piece, Boxes(shard[row], begin, stride[row], shape), position


def _own_memory(
    route: Route, pieces: MessagePieces, peer: Column, transfer: Column, shape: Column, regions: Regions
) -> dict[int, torch.Tensor]:
    """Return the messages that need no buffer: views of shards' memory as bytes, by the index of the box in `shape`.

    Such a message is one box, which is contiguous in its shard, is on the device of the buffers, and is not cast.

    Args:
        route: Route of the rank that sends or receives the messages.
        pieces: All pieces of the messages.
        peer: Peer of each box's message, int64 (boxes,).
        transfer: Row of each box's transfer, int64 (boxes,).
        shape: Shape of each box, int64 (boxes, axes).
        regions: Regions of the boxes in the shards' memory.
    """
    direct: dict[int, torch.Tensor] = {}
    if not route.is_direct or not peer.size:
        return direct
    hop = route.plan.transfers.hop
    # A message of several pieces, or of a piece of several boxes, is assembled in a buffer.
    times = [np.bincount(peers, minlength=int(peer.max()) + 1)[peer] for peers in (pieces.peer, peer)]
    for row in np.flatnonzero((times[0] == 1) & (times[1] == 1)).tolist():
        (memory,) = region_views(shape[row : row + 1], select_regions(regions, np.array([row])))
        cast = hop[transfer[row]] == 0 and _is_cast(route.plan, int(transfer[row]))
        if memory.is_contiguous() and memory.device == route.buffers.memory.device and not cast:
            direct[row] = flat_bytes(memory)
    return direct


def _is_cast(plan: ReshardPlan, transfer: int) -> bool:
    before = plan.source.kinds[int(plan.source.key[plan.transfers.source[transfer]])]
    return before.dtype != plan.target.kinds[int(plan.transfers.key[transfer])].dtype


def _message_regions(
    pieces: MessagePieces, piece: Column, position: Column, shape: Column, messages: Mapping[int, torch.Tensor]
) -> Regions:
    """Return the memory region of each box in the message buffer through which it is sent or received.

    Args:
        pieces: Pieces of the messages.
        piece: Row in `pieces` of the piece that contains each box, int64 (boxes,).
        position: Index of each box's first element in its piece, int64 (boxes,).
        shape: Shape of each box, int64 (boxes, axes).
        messages: Message buffer for each peer.
    """
    # One view serves each pair of peer and item size: its pieces differ only in their offset.
    views: dict[tuple[int, int], torch.Tensor] = {}
    keys = list(zip(pieces.peer[piece].tolist(), pieces.item_size[piece].tolist(), strict=True))
    for peer, size in dict.fromkeys(keys):
        message = messages[peer]
        views[peer, size] = message[: message.numel() // size * size].view(CARRIERS[size])
    size = pieces.item_size[piece]
    first = np.array([views[key].storage_offset() for key in keys], dtype=np.int64)
    begin = first + pieces.byte[piece] // size + position
    return Regions([views[key] for key in keys], begin, row_major_strides(shape))
