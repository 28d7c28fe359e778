"""`Layout` and `Piece`: which rank holds which pieces of a global tensor, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..mapping import ReplicaId, ShardedTensor
from ._bits import carried

# Printing by Hypothesis and IPython: by a value's own repr, which is much shorter than all of a dataclass's fields.


def pretty_repr(value: Any, printer: Any, cycle: bool) -> None:
    """Print a value's repr; for use as a class's ``_repr_pretty_``, which Hypothesis prefers to printing fields.

    Examples:
        >>> from hypothesis.vendor.pretty import pretty
        >>> from shardtree.testing import Piece
        >>> pretty(Piece(0, (2,), (3,)))
        'Piece(0, (2,), (3,))'
    """
    printer.text(repr(value))


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, or a flat range of it, held by one rank.

    Attributes:
        rank: that holds it.
        offset: the box's first index, prepended axes included.
        shape: the box's, 1 along prepended axes.
        flat: (start, stop) in the flattened box; None for the whole box.
        replica: 0, or zeros, for the main replica.
    """

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None
    replica: ReplicaId = 0

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the call that makes it, without defaults: failing examples contain many of them."""
        named = [("flat", self.flat, None), ("replica", self.replica, 0)]
        rest = "".join(f", {name}={value!r}" for name, value, default in named if value != default)
        return f"Piece({self.rank}, {self.offset}, {self.shape}{rest})"


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces of a global tensor on all ranks.

    Attributes:
        ranks: the number of ranks, including those without pieces.
        global_shape: of the tensor.
        pieces: of all ranks; main replicas tile the tensor.
        prepended: how many leading axes the local tensors lack.
        grid: how many equal pieces each axis is cut into; None if irregular.
    """

    ranks: int
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    prepended: int = 0
    grid: tuple[int, ...] | None = None

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the call that makes it, without defaults."""
        named = [("prepended", self.prepended, 0), ("grid", self.grid, None)]
        rest = "".join(f", {name}={value!r}" for name, value, default in named if value != default)
        return f"Layout(ranks={self.ranks}, global_shape={self.global_shape}, pieces={self.pieces}{rest})"


def cut(layout: Layout, key: str, whole: torch.Tensor, rank: int) -> list[ShardedTensor]:
    """Return a rank's shards of a global tensor; boxes are views of it.

    Args:
        layout: of a tensor of that shape.
        key: the tensor's name.
        whole: the global tensor.
        rank: the rank.

    Examples:
        >>> halves = Layout(2, (4,), (Piece(0, (0,), (2,)), Piece(1, (2,), (2,), flat=(1, 2))))
        >>> [shard.data for rank in (0, 1) for shard in cut(halves, "w", torch.arange(4), rank)]
        [tensor([0, 1]), tensor([3])]
    """
    return [_shard(layout, key, whole, piece) for piece in layout.pieces if piece.rank == rank]


def _shard(layout: Layout, key: str, whole: torch.Tensor, piece: Piece) -> ShardedTensor:
    box = whole
    for axis, (start, size) in enumerate(zip(piece.offset, piece.shape, strict=True)):
        box = box.narrow(axis, start, size)
    for _ in range(layout.prepended):
        box = box.select(0, 0)
    data = box if piece.flat is None else flattened(box)[slice(*piece.flat)]
    return ShardedTensor(
        key,
        data,
        whole.dtype,
        piece.shape[layout.prepended :],
        layout.global_shape,
        piece.offset,
        layout.grid,
        piece.replica,
        layout.prepended,
        flattened_range=None if piece.flat is None else slice(*piece.flat),
    )


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in row-major order, with one axis."""
    # By way of integers, since torch can't copy every dtype.
    return carried(tensor).contiguous().view(math.prod(tensor.shape)).view(tensor.dtype)
