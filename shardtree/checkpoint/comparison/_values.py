"""Whether two tensors are equal bit for bit, found out piece by piece, and how they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...codec import row_major_bits
from ...lazy import LazyTensor
from ._boxes import boxes_within

Number = bool | int | float | complex | str

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES_PER_ELEMENT = 64  # two elements of any size, their bits, and their values as the widest numbers


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the elements of a tensor differ.

    Attributes:
        key: the tensor's.
        count: how many elements differ in a bit.
        elements: how many there are.
        first: index of the first one that differs, in row-major order.
        left: what the left one has there; its bits in hexadecimal where torch can't make a number of them.
        right: what the right one has there.
        largest: the largest absolute difference of two numbers; None where there are none, as for NaNs.
    """

    key: str
    count: int
    elements: int
    first: tuple[int, ...]
    left: Number
    right: Number
    largest: float | int | None

    def __str__(self) -> str:
        largest = "" if self.largest is None else f", by at most {self.largest}"
        place = f"the first at {self.first}: {self.left} and {self.right}"
        return f"{self.key!r}: {self.count} of {self.elements} elements differ{largest}; {place}"


def value_difference(
    key: str,
    left: torch.Tensor | LazyTensor,
    right: torch.Tensor | LazyTensor,
    most_bytes: int,
    progress: Callable[[int], None],
) -> ValueDifference | None:
    """Return how two tensors of one dtype and shape differ, None if they are equal bit for bit.

    Args:
        key: the tensor's.
        left: read piece by piece where it is lazy.
        right: likewise.
        most_bytes: how much memory that may take, but for at least an element.
        progress: is told how many bytes of each were compared since the last time.

    Examples:
        >>> left, right = torch.tensor([1.0, float("nan")]), torch.tensor([1.5, float("nan")])
        >>> print(value_difference("w", left, right, 2**20, lambda nbytes: None))
        'w': 1 of 2 elements differ, by at most 0.5; the first at (0,): 1.0 and 1.5
    """
    shape, found = tuple(left.shape), None
    for offset, size in boxes_within(shape, max(1, most_bytes // _BYTES_PER_ELEMENT)):
        part = _part_difference(key, shape, offset, _box(left, offset, size), _box(right, offset, size))
        found = part if found is None else _together(found, part)
        progress(int(np.prod(size, dtype=np.int64)) * left.dtype.itemsize)
    return found


def _box(tensor: torch.Tensor | LazyTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(tensor, LazyTensor):
        return tensor.read_box(offset, shape)
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def _part_difference(
    key: str, shape: tuple[int, ...], offset: tuple[int, ...], left: torch.Tensor, right: torch.Tensor
) -> ValueDifference | None:
    mine, theirs = _words(left), _words(right)
    wrong = (mine != theirs).any(axis=1)
    count = int(np.count_nonzero(wrong))
    if not count:
        return None
    # A piece is a run of whole rows, or part of one: its first index plus that in the piece is the tensor's.
    inside = np.unravel_index(int(wrong.argmax()), tuple(left.shape)) if left.ndim else ()
    first = tuple(int(start + index) for start, index in zip(offset, inside, strict=True))
    lefts, rights = (_numbers(words[wrong], left.dtype) for words in (mine, theirs))
    elements = int(np.prod(shape, dtype=np.int64))
    return ValueDifference(key, count, elements, first, lefts[0].item(), rights[0].item(), _largest(lefts, rights))


def _together(found: ValueDifference, later: ValueDifference | None) -> ValueDifference:
    if later is None:
        return found
    known = [each.largest for each in (found, later) if each.largest is not None]
    return replace(found, count=found.count + later.count, largest=max(known, default=None))


def _words(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor's elements as integers, a row each: (elements, words)."""
    word = _WORDS.get(tensor.dtype.itemsize, np.uint64)
    return row_major_bits(tensor).numpy().view(word).reshape(tensor.numel(), -1)


def _numbers(words: Any, dtype: torch.dtype) -> Any:
    """Return elements, given their bits, as the widest numbers of their kind; or as texts where torch can't."""
    raw = torch.from_numpy(words.view(np.uint8).reshape(-1).copy()).view(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else None
    try:
        return raw.numpy() if wide is None else raw.to(wide).numpy()
    except (RuntimeError, TypeError, NotImplementedError):
        texts = [f"0x{row.tobytes()[::-1].hex()}" for row in words[:1]]
        return np.array(texts)


def _largest(left: Any, right: Any) -> float | int | None:
    if left.dtype.kind == "U":
        return None
    if left.dtype.kind in "iu":
        return _largest_of_integers(left, right)
    if left.dtype.kind == "b":
        return 1
    with np.errstate(all="ignore"):
        apart = np.abs(left - right)
    numbers = apart[~np.isnan(apart)]
    return float(numbers.max()) if numbers.size else None


def _largest_of_integers(left: Any, right: Any) -> int:
    # Differences of 64 bits don't fit in one: as unsigned ones, taken from the larger number, they do.
    wide = np.uint64 if left.dtype.kind == "u" else np.int64
    high, low = np.maximum(left, right).astype(wide), np.minimum(left, right).astype(wide)
    return int((high.view(np.uint64) - low.view(np.uint64)).max())
