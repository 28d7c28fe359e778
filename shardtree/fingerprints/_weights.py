"""What fingerprints are made of: weights of indices, odd numbers of 64 bits that any rank computes for any index."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that the product with it is a bijection."""

CONSTANT = 0xD1B54A32D192ED03
"""Added to each mixed word: otherwise missing zeros wouldn't change the sum."""

MODULUS = 1 << 64

LOW_BITS = 16
"""Indices of one axis with equal higher bits share a factor, so that a long axis needs no long table."""

_LOW = 1 << LOW_BITS
_GAMMA = 0x9E3779B97F4A7C15


def scramble(numbers: NDArray[Any]) -> Words:
    """Return each number's image under a bijection of 64 bits in which each output bit depends on all input bits.

    Args:
        numbers: uint64, of any shape but ().

    References:
        The output function of SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
        generators", OOPSLA 2014.

    Examples:
        >>> [hex(number) for number in scramble(np.array([1, 2], dtype=np.uint64)).tolist()]
        ['0x5692161d100b05e5', '0xdbd238973a2b148a']
    """
    mixed = numbers.astype(np.uint64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def axis_weights(axis: int, start: int, stop: int) -> Words:
    """Return the weights of consecutive indices along an axis, each an odd number.

    Args:
        axis: the axis of the global tensor, counted from 0.
        start: the first index.
        stop: one past the last index.

    Returns:
        uint64 (stop - start,).

    Examples:
        >>> [hex(weight) for weight in axis_weights(0, 1, 3).tolist()]
        ['0xf18385619b73dc4f', '0xe76f54b96fe252df']
        >>> bool((axis_weights(2, 65_000, 66_000) % 2 == 1).all())
        True
    """
    if 0 <= start <= stop <= _LOW:
        return _first_weights(axis)[start:stop]
    low = low_weights(axis)
    pieces = []
    for number, high in enumerate(high_weights(axis, start, stop), start >> LOW_BITS):
        begin, end = max(start, number * _LOW), min(stop, (number + 1) * _LOW)
        pieces.append(low[begin - number * _LOW : end - number * _LOW] * high)
    return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.zeros(0, dtype=np.uint64)])


@lru_cache(maxsize=16)  # half a MiB each
def _first_weights(axis: int) -> Words:
    """Return the weights of the first 65,536 indices, enough for most tensors; read-only."""
    first = low_weights(axis) * high_weights(axis, 0, 1)
    first.setflags(write=False)
    return first


def high_weights(axis: int, start: int, stop: int) -> Words:
    """Return the factors of weights for the indices' higher bits, from those of `start` to those of ``stop - 1``.

    Examples:
        >>> high_weights(0, 65_535, 65_537).size
        2
    """
    first, last = start >> LOW_BITS, -(-stop >> LOW_BITS)
    return _odd_outputs(2 * axis, first, max(first, last))


@lru_cache(maxsize=16)  # half a MiB each
def low_weights(axis: int) -> Words:
    """Return the factors of weights for the indices' lower bits, uint64 (65536,), read-only.

    Examples:
        >>> low_weights(0).size
        65536
    """
    low = _odd_outputs(2 * axis + 1, 0, _LOW)
    low.setflags(write=False)
    return low


def _odd_outputs(stream: int, start: int, stop: int) -> Words:
    """Return some outputs of the generator that a stream's number seeds, made odd."""
    seed = int(scramble(np.array([stream + 1], dtype=np.uint64))[0])
    counts = np.arange(start, stop, dtype=np.uint64) * np.uint64(_GAMMA)
    counts += np.uint64((seed + _GAMMA) % MODULUS)
    return scramble(counts) | np.uint64(1)
