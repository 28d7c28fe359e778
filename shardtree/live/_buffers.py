"""What a rank sends and gets in a step: pieces, and where they lie in the buffers that go from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import KeyMismatch, ShapeError, error_text
from ..geometry import Column, flat_boxes, row_major_strides
from ..plans import ReshardPlan, Schedule
from ..plans.moving import CARRIERS, Boxes, Regions


@dataclass(frozen=True, slots=True, eq=False)
class BufferPieces:
    """What one rank sends, or gets, in one step, in the order in which the buffers have it.

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
        return dict(zip(self.peer.tolist(), ends.tolist(), strict=True))  # of each peer the last one stays


def sent_pieces(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> BufferPieces:
    """Return what a rank sends in a step."""
    return _pieces(plan, schedule, step, rank, schedule.from_rank, schedule.to_rank)


def got_pieces(plan: ReshardPlan, schedule: Schedule, step: int, rank: int) -> BufferPieces:
    """Return what a rank gets in a step."""
    return _pieces(plan, schedule, step, rank, schedule.to_rank, schedule.from_rank)


def _pieces(plan: ReshardPlan, schedule: Schedule, step: int, rank: int, own: Column, other: Column) -> BufferPieces:
    """Return the pieces of a step of which a rank is one end, with the other end as the peer."""
    first, last = np.searchsorted(schedule.step, [step, step + 1])
    row = first + np.flatnonzero(own[first:last] == rank)
    size = plan.target.item_size[plan.transfers.key[schedule.transfer[row]]]
    order = np.lexsort((row, -size, other[row]))
    row, size = row[order], size[order]
    peer = other[row]
    end = np.cumsum(schedule.nbytes[row])
    begin = end - schedule.nbytes[row]
    group = np.searchsorted(peer, peer)  # the first piece that goes into the same buffer
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


def buffered(
    pieces: BufferPieces, piece: Column, position: Column, shape: Column, buffers: Mapping[int, torch.Tensor]
) -> Regions:
    """Return where the boxes of pieces lie in buffers.

    Args:
        pieces: what the buffers hold.
        piece: that each box belongs to, int64 (boxes,).
        position: of the box's first element in the piece, int64 (boxes,).
        shape: int64 (boxes, axes).
        buffers: by peer.
    """
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
