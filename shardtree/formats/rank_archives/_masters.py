"""Comparison of master weights with weights, piece by piece: it shows that states belong to their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from ...kit import ReadReport, ShardedTensor, row_major_bits

_PIECE_ELEMENTS = 4 * 1024 * 1024
"""Upper bound of the elements of a master weight that are in memory at a time."""

Read = Callable[[Sequence[ShardedTensor]], ReadReport]
"""Function that fills the shards' data in place, and returns a report."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two tensors whose comparison shows whether an optimizer state's bytes belong to its parameter.

    The master weight is stored with the state, and the weight in another file. If the two tensors differ, a file was
    copied or exchanged.

    Attributes:
        master: Key of the parameter's float32 master weight.
        weight: Key of the parameter, whose weight must equal the master weight after rounding.
    """

    master: str
    weight: str


def first_difference(
    read: Read, pair: Comparison, box: ShardedTensor, dtype: torch.dtype
) -> tuple[tuple[int, ...] | None, ReadReport]:
    """Return the first element at which a master weight, after rounding, differs from its weight.

    Args:
        read: Function that reads stored tensors.
        pair: Keys of the master weight and the weight.
        box: Part to compare, as a shard of the master weight or the weight.
        dtype: Dtype of the weight.

    Returns:
        Indices in the global tensor, None if the two are equal; and the report of the reads.
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
    """Return the flat index of the first element at which a rounded master weight differs from its weight, or None."""
    if master.dtype == weight.dtype:  # Nothing was rounded, so that the bits are compared.
        item = master.element_size()
        unlike = (row_major_bits(master) != row_major_bits(weight)).view(-1, item).any(dim=1)
    else:
        cast = master.to(weight.dtype)
        unlike = ((cast != weight) & ~(cast.isnan() & weight.isnan())).flatten()
    return int(unlike.nonzero()[0]) if bool(unlike.any()) else None


def _place(shard: ShardedTensor, element: int) -> tuple[int, ...]:
    """Return the global indices of an element, given its flat index in the data of a shard."""
    if shard.flattened_range is not None:
        element += shard.flattened_range.start
    inside = [int(at) for at in np.unravel_index(element, shard.local_shape)] if shard.local_shape else []
    inside = [0] * shard.prepend_axis_num + inside
    return tuple(begin + at for begin, at in zip(shard.global_offset, inside, strict=True))


def memory_of(shard: ShardedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return new memory for a shard's elements."""
    return torch.empty(shard.data_shape, dtype=dtype, device="cpu")


def pieces_of(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """Yield the pieces of a shard, of a few million elements each, whose data are contiguous views of its data.

    A shard with `allow_shape_mismatch` stays one piece.
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
    """Return a slice of a shard along a local axis, as a shard of the same global tensor."""
    offset, shape = list(shard.global_offset), list(shard.local_shape)
    offset[shard.prepend_axis_num + axis] += start
    shape[axis] = length
    data = None if shard.data is None else shard.data.narrow(axis, start, length)
    box, begin = tuple(shape), tuple(offset)
    return replace(shard, data=data, local_shape=box, global_offset=begin, axis_fragmentations=None)
