"""The difference of two tensors, bit for bit, read piece by piece in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch

from ..core.codec import row_major_bits
from ..core.geometry import Box, box_shape, slices, tiles
from ..core.lazy import LazyTensor
from ..core.offences import offence_text
from ..errors import ShapeError, error_text

# Division of a tensor into boxes that follow each other in row-major order

_MOST_BOXES = 2**20  # per tensor: a file may claim a tensor of 2**57 elements, which would be read without end


def boxes(shape: tuple[int, ...], cell: tuple[int, ...], doing: str, most: int) -> Iterator[Box]:
    """Return the boxes that tile a tensor, in row-major order. They have shape `cell`, or less at the tensor's ends.

    Args:
        shape: Shape of the tensor.
        cell: Shape of a box, at least 1 along each axis that has elements.
        doing: Name of the operation in error messages.
        most: Upper bound of the number of boxes.

    Raises:
        ShapeError: There would be more than `most` boxes.

    Examples:
        >>> list(boxes((3, 4), (2, 4), "compare: 'w'", 100))
        [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    count = prod(-(-size // step) for size, step in zip(shape, cell, strict=True)) if prod(shape) else 0
    if count > most:
        heading, fix = (
            f"{doing} of shape {shape} would be read in too many pieces",
            "Pass a larger max_bytes_in_flight.",
        )
        raise ShapeError(error_text(heading, found=f"{count} pieces", expected=f"at most {most}", fix=fix))
    return tiles(shape, cell)


def boxes_within(shape: tuple[int, ...], most: int, doing: str) -> Iterator[Box]:
    """Return boxes that tile a tensor, each contiguous in the row-major tensor, in order.

    Args:
        shape: Shape of the tensor.
        most: Upper bound of the number of elements in a box, at least 1.
        doing: Name of the operation in error messages.

    Raises:
        ShapeError: There would be more than a million boxes.

    Examples:
        >>> [offset for offset, _ in boxes_within((2, 3), 2, "compare: 'w'")]
        [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    return boxes(shape, box_shape(shape, most), doing, _MOST_BOXES)


Number = bool | int | float | complex | str

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES_PER_ELEMENT = 64  # two elements of any size, their bits, and their values as the widest numbers


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The difference of the elements of two tensors.

    Attributes:
        key: Key of the tensor.
        count: Number of elements that differ in at least one bit.
        elements: Number of all elements.
        first: Index of the first differing element, in row-major order.
        left: First differing element on the left; its bits in hexadecimal if torch can't convert them to a number.
        right: First differing element on the right.
        largest: Largest absolute difference of two elements; None if there is none, as for NaNs.
        ulps: Largest distance of two floating-point elements in ulps (units in the last place): the number of steps
            from one to the other through the numbers of their dtype. None if there is none.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    key: str
    count: int
    elements: int
    first: tuple[int, ...]
    left: Number
    right: Number
    largest: float | int | None
    ulps: int | None = None

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The number of elements that differ, the largest difference, and the first element."""
        largest = "" if self.largest is None else f", by at most {self.largest}"
        place = f"the first at {self.first}: {self.left} and {self.right}"
        return f"{self.count} of {self.elements} elements differ{largest}; {place}"


def value_difference(
    key: str,
    left: torch.Tensor | LazyTensor,
    right: torch.Tensor | LazyTensor,
    most_bytes: int,
    progress: Callable[[int], None],
) -> ValueDifference | None:
    """Return the difference of two tensors of one dtype and shape; None if they are equal bit for bit.

    Args:
        key: Key of the tensor.
        left: Left tensor; read piece by piece if it is lazy.
        right: Right tensor; read piece by piece if it is lazy.
        most_bytes: Upper bound of the memory, raised if it is too small for one element.
        progress: Callback with the bytes of each tensor compared since its last call.

    Raises:
        ShapeError: Within `most_bytes`, a tensor would be compared in more than a million pieces.

    Examples:
        >>> left, right = torch.tensor([1.0, float("nan")]), torch.tensor([1.5, float("nan")])
        >>> print(value_difference("w", left, right, 2**20, lambda nbytes: None))
        'w': 1 of 2 elements differ, by at most 0.5; the first at (0,): 1.0 and 1.5
    """
    shape, difference = tuple(left.shape), None
    for offset, size in boxes_within(shape, max(1, most_bytes // _BYTES_PER_ELEMENT), f"compare: {key!r}"):
        part = _part_difference(key, shape, offset, _box(left, offset, size), _box(right, offset, size))
        difference = part if difference is None else joint_difference(difference, part)
        progress(int(np.prod(size, dtype=np.int64)) * left.dtype.itemsize)
    return difference


def _box(tensor: torch.Tensor | LazyTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(tensor, LazyTensor):
        return tensor.read_box(offset, shape)
    return tensor[slices(offset, shape)]


def _part_difference(
    key: str, shape: tuple[int, ...], offset: tuple[int, ...], left: torch.Tensor, right: torch.Tensor
) -> ValueDifference | None:
    mine, theirs = _words(left), _words(right)
    wrong = (mine != theirs).any(axis=1)
    count = int(np.count_nonzero(wrong))
    if not count:
        return None
    # A piece is a run of whole rows, or part of one, so indices in the piece only need the piece's first index added.
    inside = np.unravel_index(int(wrong.argmax()), tuple(left.shape)) if left.ndim else ()
    first = tuple(int(start + index) for start, index in zip(offset, inside, strict=True))
    lefts, rights = (_numbers(words[wrong], left.dtype) for words in (mine, theirs))
    elements = int(np.prod(shape, dtype=np.int64))
    # Floats of 4 bits are texts here, which have no difference: torch stores them in pairs, and can't convert them.
    is_float = left.is_floating_point() and lefts.dtype.kind == "f"
    ulps = _ulps(mine[wrong], theirs[wrong], np.isnan(lefts) | np.isnan(rights)) if is_float else None
    largest = _largest(lefts, rights)
    return ValueDifference(key, count, elements, first, lefts[0].item(), rights[0].item(), largest, ulps)


def _ulps(left: Any, right: Any, nan: Any) -> int | None:
    """Return the largest distance in ulps of pairs of floating-point numbers; None if each pair has a NaN.

    Args:
        left: Bits of each pair's left number, as unsigned integers, (pairs, 1).
        right: Bits of each pair's right number.
        nan: Mask of the pairs with a NaN, which are left out, bool (pairs,).
    """
    top = np.uint64(1 << 8 * left.itemsize - 1)
    bits = [words[~nan, 0].astype(np.uint64) for words in (left, right)]
    low, high = np.minimum(*(each & ~top for each in bits)), np.maximum(*(each & ~top for each in bits))
    apart = np.where((bits[0] ^ bits[1]) & top, high + low, high - low)
    return int(apart.max()) if apart.size else None


def joint_difference(first: ValueDifference, later: ValueDifference | None) -> ValueDifference:
    """Return the difference of all elements, given those of the first and of later elements of the same tensor."""
    if later is None:
        return first
    largest = max((each.largest for each in (first, later) if each.largest is not None), default=None)
    ulps = max((each.ulps for each in (first, later) if each.ulps is not None), default=None)
    return replace(first, count=first.count + later.count, largest=largest, ulps=ulps)


def _words(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor's elements as unsigned integers (words), of shape (elements, words per element)."""
    # Bits are compared as integers: as floats, NaN wouldn't equal itself, and 0.0 would equal -0.0.
    word = _WORDS.get(tensor.dtype.itemsize, np.uint64)
    return row_major_bits(tensor).numpy().view(word).reshape(tensor.numel(), -1)


def _numbers(words: Any, dtype: torch.dtype) -> Any:
    """Return the elements with these bits as numbers: float64 or complex128, or integers and booleans of their dtype.

    If torch can't convert the dtype, the result is the first element's bits alone, as a hexadecimal text.
    """
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
    # The difference of two int64 may overflow; the larger minus the smaller, as unsigned integers, always fits.
    wide = np.uint64 if left.dtype.kind == "u" else np.int64
    high, low = np.maximum(left, right).astype(wide), np.minimum(left, right).astype(wide)
    return int((high.view(np.uint64) - low.view(np.uint64)).max())
