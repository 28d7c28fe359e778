"""Masters beside their weights: a comparison of both, piece by piece, shows that a state belongs to its parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from ...kit import ReadReport, ShardedTensor, row_major_bits

_PIECE_ELEMENTS = 4 * 1024 * 1024
"""Masters are read into memory of their own, at most so many elements at a time."""

Read = Callable[[Sequence[ShardedTensor]], ReadReport]
"""Fills the shards' data in place, and returns what was read."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Evidence that a state's bytes belong to its parameter.

    Attributes:
        master: the key of the parameter's master, whose bytes lie in the same files as the state's.
        weight: the key of the parameter; the master, rounded, is equal to it.
    """

    master: str
    weight: str


def first_difference(
    read: Read, pair: Comparison, box: ShardedTensor, dtype: torch.dtype
) -> tuple[tuple[int, ...] | None, ReadReport]:
    """Return where a master, rounded, first differs from its weight; None if nowhere.

    Args:
        read: reads stored tensors.
        pair: the master and the weight.
        box: a part of the tensor, as a shard of either.
        dtype: Dtype of the weight.

    Returns:
        The indices in the global tensor, and what was read.
    """
    report = ReadReport()
    for piece in pieces_of(replace(box, data=None)):
        master = replace(piece, key=pair.master, dtype=torch.float32, data=memory_of(piece))
        weight = replace(piece, key=pair.weight, dtype=dtype, data=memory_of(piece, dtype))
        report += read([master, weight])
        element = _first_unlike(master.data, weight.data)
        if element is not None:
            return _place(piece, element), report
    return None, report


def _first_unlike(master: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return the number of the first element where a master, rounded, isn't the weight; None if there is none."""
    if master.dtype == weight.dtype:  # a copy that nothing has rounded: bit for bit
        item = master.element_size()
        unlike = (row_major_bits(master) != row_major_bits(weight)).view(-1, item).any(dim=1)
    else:
        cast = master.to(weight.dtype)
        unlike = ((cast != weight) & ~(cast.isnan() & weight.isnan())).flatten()
    return int(unlike.nonzero()[0]) if bool(unlike.any()) else None


def _place(shard: ShardedTensor, element: int) -> tuple[int, ...]:
    """Return the indices in the global tensor of a shard's element."""
    if shard.flattened_range is not None:
        element += shard.flattened_range.start
    inside = [int(at) for at in np.unravel_index(element, shard.local_shape)] if shard.local_shape else []
    inside = [0] * shard.prepend_axis_num + inside
    return tuple(begin + at for begin, at in zip(shard.global_offset, inside, strict=True))


def memory_of(shard: ShardedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return new memory for a shard's elements."""
    return torch.empty(shard.data_shape, dtype=dtype, device="cpu")


def pieces_of(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """Yield a shard in pieces of a few million elements, whose data are contiguous views of its data.

    A padded tensor's shard is one piece.
    """
    if shard.allow_shape_mismatch or prod(shard.data_shape) <= _PIECE_ELEMENTS:
        yield shard
        return
    if shard.flattened_range is not None:
        start = shard.flattened_range.start
        for at in range(0, shard.data_shape[0], _PIECE_ELEMENTS):
            stop = min(at + _PIECE_ELEMENTS, shard.data_shape[0])
            yield replace(
                shard,
                data=None if shard.data is None else shard.data[at:stop],
                flattened_range=slice(start + at, start + stop),
            )
        return
    axis = next(axis for axis, length in enumerate(shard.local_shape) if length > 1)
    step = max(1, _PIECE_ELEMENTS // prod(shard.local_shape[axis + 1 :]))
    for at in range(0, shard.local_shape[axis], step):
        yield from pieces_of(_part(shard, axis, at, min(step, shard.local_shape[axis] - at)))


def _part(shard: ShardedTensor, axis: int, start: int, length: int) -> ShardedTensor:
    """Return a part of a box along a local axis: of the same global tensor, where `narrow` makes a smaller one."""
    offset, shape = list(shard.global_offset), list(shard.local_shape)
    offset[shard.prepend_axis_num + axis] += start
    shape[axis] = length
    data = None if shard.data is None else shard.data.narrow(axis, start, length)
    box, begin = tuple(shape), tuple(offset)
    return replace(shard, data=data, local_shape=box, global_offset=begin, axis_fragmentations=None)
