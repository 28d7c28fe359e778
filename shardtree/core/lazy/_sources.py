"""Sources of lazy tensors: dense tensors that read any box of themselves, and strided views of dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from operator import add, le, mul
from typing import Any, NamedTuple, Protocol

import torch

from ...errors import ShapeError, error_text, shorten

# Strided views of dense row-major tensors, and the boxes that contain their elements.

Shape = tuple[int, ...]


class Strided(NamedTuple):
    """A strided view of a flattened tensor: the element with indices ``i`` is at ``offset + sum(i * stride)``."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Box(NamedTuple):
    """A box of indices of a tensor, [offset, offset + shape) along each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=1024)  # each read needs it, for few shapes
def dense(shape: Shape) -> Strided:
    """Return the view of a whole dense row-major tensor of this shape.

    Examples:
        >>> dense((4, 6)), dense(())
        (Strided(offset=0, size=(4, 6), stride=(6, 1)), Strided(offset=0, size=(), stride=()))
    """
    strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
    return Strided(0, tuple(shape), strides)  # not a torch.Size, which the cache would return for an equal tuple


def narrow(view: Strided, box: Box) -> Strided:
    """Return the part of a view whose indices are in a box.

    Examples:
        >>> narrow(dense((4, 6)), Box((1, 2), (2, 3)))
        Strided(offset=8, size=(2, 3), stride=(6, 1))
    """
    return Strided(view.offset + _dot(box.offset, view.stride), box.shape, view.stride)


def covering(view: Strided, shape: Shape) -> tuple[Box, Strided]:
    """Return a box of a dense tensor that contains a view's elements, and the same view as a view of that box.

    A view may cross the end of a row and continue in the next one, for example after a reshape that merged the two axes
    of a matrix. The box then has whole rows, so that the view has constant strides in the box. The same applies to
    other dimensions. Without such crossings, the box is the smallest possible.

    Args:
        view: View of at least one element.
        shape: Shape of the dense (contiguous, row-major) tensor.

    Examples:
        >>> covering(Strided(8, (3, 2), (1, 6)), (4, 6))  # rows 1 and 2, columns 2 to 4, transposed
        (Box(offset=(1, 2), shape=(2, 3)), Strided(offset=0, size=(3, 2), stride=(1, 3)))
        >>> covering(Strided(5, (2,), (1,)), (4, 6))  # the end of row 0 and the beginning of row 1
        (Box(offset=(0, 0), shape=(2, 6)), Strided(offset=5, size=(2,), stride=(1,)))
    """
    at, size, stride = view
    strides, alone = dense(shape).stride, dense(size)
    if shape and stride == strides == alone.stride and not at % strides[0]:
        # The view is some whole rows, the most frequent request.
        first = at // strides[0]
        if first + size[0] <= shape[0]:
            return Box((first, *(0,) * (len(shape) - 1)), size), alone
    start = _steps(at, strides)
    if stride == strides and all(map(le, map(add, start, size), shape)):
        return Box(start, size), alone  # most views are boxes
    steps = [_steps(step, strides) if long > 1 else (0,) * len(shape) for long, step in zip(size, stride, strict=True)]
    spans = [sum((long - 1) * step[dim] for long, step in zip(size, steps, strict=True)) for dim in _dims(shape)]
    box = _box(start, spans, shape)
    inner = dense(box.shape).stride
    first = _dot([at - low for at, low in zip(start, box.offset, strict=True)], inner)
    return box, Strided(first, size, tuple(_dot(step, inner) for step in steps))


def _box(start: Shape, spans: Sequence[int], shape: Shape) -> Box:
    """Return the box from the element `start` to the element ``start + spans``, both included.

    The last element may lie beyond the end of a dimension, since a view may continue in the next row. The box then has
    the whole dimension, and the excess is carried over to the dimension before, as in addition.
    """
    carry = 0
    ranges: list[tuple[int, int]] = []
    for dim in reversed(_dims(shape)):
        last = start[dim] + spans[dim] + carry
        carry = last // shape[dim]
        ranges.append((0, shape[dim]) if carry else (start[dim], last + 1 - start[dim]))
    return Box(tuple(low for low, _ in reversed(ranges)), tuple(length for _, length in reversed(ranges)))


def _steps(flat: int, strides: Shape) -> Shape:
    """Return the distances along the dimensions that make up a distance in the flattened tensor."""
    steps = []
    for stride in strides:
        step, flat = divmod(flat, stride)
        steps.append(step)
    return tuple(steps)


def _dims(shape: Shape) -> range:
    return range(len(shape))


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(map(mul, left, right))


# Dense tensors that read any box of themselves.

ReadBox = Callable[[Shape, Shape], torch.Tensor]


class Fetch(NamedTuple):
    """A box of a stored tensor that a read fetches: the tensor's name and dtype, and the box's offset and shape."""

    name: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the box's elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """A dense row-major tensor that can read any box of its elements. Lazy tensors are sources too."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements as a new tensor that the caller owns. The box must have elements and lie inside."""
        ...

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield the boxes that reading this box would fetch from storage, in the order of the reads."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor in storage; its `reader` is a function from a box's offset and shape to a new tensor."""

    reader: ReadBox
    shape: Shape
    dtype: torch.dtype
    name: str

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        # Formats and users write readers: a wrong box would otherwise be copied into tensors silently.
        box = self.reader(offset, shape)
        if box.shape != shape or box.dtype is not self.dtype:
            heading = f"read: the storage returned a wrong shape or dtype for the box at {offset} of {self.name!r}"
            raise ShapeError(
                error_text(heading, found=_kind(tuple(box.shape), box.dtype), expected=_kind(shape, self.dtype))
            )
        return box

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        yield Fetch(self.name, self.dtype, offset, shape)

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.name,)


Recipe = tuple[Iterable[tuple[Source, Box]], Callable[[Iterator[torch.Tensor]], torch.Tensor]]
"""Boxes of sources in the order of their reads, and the function that computes a box from their elements."""
Identify = Callable[[], tuple[Any, ...] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Boxwise:
    """A tensor whose boxes are computed from boxes of other tensors.

    Attributes:
        name: Name for errors and ``repr``.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        recipe: Function from a box to ``(needs, make)``. `needs` are boxes of other tensors. `make` computes the box
            as a new tensor that the caller owns; its argument is an iterator over the elements of `needs`, which reads
            the next of these boxes at each step.
        identify: Function that returns a description of the computation: its operation, and the tensors that it reads.
            It returns None if the operation is a caller's function.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    recipe: Callable[[Box], Recipe]
    identify: Identify

    @property
    def made_of(self) -> tuple[Any, ...] | None:
        return self.identify()

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        needs, make = self.recipe(Box(offset, shape))
        return make(source.read_box(*box) for source, box in needs)

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        needs, _ = self.recipe(Box(offset, shape))
        return chain.from_iterable(source.box_fetches(*box) for source, box in needs)


@dataclass(frozen=True, slots=True, eq=False)
class Concatenated:
    """A concatenation of tensors of one dtype along a dimension."""

    parts: tuple[Source, ...]
    dim: int
    shape: Shape
    dtype: torch.dtype

    @property
    def made_of(self) -> tuple[Any, ...]:
        return "cat", self.dim, *self.parts

    @property
    def name(self) -> str:
        return f"cat({', '.join(shorten((part.name for part in self.parts), shown=2))})"

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        pieces = list(self._pieces(Box(offset, shape)))
        if len(pieces) == 1:
            part, box, _ = pieces[0]
            return part.read_box(*box)
        # Pieces are read into the result one by one: a `cat` would hold all pieces beside it.
        whole = torch.empty(shape, dtype=self.dtype, device="cpu")
        for part, box, at in pieces:
            whole.narrow(self.dim, at, box.shape[self.dim]).copy_(part.read_box(*box))
        return whole

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        for part, box, _ in self._pieces(Box(offset, shape)):
            yield from part.box_fetches(*box)

    def _pieces(self, box: Box) -> Iterator[tuple[Source, Box, int]]:
        """Yield each part that a box overlaps, the overlap as a box of the part, and its begin in `box` along `dim`."""
        low, high = box.offset[self.dim], box.offset[self.dim] + box.shape[self.dim]
        ends = accumulate(part.shape[self.dim] for part in self.parts)
        for part, end in zip(self.parts, ends, strict=True):
            begin = end - part.shape[self.dim]
            first, last = max(low, begin), min(high, end)
            if first < last:
                offset = _with(box.offset, self.dim, first - begin)
                yield part, Box(offset, _with(box.shape, self.dim, last - first)), first - low


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _kind(shape: Shape, dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"
