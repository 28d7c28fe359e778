"""The weighted sum over a box, in the host's memory or on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..geometry import slabs, slices
from ._compiled import compiled_for
from ._weights import CONSTANT, FACTOR, LOW_BITS, MODULUS, Words, axis_weights, high_weights, low_weights

# The sum on the host, slab by slab, in buffers that stay in the processor's cache.

_WEIGHED = 1 << 18  # words whose weights are computed at once
_MIXED = 1 << 15  # words that are mixed at once: with buffers, half a MiB
_SHORT = 64  # words of a row
_HALF = np.uint64(32)


def host_total(words: NDArray[Any], axes: Sequence[int], offset: Sequence[int]) -> int:
    """Return the sum of a box's mixed words, each times the weights of its indices, modulo 2 to the 64.

    Args:
        words: the elements' bits as unsigned integers of 1, 2, 4 or 8 bytes; of any strides.
        axes: the global axis that each axis of the box is.
        offset: the box's first index along each.

    Examples:
        >>> zeros = np.zeros((2, 3), dtype=np.uint32)
        >>> upper, lower = (host_total(zeros[:1], (0, 1), (row, 0)) for row in (0, 1))
        >>> host_total(zeros, (0, 1), (0, 0)) == (upper + lower) % 2**64, upper == lower
        (True, False)
    """
    if not words.ndim:
        words, axes, offset = words.reshape(1), (0,), (0,)
        return _slab_total(words, [np.ones(1, dtype=np.uint64)])
    # The sum doesn't depend on the order, so elements are taken in that of memory, which is fastest.
    order = sorted(range(words.ndim), key=lambda axis: -abs(words.strides[axis]))
    words = words.transpose(order)
    total, slab_total = 0, compiled_for(words.size) or _slab_total
    for start, shape in slabs(words.shape, _WEIGHED):
        first = [offset[axis] + begin for axis, begin in zip(order, start, strict=True)]
        ranges = zip(order, first, shape, strict=True)
        weights = [axis_weights(axes[axis], begin, begin + size) for axis, begin, size in ranges]
        total += slab_total(words[slices(start, shape)], weights)
    return total % MODULUS


def _slab_total(words: NDArray[Any], weights: Sequence[Words]) -> int:
    total, scratch = 0, np.empty((2, min(words.size, _MIXED)), dtype=np.uint64)
    for start, shape in slabs(words.shape, _MIXED):
        place = slices(start, shape)
        mixed = _mix(words[place], *scratch[:, : int(np.prod(shape))])
        total += _contract(mixed, [each[part] for each, part in zip(weights, place, strict=True)])
    of_constant = CONSTANT
    for each in weights:
        of_constant *= int(each.sum())
    return (total + of_constant) % MODULUS


def _mix(words: NDArray[Any], room: Words, other: Words) -> Words:
    """Return each word's image under a bijection of 64 bits, in the given buffers."""
    mixed, shifted = room.reshape(words.shape), other.reshape(words.shape)
    if words.itemsize == 8:
        np.right_shift(words, _HALF, out=shifted)
        np.bitwise_xor(words, shifted, out=mixed)
        words = mixed
    np.multiply(words, np.uint64(FACTOR), out=mixed, dtype=np.uint64)
    np.right_shift(mixed, _HALF, out=shifted)
    return np.bitwise_xor(mixed, shifted, out=mixed)


def _contract(mixed: Words, weights: Sequence[Words]) -> int:
    *above, last = weights
    if above and last.size < _SHORT:
        # Sums of many short rows cost more than their elements, so columns are summed first, which are long.
        columns = reduce(np.multiply.outer, above).reshape(-1)
        return int((columns @ mixed.reshape(-1, last.size) * last).sum())
    sums = np.einsum("ij,j->i", mixed.reshape(-1, last.size), last)
    return _contract(sums, above) if above else int(sums[0])


# The sum on an accelerator, so that only one number is copied to the host.

_MOST = 1 << 24  # words that are mixed at once
_LOW_HALF = 0xFFFFFFFF


def device_total(words: torch.Tensor, axes: Sequence[int], offset: Sequence[int]) -> int:
    """Return what `host_total` returns, computed by torch on the device where the words are.

    Args:
        words: the elements' bits as integers of 1, 2, 4 or 8 bytes.
        axes: the global axis that each axis of the box is.
        offset: the box's first index along each.

    Examples:
        >>> zero, weight = torch.zeros(1, dtype=torch.int32), int(axis_weights(0, 0, 1)[0])
        >>> device_total(zero, (0,), (0,)) == CONSTANT * weight % 2**64
        True
    """
    totals = []
    for start, shape in slabs(tuple(words.shape), _MOST):
        total = _mix_on_device(words[slices(start, shape)]) + _signed(CONSTANT)
        for axis in reversed(range(words.ndim)):
            first = offset[axis] + start[axis]
            total = (total * _weights(axes[axis], first, first + shape[axis], words.device)).sum(-1)
        totals.append(total)
    return int(torch.stack(totals).sum()) % MODULUS if totals else 0


def _mix_on_device(words: torch.Tensor) -> torch.Tensor:
    # torch has shifts for signed integers only, which copy the sign bit: masks remove it.
    wide = words.to(torch.int64)
    if words.itemsize == 8:
        wide = wide ^ (wide >> 32 & _LOW_HALF)
    else:
        wide = wide & ((1 << 8 * words.itemsize) - 1)
    wide = wide * _signed(FACTOR)
    return wide ^ (wide >> 32 & _LOW_HALF)


def _weights(axis: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    if stop - start <= 1 << LOW_BITS:
        return _to_device(axis_weights(axis, start, stop), device)
    index = torch.arange(start, stop, device=device)
    high = _to_device(high_weights(axis, start, stop), device)[(index >> LOW_BITS) - (start >> LOW_BITS)]
    return high * _to_device(low_weights(axis), device)[index & ((1 << LOW_BITS) - 1)]


def _to_device(weights: Words, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64).copy()).to(device)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number
