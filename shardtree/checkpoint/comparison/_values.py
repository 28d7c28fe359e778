"""How two tensors differ, bit for bit, read piece by piece in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from ...codec import row_major_bits
from ...errors import ShapeError, error_text
from ...lazy import Fetch, LazyTensor, stored
from ...mapping import ShardedTensor, box_of
from ...plans import grouped
from ...storage import HostMemory, can
from ...strategies import StrategyAction, traits_of, unreplaced
from .._dispatch import sharded_backend, strategy_of
from .._lazy_tree import OpenCheckpoint
from ..loading._targets import new_memory

# Cutting a tensor into boxes that follow each other in row-major order

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A first index and a shape."""


def box_shape(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the shape of the largest box of whole rows that holds at most so many elements, one at least.

    Args:
        shape: the tensor's.
        most: elements in a box.

    Examples:
        >>> box_shape((10, 4, 6), 100), box_shape((10, 4, 6), 12), box_shape((10, 4, 6), 5)
        ((4, 4, 6), (1, 2, 6), (1, 1, 5))
    """
    for axis, size in enumerate(shape):
        row = prod(shape[axis + 1 :])
        if row <= most or axis == len(shape) - 1:
            return (1,) * axis + (min(size, max(1, most // max(row, 1))),) + shape[axis + 1 :]
    return ()


_MOST_BOXES = 2**20  # of a tensor: guards against a file whose tensor of 2**57 elements would be read without end


def boxes(shape: tuple[int, ...], cell: tuple[int, ...], doing: str, most: int) -> Iterator[Box]:
    """Yield the boxes of a grid, those at its ends perhaps smaller; none of a tensor without elements.

    Args:
        shape: the tensor's.
        cell: a box's, at least 1 along each axis that has elements.
        doing: what they are for, for the error.
        most: how many boxes there may be.

    Raises:
        ShapeError: there are more.

    Examples:
        >>> list(boxes((3, 4), (2, 4), "compare: 'w'", 100))
        [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if not prod(shape):
        return
    count = prod(-(-size // step) for size, step in zip(shape, cell, strict=True))
    if count > most:
        what, fix = f"{doing} of shape {shape} is too large for its pieces", "Give it more bytes in flight."
        raise ShapeError(error_text(what, found=f"{count} pieces", expected=f"at most {most}", fix=fix))
    for offset in product(*(range(0, size, step) for size, step in zip(shape, cell, strict=True))):
        ends = zip(offset, cell, shape, strict=True)
        yield offset, tuple(min(step, size - start) for start, step, size in ends)


def boxes_within(shape: tuple[int, ...], most: int, doing: str) -> Iterator[Box]:
    """Yield boxes of at most so many elements, each a run of the row-major tensor, in order; raises as `boxes` does.

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
    """How the elements of a tensor differ.

    Attributes:
        key: the tensor's.
        count: how many elements differ in a bit.
        elements: how many there are.
        first: index of the first one that differs, in row-major order.
        left: the left one's element there; its bits in hexadecimal if torch can't convert them to a number.
        right: the right one's.
        largest: the largest absolute difference of two numbers; None if there is none, as for NaNs.
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
        most_bytes: how much memory that may take, but at least enough for an element.
        progress: called with the bytes of each that were compared since the last call.

    Raises:
        ShapeError: they are too large to be compared in so little memory.

    Examples:
        >>> left, right = torch.tensor([1.0, float("nan")]), torch.tensor([1.5, float("nan")])
        >>> print(value_difference("w", left, right, 2**20, lambda nbytes: None))
        'w': 1 of 2 elements differ, by at most 0.5; the first at (0,): 1.0 and 1.5
    """
    shape, found = tuple(left.shape), None
    for offset, size in boxes_within(shape, max(1, most_bytes // _BYTES_PER_ELEMENT), f"compare: {key!r}"):
        part = _part_difference(key, shape, offset, _box(left, offset, size), _box(right, offset, size))
        found = part if found is None else combined(found, part)
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


def combined(found: ValueDifference, later: ValueDifference | None) -> ValueDifference:
    """Return a difference with that of later elements added."""
    if later is None:
        return found
    known = [each.largest for each in (found, later) if each.largest is not None]
    return replace(found, count=found.count + later.count, largest=max(known, default=None))


def _words(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor's elements as integers, a row each: (elements, words)."""
    # As integers: as floats, NaN wouldn't equal itself, and 0.0 would equal -0.0.
    word = _WORDS.get(tensor.dtype.itemsize, np.uint64)
    return row_major_bits(tensor).numpy().view(word).reshape(tensor.numel(), -1)


def _numbers(words: Any, dtype: torch.dtype) -> Any:
    """Return elements, given their bits, as the widest numbers of their kind; as texts if torch can't convert them."""
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


# Reading boxes of a checkpoint's tensors: small ones many at a time, if they were announced

TensorBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's key, and offset and shape of a box of it."""

_GROUP_BYTES = 4 * 1024 * 1024  # in the processor's cache, with what is done to them
_DECODED_GROUP_BYTES = 8 * _GROUP_BYTES
_REMOTE_GROUP_BYTES = 32 * _GROUP_BYTES


def is_remote(reader: BoxReader) -> bool:
    """Return whether each read is a request."""
    return can(reader.opened.checkpoint.storage).read_range is not None


def group_bytes(reader: BoxReader) -> int:
    """Return how many bytes are read together: more where each read is a request, or decodes whole chunks."""
    if is_remote(reader):
        return _REMOTE_GROUP_BYTES
    opened = reader.opened
    traits = traits_of(*sharded_backend(opened.checkpoint.fields), opened.strategies)
    return _DECODED_GROUP_BYTES if traits.cuts_chunks == "never" else _GROUP_BYTES


def _small_bytes(reader: BoxReader) -> int:
    # Larger ones gain nothing from being read together.
    return group_bytes(reader) // (8 if is_remote(reader) else 32)


_LEAST_LENT, _MOST_LENT = 1024 * 1024, 256 * 1024 * 1024  # allocators keep less by themselves; more is rare


@dataclass(slots=True, eq=False)
class BoxReader:
    """Reads boxes of a checkpoint. Planning takes longer than a small read, so small reads are planned together.

    Attributes:
        opened: the checkpoint.
        memory: for large boxes: new memory for each would cost about as much as reading it.
    """

    opened: OpenCheckpoint
    memory: HostMemory = field(default_factory=HostMemory)
    _group_of: dict[TensorBox, tuple[TensorBox, ...]] = field(default_factory=dict)
    _read_ahead: dict[TensorBox, torch.Tensor] = field(default_factory=dict)
    _newest: Any = None

    def expect(self, fetches: Iterable[Fetch]) -> None:
        """Announce boxes that will be read, and forget what was announced before; nothing is read yet."""
        self._group_of.clear()
        self._read_ahead.clear()
        most = _small_bytes(self)
        small = dict.fromkeys(fetch for fetch in fetches if fetch.nbytes <= most)
        for group in grouped(small, lambda fetch: fetch.nbytes, group_bytes(self)):
            boxes = tuple((str(fetch.name), fetch.offset, fetch.shape) for fetch in group)
            self._group_of.update(dict.fromkeys(boxes, boxes))

    def read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a box's elements, in memory that is the caller's."""
        # A box that is asked for twice is read again: nothing is kept once it was handed out.
        box = (str(key), offset, shape)
        group = self._group_of.get(box)
        if group is not None:
            for each, data in zip(group, self._read(group), strict=True):
                self._read_ahead[each] = data
                del self._group_of[each]
        found = self._read_ahead.pop(box, None)
        return self._read([box])[0] if found is None else found

    def _read(self, boxes: Sequence[TensorBox]) -> list[torch.Tensor]:
        """Return the elements of boxes, with one plan for all; each has elements and lies inside its tensor."""
        shards = [self._target(*box) for box in boxes]
        checkpoint = self.opened.checkpoint
        backend = sharded_backend(checkpoint.fields)
        unreplaced(checkpoint, strategy_of(StrategyAction.LOAD_SHARDED, None, backend, self.opened.strategies), shards)
        return [shard.data for shard in shards]

    def _target(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> ShardedTensor:
        if self._newest is None or self._newest.key != key:
            self._newest = self.opened.metadata[key]  # what is read next is mostly of the same tensor
        known = self._newest
        nbytes = prod(shape) * known.dtype.itemsize
        if _LEAST_LENT <= nbytes <= _MOST_LENT:
            data = self.memory.lend(nbytes).view(known.dtype).view(shape)
        else:
            data = new_memory(key, shape, known.dtype)
        return box_of(key, data, known.dtype, known.global_shape, offset, shape)

    def whole(self, key: str) -> LazyTensor:
        """Return a tensor whose elements are read through this."""
        known: Any = self.opened.metadata[key]
        return stored(partial(self.read, key), known.global_shape, known.dtype, name=key)
