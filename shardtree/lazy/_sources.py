"""What lazy tensors are views of: dense tensors that read any box of themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from shardtree.errors import ShapeError, error_text, shorten

from ._region import Box, Shape

ReadBox = Callable[[Shape, Shape], torch.Tensor]


class Fetch(NamedTuple):
    """One box of one stored tensor that a read asks its storage for."""

    name: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The length in bytes of the box's elements."""
        return prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Source(Protocol):
    """A dense row-major tensor that reads any box of itself. A lazy tensor is one too."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns. The box has elements and lies inside."""
        ...

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would ask storage for, in that order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor in storage, read by a function from (offset, shape) to a new tensor."""

    reader: ReadBox
    shape: Shape
    dtype: torch.dtype
    name: str

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        box = self.reader(offset, shape)
        if (tuple(box.shape), box.dtype) != (shape, self.dtype):
            what = f"read: storage gave something else than the box at {offset} of {self.name!r}"
            raise ShapeError(
                error_text(what, found=_kind(tuple(box.shape), box.dtype), expected=_kind(shape, self.dtype))
            )
        return box

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        yield Fetch(self.name, self.dtype, offset, shape)

    @property
    def made_of(self) -> tuple[Any, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
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
        whole = torch.empty(shape, dtype=self.dtype)
        for part, box, at in pieces:
            whole.narrow(self.dim, at, box.shape[self.dim]).copy_(part.read_box(*box))
        return whole

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        for part, box, _ in self._pieces(Box(offset, shape)):
            yield from part.box_fetches(*box)

    def _pieces(self, box: Box) -> Iterator[tuple[Source, Box, int]]:
        """Yield each part that a box meets, the box in it, and where along the dimension that goes in the result."""
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
