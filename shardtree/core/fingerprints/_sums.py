"""Weighted sums over boxes of elements, in host memory or on an accelerator, and the weights of indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from importlib import import_module
from typing import Any, no_type_check

import numpy as np
import torch
from numpy.typing import NDArray

from ..geometry import slabs, slices

# Weights of indices: odd numbers of 64 bits that any rank can compute for any index.

Words = NDArray[np.uint64]

FACTOR = 0x9E3779B97F4A7C15
"""An odd factor, so that multiplication by it is a bijection."""

CONSTANT = 0xD1B54A32D192ED03
"""Constant added to each mixed word; without it, missing zeros wouldn't change the sum."""

MODULUS = 1 << 64

_LOW_BITS = 16
"""Number of an index's lower bits. Indices of one axis with equal higher bits share a factor, so that a long axis needs
no long table."""

_LOW = 1 << _LOW_BITS
_GAMMA = 0x9E3779B97F4A7C15


def scramble(numbers: NDArray[Any]) -> Words:
    """Return numbers of 64 bits, mixed by a bijection such that each output bit depends on all input bits.

    Args:
        numbers: Numbers, uint64, of any shape but ().

    References:
        The output function of SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
        generators", OOPSLA 2014.

    Examples:
        >>> [hex(number) for number in scramble(np.array([1, 2], dtype=np.uint64)).tolist()]
        ['0x5692161d100b05e5', '0xdbd238973a2b148a']
    """
    image = numbers.astype(np.uint64)
    image ^= image >> np.uint64(30)
    image *= np.uint64(0xBF58476D1CE4E5B9)
    image ^= image >> np.uint64(27)
    image *= np.uint64(0x94D049BB133111EB)
    image ^= image >> np.uint64(31)
    return image


def axis_weights(axis: int, start: int, stop: int) -> Words:
    """Return the weights of consecutive indices along an axis, each an odd number.

    The weight of an element is the product of its indices' weights, modulo 2**64.

    Args:
        axis: Axis of the global tensor, counted from 0.
        start: First index.
        stop: One past the last index.

    Returns:
        The weights, uint64 (stop - start,).

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
    for number, high in enumerate(high_weights(axis, start, stop), start >> _LOW_BITS):
        begin, end = max(start, number * _LOW), min(stop, (number + 1) * _LOW)
        pieces.append(low[begin - number * _LOW : end - number * _LOW] * high)
    return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.zeros(0, dtype=np.uint64)])


@lru_cache(maxsize=16)  # half a MiB each
def _first_weights(axis: int) -> Words:
    """Return the weights of the first 65,536 indices along an axis, enough for most tensors; read-only."""
    first = low_weights(axis) * high_weights(axis, 0, 1)
    first.setflags(write=False)
    return first


def high_weights(axis: int, start: int, stop: int) -> Words:
    """Return a factor for each block of 65,536 indices that meets the range from `start` to ``stop - 1``.

    The weight of an index is the factor of its block times the factor of its lower 16 bits, which is in `low_weights`.
    The result is uint64 (blocks,).

    Examples:
        >>> high_weights(0, 65_535, 65_537).size
        2
    """
    first, last = start >> _LOW_BITS, -(-stop >> _LOW_BITS)
    return _odd_outputs(2 * axis, first, max(first, last))


@lru_cache(maxsize=16)  # half a MiB each
def low_weights(axis: int) -> Words:
    """Return the factors that the lower 16 bits of an index contribute to its weight, uint64 (65536,), read-only.

    Examples:
        >>> low_weights(0).size
        65536
    """
    low = _odd_outputs(2 * axis + 1, 0, _LOW)
    low.setflags(write=False)
    return low


def _odd_outputs(stream: int, start: int, stop: int) -> Words:
    """Return outputs `start` to ``stop - 1`` of the generator SplitMix64, each made odd; `stream` sets its seed."""
    seed = int(scramble(np.array([stream + 1], dtype=np.uint64))[0])
    counts = np.arange(start, stop, dtype=np.uint64) * np.uint64(_GAMMA)
    counts += np.uint64((seed + _GAMMA) % MODULUS)
    return scramble(counts) | np.uint64(1)


# The sum on the host, slab by slab, in buffers that stay in the processor's cache.

_WEIGHTS = 1 << 18  # number of words whose weights are computed at once
_WORDS = 1 << 15  # number of words that are mixed at once: half a MiB with buffers
_SHORT = 64  # number of words in a short row
_HALF = np.uint64(32)


def host_total(words: NDArray[Any], axes: Sequence[int], offset: Sequence[int]) -> int:
    """Return the weighted sum of a box's words modulo 2**64; each word is mixed by a bijection before it is weighted.

    Args:
        words: Bits of the elements as unsigned integers of 1, 2, 4 or 8 bytes, with any strides.
        axes: Index of each axis of the box among the axes of the global tensor.
        offset: First index of the box along each axis.

    Examples:
        >>> zeros = np.zeros((2, 3), dtype=np.uint32)
        >>> upper, lower = (host_total(zeros[:1], (0, 1), (row, 0)) for row in (0, 1))
        >>> host_total(zeros, (0, 1), (0, 0)) == (upper + lower) % 2**64, upper == lower
        (True, False)
    """
    if not words.ndim:
        words, axes, offset = words.reshape(1), (0,), (0,)
        return _slab_total(words, [np.ones(1, dtype=np.uint64)])
    # The sum doesn't depend on the order, so elements are taken in the order of memory, which is fastest.
    order = sorted(range(words.ndim), key=lambda axis: -abs(words.strides[axis]))
    words = words.transpose(order)
    total, slab_total = 0, compiled_for(words.size) or _slab_total
    for start, shape in slabs(words.shape, _WEIGHTS):
        first = [offset[axis] + begin for axis, begin in zip(order, start, strict=True)]
        ranges = zip(order, first, shape, strict=True)
        weights = [axis_weights(axes[axis], begin, begin + size) for axis, begin, size in ranges]
        total += slab_total(words[slices(start, shape)], weights)
    return total % MODULUS


def _slab_total(words: NDArray[Any], weights: Sequence[Words]) -> int:
    total, scratch = 0, np.empty((2, min(words.size, _WORDS)), dtype=np.uint64)
    for start, shape in slabs(words.shape, _WORDS):
        place = slices(start, shape)
        image = _mix(words[place], *scratch[:, : int(np.prod(shape))])
        total += _contract(image, [factors[part] for factors, part in zip(weights, place, strict=True)])
    of_constant = CONSTANT
    for factors in weights:
        of_constant *= int(factors.sum())
    return (total + of_constant) % MODULUS


def _mix(words: NDArray[Any], room: Words, other: Words) -> Words:
    """Return each word mixed by a bijection of 64 bits; `room`, which receives the result, and `other` are buffers."""
    image, halves = room.reshape(words.shape), other.reshape(words.shape)
    if words.itemsize == 8:
        np.right_shift(words, _HALF, out=halves)
        np.bitwise_xor(words, halves, out=image)
        words = image
    np.multiply(words, _FACTOR, out=image, dtype=np.uint64)
    np.right_shift(image, _HALF, out=halves)
    return np.bitwise_xor(image, halves, out=image)


def _contract(image: Words, weights: Sequence[Words]) -> int:
    *above, last = weights
    if above and last.size < _SHORT:
        # Sums of many short rows cost more than their elements, so the columns, which are long, are summed first.
        columns = reduce(np.multiply.outer, above).reshape(-1)
        return int((columns @ image.reshape(-1, last.size) * last).sum())
    sums = np.einsum("ij,j->i", image.reshape(-1, last.size), last)
    return _contract(sums, above) if above else int(sums[0])


# The sum on an accelerator: only one number is copied to the host.

_MOST = 1 << 24  # number of words that are mixed at once
_LOW_HALF = 0xFFFFFFFF


def device_total(words: torch.Tensor, axes: Sequence[int], offset: Sequence[int]) -> int:
    """Return the same weighted sum of a box's words as `host_total`, computed by torch on the device of the words.

    Args:
        words: Bits of the elements as integers of 1, 2, 4 or 8 bytes.
        axes: Index of each axis of the box among the axes of the global tensor.
        offset: First index of the box along each axis.

    Examples:
        >>> zero, weight = torch.zeros(1, dtype=torch.int32), int(axis_weights(0, 0, 1)[0])
        >>> device_total(zero, (0,), (0,)) == CONSTANT * weight % 2**64
        True
    """
    totals = []
    for start, shape in slabs(tuple(words.shape), _MOST):
        total = _mix_on_device(words[slices(start, shape)]) + _with_sign(CONSTANT)
        for axis in reversed(range(words.ndim)):
            first = offset[axis] + start[axis]
            total = (total * _weights(axes[axis], first, first + shape[axis], words.device)).sum(-1)
        totals.append(total)
    return int(torch.stack(totals).sum()) % MODULUS if totals else 0


def _mix_on_device(words: torch.Tensor) -> torch.Tensor:
    # torch shifts only signed integers, which copies the sign bit; the masks remove the copies.
    wide = words.to(torch.int64)
    if words.itemsize == 8:
        wide = wide ^ (wide >> 32 & _LOW_HALF)
    else:
        wide = wide & ((1 << 8 * words.itemsize) - 1)
    wide = wide * _with_sign(FACTOR)
    return wide ^ (wide >> 32 & _LOW_HALF)


def _weights(axis: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    if stop - start <= _LOW:
        return _to_device(axis_weights(axis, start, stop), device)
    index = torch.arange(start, stop, device=device)
    high = _to_device(high_weights(axis, start, stop), device)[(index >> _LOW_BITS) - (start >> _LOW_BITS)]
    return high * _to_device(low_weights(axis), device)[index & (_LOW - 1)]


def _to_device(weights: Words, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64).copy()).to(device)


def _with_sign(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number


# The sum of a slab as one compiled loop, if numba is installed: several times as fast as NumPy's steps.

SlabTotal = Callable[[NDArray[Any], Sequence[Words]], int]
"""A function from a slab's words and the weights along each of its axes to its sum."""

_WORTH = 1 << 29  # number of words for which NumPy takes as long as the compilation, a second
_seen = [0]


def compiled_for(words: int) -> SlabTotal | None:
    """Return `compiled_total` if numba is installed and compiling is worth its time; otherwise None.

    Compiling is worth its time once the words of all calls in this process add up to `_WORTH`.

    Args:
        words: Number of words to sum next, which is added to those of earlier calls.
    """
    _seen[0] += words  # threads that race may lose a count, which is harmless
    return compiled_total if _seen[0] >= _WORTH and _has_numba() else None


@cache
def _has_numba() -> bool:
    try:
        import_module("numba")
    except ImportError:
        return False
    return True


def compiled_total(words: NDArray[Any], weights: Sequence[Words]) -> int:
    """Return the weighted sum of a slab, a part of a box, by the method of `host_total`; needs numba.

    Args:
        words: Words of the slab, as unsigned integers of 1, 2, 4 or 8 bytes.
        weights: Weights along each axis, uint64; at least one axis.
    """
    *above, last = weights
    rows: Words = reduce(np.multiply.outer, above).reshape(-1) if above else np.ones(1, dtype=np.uint64)
    matrix = np.ascontiguousarray(words.reshape(rows.size, last.size))
    return int(_loop(words.itemsize)(matrix, rows, last)) % MODULUS


@cache
def _loop(itemsize: int) -> Callable[[NDArray[Any], Words, Words], int]:
    numba = import_module("numba")
    # The types are read-only arrays. Writable arrays are accepted for them, so each item size is compiled only once.
    word, column = getattr(numba, f"uint{8 * itemsize}"), numba.types.Array(numba.uint64, 1, "C", readonly=True)
    matrix = numba.types.Array(word, 2, "C", readonly=True)
    # The loop runs without the interpreter's lock, so that threads share the pieces of a tensor.
    loop: Callable[[NDArray[Any], Words, Words], int]
    loop = numba.njit(numba.uint64(matrix, column, column), nogil=True)(_sum_of_rows)
    return loop


_FACTOR, _CONSTANT = np.uint64(FACTOR), np.uint64(CONSTANT)


@no_type_check
def _sum_of_rows(words, rows, columns):  # numba compiles it, so no runtime type checker may wrap it
    total = np.uint64(0)
    for row in range(words.shape[0]):
        of_row = np.uint64(0)
        for column in range(words.shape[1]):
            word = np.uint64(words[row, column])
            image = (word ^ (word >> _HALF)) * _FACTOR
            of_row += ((image ^ (image >> _HALF)) + _CONSTANT) * columns[column]
        total += of_row * rows[row]
    return total
