"""Contributions of shards, boxes and runs of elements to their tensor's fingerprint, computed piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import add

import numpy as np
import torch

from ...errors import CheckpointingException, UnsupportedValue, error_text
from ..geometry import flat_boxes, slabs, slices
from ..lazy import LazyTensor, as_integers
from ..mapping import ShardedTensor, has_elements
from ._sums import MODULUS, device_total, host_total

PIECE = 1 << 21
"""Upper bound of the elements in a piece: lazy tensors are read piece by piece, and a thread computes one at a time."""

_ON_DEVICE = 64  # factor for pieces on an accelerator, where small kernels cost most

_MOST_AXES = 60  # NumPy arrays have at most 64 axes, one of which a complex number's parts take
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True, eq=False)
class ShardPiece:
    """A part of a shard that is read and summed at once: a box, or a run of consecutive elements of a flattened box.

    Attributes:
        data: Elements of the piece; lazy elements aren't read yet.
        offset: Offset of the box in the global tensor; for a run, the offset of the box that contains it.
        box: Shape of the box that contains the run; None if the piece is a box.
        first: Index of the run's first element in the row-major flattened box.
    """

    data: torch.Tensor | LazyTensor
    offset: tuple[int, ...]
    box: tuple[int, ...] | None = None
    first: int = 0


def shard_pieces(shard: ShardedTensor, most: int = PIECE) -> Iterator[ShardPiece]:
    """Yield a shard's elements as pieces of bounded size, each a view of the shard's data.

    Args:
        shard: Shard with data, which may be lazy.
        most: Maximum number of elements in a piece in host memory; a piece on an accelerator may have 64 times as many.

    Raises:
        CheckpointingException: The shard has no data.
        ShapeError: The data contradicts the shard's metadata.
        UnsupportedValue: The data isn't a dense tensor, or is quantised.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, 1, 2))
        >>> [(piece.offset, tuple(piece.data.shape)) for piece in shard_pieces(shard, 4)]
        [((4, 0), (2, 2)), ((6, 0), (2, 2))]
    """
    if not isinstance(shard.data, (torch.Tensor, LazyTensor)):
        fault = f"fingerprint: {shard.key!r} has no tensor"
        raise CheckpointingException(error_text(fault, found=type(shard.data).__name__, fix="Give the shard its data."))
    # Data may have been resized or replaced in place since the shard was built.
    shard.validate_metadata_integrity()
    data = shard.data
    if isinstance(data, torch.Tensor) and (
        data.layout is not torch.strided or data.is_quantized or not has_elements(data)
    ):
        found = f"{data.dtype}, {data.layout}, on {data.device}"
        fault = f"fingerprint: {shard.key!r} is not a dense tensor"
        raise UnsupportedValue(error_text(fault, found=found, fix="Give the shard a dense tensor of its elements."))
    front, flat = shard.prepend_axis_num, shard.flattened_range
    elements = most if data.device.type == "cpu" else _ON_DEVICE * most
    if flat is not None:
        box = (1,) * front + shard.local_shape
        yield from run_pieces(data, shard.global_offset, box, flat.start, elements)
        return
    yield from box_pieces(data, shard.global_offset, elements)


def box_pieces(data: torch.Tensor | LazyTensor, offset: Sequence[int], most: int = PIECE) -> Iterator[ShardPiece]:
    """Yield a box as pieces of bounded size, each a view of the box's data.

    Args:
        data: The box's elements; leading axes of size 1 may be missing.
        offset: The box's first index in the global tensor, (axes,).
        most: Upper bound of a piece's elements.

    Examples:
        >>> [piece.offset for piece in box_pieces(torch.zeros(3, 2), (1, 4, 0), most=2)]
        [(1, 4, 0), (1, 5, 0), (1, 6, 0)]
    """
    lacking = (0,) * (len(offset) - data.ndim)
    for start, shape in slabs(tuple(data.shape), most):
        yield ShardPiece(data[slices(start, shape)], tuple(map(add, offset, lacking + start)))


def run_pieces(
    data: torch.Tensor | LazyTensor, offset: tuple[int, ...], box: tuple[int, ...], first: int, most: int = PIECE
) -> Iterator[ShardPiece]:
    """Yield a run of a row-major flattened box as pieces of bounded size, each a view of the run's data.

    Args:
        data: The run's elements, (elements,).
        offset: The box's first index in the global tensor, (axes,).
        box: The box's shape, (axes,).
        first: The run's first element in the flattened box.
        most: Upper bound of a piece's elements.

    Examples:
        >>> [(piece.first, len(piece.data)) for piece in run_pieces(torch.zeros(5), (0, 0), (4, 2), 3, most=3)]
        [(3, 3), (6, 2)]
    """
    for start in range(0, data.shape[0], most):
        yield ShardPiece(data[start : start + most], offset, box, first + start)


def piece_total(piece: ShardPiece) -> int:
    """Return a piece's contribution to its tensor's fingerprint, modulo 2**64; lazy data is read.

    Examples:
        >>> whole = torch.arange(6.0).reshape(2, 3)
        >>> run = ShardPiece(whole.flatten()[1:5], (0, 0), (2, 3), 1)
        >>> rest = piece_total(ShardPiece(whole[:1, :1], (0, 0))) + piece_total(ShardPiece(whole[1:, 2:], (1, 2)))
        >>> (piece_total(run) + rest) % 2**64 == piece_total(ShardPiece(whole, (0, 0)))
        True
    """
    data = piece.data.read() if isinstance(piece.data, LazyTensor) else piece.data
    return box_total(data, piece.offset) if piece.box is None else run_total(data, piece.offset, piece.box, piece.first)


def run_total(data: torch.Tensor, offset: Sequence[int], box: Sequence[int], first: int) -> int:
    """Return the contribution of a run of a row-major flattened box to its tensor's fingerprint, modulo 2**64.

    Args:
        data: The run's elements, (elements,).
        offset: The box's first index in the global tensor, (axes,).
        box: The box's shape, (axes,).
        first: The run's first element in the flattened box.
    """
    # A run that is a whole box needs no division into boxes.
    if first == 0 and data.numel() == prod(box):
        return box_total(data.reshape(tuple(box)), offset)
    if not len(box):
        return 0
    ends = np.array([[first], [first + data.numel()]], dtype=np.int64)
    _, begins, shapes, positions = flat_boxes(np.array([box], dtype=np.int64), *ends)
    total = 0
    for begin, shape, position in zip(begins.tolist(), shapes.tolist(), positions.tolist(), strict=True):
        part = data[position : position + prod(shape)].reshape(shape)
        total += box_total(part, [low + inside for low, inside in zip(offset, begin, strict=True)])
    return total % MODULUS


def box_total(data: torch.Tensor, offset: Sequence[int]) -> int:
    """Return a box's contribution to its tensor's fingerprint, modulo 2**64, computed on the box's device.

    Args:
        data: The box's elements; leading axes of size 1 may be missing.
        offset: The box's first index in the global tensor, (axes,).
    """
    if max(data.ndim, len(offset)) > _MOST_AXES:
        found, expected = max(data.ndim, len(offset)), f"at most {_MOST_AXES}"
        raise UnsupportedValue(error_text("fingerprint: a tensor has too many axes", found=found, expected=expected))
    bits = as_integers(data)
    words = bits if bits.itemsize <= 8 else torch.view_as_real(bits).view(torch.int64)  # two words along one more axis
    places = (*offset, *(0,) * (words.ndim - data.ndim))
    words = words[(None,) * (len(places) - words.ndim)]
    axes = range(len(places))
    if not words.is_cpu:
        return device_total(words, axes, places)
    return host_total(words.numpy().view(_UNSIGNED[words.itemsize]), axes, places)


_ROW = 8 * 1024  # bytes; the weights of such a row are a part of the cached table
_AT_ONCE = 4 * 1024 * 1024  # bytes; a copy of an unaligned part of this size stays in the processor's cache


def bytes_total(data: torch.Tensor) -> int:
    """Return a weighted sum of bytes, a hash that a device can compute without copying the bytes to the host.

    The bytes are summed as a matrix of 8-byte words, 1024 in a row, padded with zeros. This is faster than summing
    smaller elements one by one. In return, two sums are comparable only if the bytes are in the same order.

    Args:
        data: The bytes, uint8 (bytes,), contiguous, on any device.

    Examples:
        >>> one, other = torch.zeros(20_000, dtype=torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
        >>> other[19_999] = 1
        >>> bytes_total(one) == bytes_total(one.clone()), bytes_total(one) == bytes_total(other)
        (True, False)
    """
    total, most = 0, _AT_ONCE if data.is_cpu else _ON_DEVICE * _AT_ONCE
    for begin in range(0, data.numel(), most):
        part = words = data[begin : begin + most]
        if part.numel() % _ROW or part.data_ptr() % 8:
            words = part.new_zeros(-(-part.numel() // _ROW) * _ROW)
            words[: part.numel()] = part
        total += box_total(words.view(torch.int64).view(-1, _ROW // 8), (begin // _ROW, 0))
    return total % MODULUS
