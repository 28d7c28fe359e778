"""Lazy tensors that are made box by box of others: weights of their parts, and parts of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..core.lazy import Box, Fetch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Boxwise:
    """A source of lazy tensors, any box of which is made of boxes of others.

    Attributes:
        name: for errors and ``repr``.
        shape: of the tensor.
        dtype: of the tensor.
        lazies: what it is made of.
        needs: from a box of it to the boxes of these.
        make: from their elements, and the box, to its elements.
        identity: what tells it from others of the same lazy tensors; None for a caller's functions, which have none.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    lazies: tuple[Any, ...]
    needs: Callable[[Box], Sequence[Box]]
    make: Callable[[Sequence[torch.Tensor], Box], torch.Tensor]
    identity: str | None

    @property
    def made_of(self) -> tuple[Any, ...] | None:
        """What identifies it."""
        return None if self.identity is None else (self.identity, *self.lazies)

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns."""
        box = Box(offset, shape)
        pairs = zip(self.lazies, self.needs(box), strict=True)
        return self.make([lazy.read_box(*own) for lazy, own in pairs], box)

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would fetch from storage, in that order."""
        pairs = zip(self.lazies, self.needs(Box(offset, shape)), strict=True)
        return chain.from_iterable(lazy.box_fetches(*own) for lazy, own in pairs)
