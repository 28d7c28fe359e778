"""The executor of plans: each rank packs, exchanges and unpacks, step by step; all follow from one schedule.

What one rank sends to another in one step is one message of bytes: tensors of large items first, else in the schedule's
order, so that every piece is aligned. What is cast is converted while packing, and sent in the target's dtype.
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
    """A function that sends buffers to some ranks and fills buffers with what some ranks send.

    It is called once a step on every rank of the world, and returns when its own buffers may be used again: `incoming`
    is filled, and nothing reads `outgoing` any more. `World.exchange` is one. Every pair of ranks agrees about the
    bytes between them, because all ranks follow one schedule; no buffer is empty, and a rank that has nothing to do
    in a step gets two empty mappings. Buffers are reused from step to step.
    """

    def __call__(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], /) -> None:
        """Send and receive.

        Args:
            outgoing: for each peer the bytes that it gets, uint8 (bytes,), contiguous. Ranks are the world's.
            incoming: for each peer the buffer that its bytes fill, uint8 (bytes,), contiguous.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What one rank needs to take part.

    Attributes:
        plan: of all ranks.
        schedule: of that plan.
        rank: which one.
        sources: the data of the rank's shards by their row in `plan.source`, strided in any way.
        targets: the data of its target shards by their row in `plan.target`, to be filled.
        buffers: memory for one step.
        is_direct: whether a message may be a shard's own memory, where it is consecutive there; else all are buffers.
        doing: for messages.
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
"""Bytes from which on a piece is a message of its own, which goes from and to where it lies, and needs no buffer. For
shorter ones, a step for each would take longer than packing them."""


def long_pieces_apart(schedule: Schedule, long: int = LONG) -> Schedule:
    """Return a schedule in which no step has two long pieces between two ranks, or one beside short ones.

    A load's exchange, whose pieces lie in large files, takes a tenth less of the processor's time by it. `redistribute`
    doesn't use it: the same or less time a byte, but up to three times as many steps, which is slower on busy machines.

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
    """Fill a rank's target shards; every rank calls it at the same time.

    A rank that fails goes on with the transport's calls, so that no other rank waits for it.

    Returns:
        The first failure on this rank, except in the transport itself.

    Raises:
        Exception: what the transport raises, with the step as a note.
    """
    transfers = route.plan.transfers
    own = np.flatnonzero((transfers.from_rank == route.rank) & (transfers.to_rank == route.rank))
    copy_own = partial(copy_transfers, route.plan, sources=route.sources, targets=route.targets)
    failure = first_failure(None, partial(copy_own, own[transfers.hop[own] == 0]))
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
    # Last, what several shards of the rank want: from the one that received it.
    return first_failure(failure, partial(copy_own, own[transfers.hop[own] > 0]))


def first_failure(failure: Exception | None, do: Callable[[], Any]) -> Exception | None:
    """Call a function unless there was a failure before; return the first failure."""
    if failure is None:
        try:
            do()
        except Exception as error:
            return error
    return failure


@dataclass(frozen=True, slots=True, eq=False)
class MessagePieces:
    """The pieces that one rank sends, or receives, in one step, in the order of the messages.

    Attributes:
        peer: the other rank, ascending, int64 (pieces,).
        transfer: the row in the plan's transfers, int64 (pieces,).
        start: first element of the transfer's box, int64 (pieces,).
        stop: one past the last, int64 (pieces,).
        item_size: bytes of an element, int64 (pieces,).
        byte: where the piece begins in its message, int64 (pieces,).
    """

    peer: Column
    transfer: Column
    start: Column
    stop: Column
    item_size: Column
    byte: Column

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of each peer's message."""
        ends = self.byte + (self.stop - self.start) * self.item_size
        return dict(zip(self.peer.tolist(), ends.tolist(), strict=True))  # a peer's last piece ends its message


def step_pieces(route: Route, step: int) -> tuple[MessagePieces, MessagePieces]:
    """Return what a rank sends and what it receives in a step."""
    plan, schedule = route.plan, route.schedule
    first, last = np.searchsorted(schedule.step, [step, step + 1])
    ends = (schedule.from_rank, schedule.to_rank)
    sides = []
    for own, other in (ends, ends[::-1]):
        row = first + np.flatnonzero(own[first:last] == route.rank)
        size = plan.target.item_size[plan.transfers.key[schedule.transfer[row]]]
        # Large items first: each piece then begins at a multiple of its item size, without padding.
        order = np.lexsort((row, -size, other[row]))
        row, size = row[order], size[order]
        peer, end = other[row], np.cumsum(schedule.nbytes[row])
        begin = end - schedule.nbytes[row]
        byte = begin - begin[np.searchsorted(peer, peer)]  # from the first piece of the same message on
        sides.append(MessagePieces(peer, schedule.transfer[row], schedule.start[row], schedule.stop[row], size, byte))
    return sides[0], sides[1]


def pack(route: Route, pieces: MessagePieces, messages: dict[int, torch.Tensor]) -> None:
    """Write what a rank sends in a step into messages; where its shards' memory can be sent itself, that is one."""
    plan, transfers = route.plan, route.plan.transfers
    for passed_on, columns, memories in ((False, plan.source, route.sources), (True, plan.target, route.targets)):
        some = rows_of(pieces, np.flatnonzero((transfers.hop[pieces.transfer] > 0) == passed_on))
        piece, boxes, position = _boxes(plan, some, transfers.source, transfers.source_element, transfers.source_stride)
        regions = shard_regions(columns, boxes, memories)
        own = _own_memory(route, pieces, some.peer[piece], some.transfer[piece], boxes.shape, regions)
        for row, memory in own.items():
            messages[int(some.peer[piece[row]])] = memory
        rest = np.setdiff1d(np.arange(piece.size), [*own])
        into = _message_regions(some, piece[rest], position[rest], boxes.shape[rest], messages)
        write_boxes(plan, some.transfer[piece[rest]], boxes.shape[rest], select_regions(regions, rest), into)


def _make_room(
    route: Route,
    pieces: MessagePieces,
    messages: dict[int, torch.Tensor],
    arrivals: list[tuple[Column, Regions, Regions]],
) -> None:
    """Put shards' memory that can be filled itself in place of messages; add what is copied out of the others."""
    plan, transfers = route.plan, route.plan.transfers
    piece, boxes, position = _boxes(plan, pieces, transfers.target, transfers.target_element, transfers.target_stride)
    into = target_regions(plan.target, boxes, route.targets)
    own = _own_memory(route, pieces, pieces.peer[piece], pieces.transfer[piece], boxes.shape, into)
    rest = np.setdiff1d(np.arange(piece.size), [*own])
    source = _message_regions(pieces, piece[rest], position[rest], boxes.shape[rest], messages)
    arrivals.append((boxes.shape[rest], source, select_regions(into, rest)))
    for row, memory in own.items():
        messages[int(pieces.peer[piece[row]])] = memory


def _boxes(
    plan: ReshardPlan, pieces: MessagePieces, shard: Column, element: Column, stride: Column
) -> tuple[Column, Boxes, Column]:
    """Return the boxes that pieces consist of: piece, box in the shard's data, first element in the piece."""
    whole = plan.transfers.shape[pieces.transfer]
    piece, inside, shape, position = flat_boxes(whole, pieces.start, pieces.stop)
    row = pieces.transfer[piece]
    begin = element[row] + (inside * stride[row]).sum(axis=1)
    return piece, Boxes(shard[row], begin, stride[row], shape), position


def _own_memory(
    route: Route, pieces: MessagePieces, peer: Column, transfer: Column, shape: Column, regions: Regions
) -> dict[int, torch.Tensor]:
    """Return, by their row, boxes that are a message each, as they lie in a shard's memory: consecutive, and not cast.

    Args:
        route: whose messages they are.
        pieces: all that the messages hold.
        peer: whose message each box is in, int64 (boxes,).
        transfer: that the box is of, int64 (boxes,).
        shape: int64 (boxes, axes).
        regions: where the boxes lie.
    """
    own: dict[int, torch.Tensor] = {}
    if not route.is_direct or not peer.size:
        return own
    hop = route.plan.transfers.hop
    # A message of several pieces, or of a piece of several boxes, is put together in a buffer.
    times = [np.bincount(one, minlength=int(peer.max()) + 1)[peer] for one in (pieces.peer, peer)]
    for row in np.flatnonzero((times[0] == 1) & (times[1] == 1)).tolist():
        (memory,) = region_views(shape[row : row + 1], select_regions(regions, np.array([row])))
        cast = hop[transfer[row]] == 0 and _is_cast(route.plan, int(transfer[row]))
        if memory.is_contiguous() and memory.device == route.buffers.memory.device and not cast:
            own[row] = flat_bytes(memory)
    return own


def _is_cast(plan: ReshardPlan, transfer: int) -> bool:
    before = plan.source.kinds[int(plan.source.key[plan.transfers.source[transfer]])]
    return before.dtype != plan.target.kinds[int(plan.transfers.key[transfer])].dtype


def _message_regions(
    pieces: MessagePieces, piece: Column, position: Column, shape: Column, messages: Mapping[int, torch.Tensor]
) -> Regions:
    """Return the places of pieces' boxes in messages.

    Args:
        pieces: what the messages hold.
        piece: that each box belongs to, int64 (boxes,).
        position: of the box's first element in the piece, int64 (boxes,).
        shape: int64 (boxes, axes).
        messages: by peer.
    """
    # One view for each peer and item size: pieces then differ only in where they begin.
    views: dict[tuple[int, int], torch.Tensor] = {}
    keys = list(zip(pieces.peer[piece].tolist(), pieces.item_size[piece].tolist(), strict=True))
    for peer, size in dict.fromkeys(keys):
        message = messages[peer]
        views[peer, size] = message[: message.numel() // size * size].view(CARRIERS[size])
    size = pieces.item_size[piece]
    first = np.array([views[key].storage_offset() for key in keys], dtype=np.int64)
    begin = first + pieces.byte[piece] // size + position
    return Regions([views[key] for key in keys], begin, row_major_strides(shape))
