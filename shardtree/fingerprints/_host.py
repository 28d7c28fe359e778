"""The weighted sum over a box in the processor's memory: slab by slab, in scratch that stays in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..geometry import slabs, slices
from ._weights import Words, axis_weights

FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that the product with it is a bijection."""

CONSTANT = 0xD1B54A32D192ED03
"""Added to each mixed word, so that a word of zeros counts too."""

MODULUS = 1 << 64

_WEIGHED = 1 << 18  # words whose weights are made at once
_MIXED = 1 << 15  # words that are mixed at once: with scratch, half a MiB
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
    # The sum has no order: the one in which the elements lie in memory is the fastest.
    order = sorted(range(words.ndim), key=lambda axis: -abs(words.strides[axis]))
    words = words.transpose(order)
    total = 0
    for start, shape in slabs(words.shape, _WEIGHED):
        first = [offset[axis] + begin for axis, begin in zip(order, start, strict=True)]
        ranges = zip(order, first, shape, strict=True)
        weights = [axis_weights(axes[axis], begin, begin + size) for axis, begin, size in ranges]
        total += _slab_total(words[slices(start, shape)], weights)
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
    """Return each word's image under a bijection of 64 bits, in the given room."""
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
        # A sum along a short row costs more than its elements; columns are as long as rows are short.
        columns = reduce(np.multiply.outer, above).reshape(-1)
        return int((columns @ mixed.reshape(-1, last.size) * last).sum())
    sums = np.einsum("ij,j->i", mixed.reshape(-1, last.size), last)
    return _contract(sums, above) if above else int(sums[0])
