"""`Layout` and `Piece`: which rank holds which pieces of a global tensor, as plain data; and strategies for them.

The strategies draw regular, uneven and irregular grids, prepended axes, flat ranges, replicas and idle ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..core.mapping import ReplicaId, ShardedTensor
from ._bits import carried

# Hypothesis and IPython print these classes by their repr, which is much shorter than all fields of a dataclass.


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
        rank: Rank that holds the piece.
        offset: Offset of the box, prepended axes included.
        shape: Shape of the box; 1 along prepended axes.
        flat: Range (start, stop) of the flattened box; None for the whole box.
        replica: Replica number, as in `ShardedTensor`; 0, or only zeros, for the main replica.
    """

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None
    replica: ReplicaId = 0

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the call that builds the piece, without defaults, since failing examples contain many pieces."""
        options = [("flat", self.flat, None), ("replica", self.replica, 0)]
        keywords = "".join(f", {name}={value!r}" for name, value, default in options if value != default)
        return f"Piece({self.rank}, {self.offset}, {self.shape}{keywords})"


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces of a global tensor on all ranks.

    Attributes:
        ranks: Number of ranks, including those without pieces.
        global_shape: Shape of the global tensor.
        pieces: Pieces of all ranks; their main replicas tile the tensor.
        prepended: Number of leading axes that the local tensors lack.
        grid: Number of equal pieces along each axis; None for an irregular layout.
    """

    ranks: int
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    prepended: int = 0
    grid: tuple[int, ...] | None = None

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the call that builds the layout, without defaults."""
        options = [("prepended", self.prepended, 0), ("grid", self.grid, None)]
        keywords = "".join(f", {name}={value!r}" for name, value, default in options if value != default)
        return f"Layout(ranks={self.ranks}, global_shape={self.global_shape}, pieces={self.pieces}{keywords})"


def cut(layout: Layout, key: str, whole: torch.Tensor, rank: int) -> list[ShardedTensor]:
    """Return a rank's shards of a global tensor; those that are whole boxes are views of it.

    Args:
        layout: Layout of a tensor with the shape of `whole`.
        key: Name of the tensor.
        whole: The global tensor.
        rank: Index of the rank.

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
    # Elements are copied as integers, since torch can't copy every dtype.
    return carried(tensor).contiguous().view(math.prod(tensor.shape)).view(tensor.dtype)


# Strategies


# Cutting a box into boxes: regular grids, uneven grids, and boxes without a grid.

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape
Cells = tuple[list[Box], tuple[int, ...] | None]  # boxes; for a regular grid also the number of parts of each axis


def places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all indices of a shape, in row-major order."""
    return list(product(*map(range, shape)))


def _grid_cells(edges: list[list[int]]) -> list[Box]:
    """Return the boxes of a grid; `edges` are the boundaries of its cells along each axis, with both ends."""
    cells = product(*(pairwise(axis) for axis in edges))
    return [(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in cells]


@st.composite
def regular_cells(draw: st.DrawFn, shape: tuple[int, ...]) -> Cells:
    """Return a strategy for equal cuts of each axis; its simplest example is one uncut box."""
    counts = [draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0] if size else [1])) for size in shape]
    edges = [[size // n * i for i in range(n + 1)] for size, n in zip(shape, counts, strict=True)]
    return _grid_cells(edges), tuple(counts)


@st.composite
def uneven_cells(draw: st.DrawFn, shape: tuple[int, ...]) -> Cells:
    """Return a strategy for cuts of each axis anywhere; two cuts at the same index give boxes without elements."""
    cuts = [draw(st.lists(st.integers(0, size), max_size=2).map(sorted)) for size in shape]
    return _grid_cells([[0, *inner, size] for inner, size in zip(cuts, shape, strict=True)]), None


@st.composite
def irregular_cells(draw: st.DrawFn, shape: tuple[int, ...]) -> Cells:
    """Return a strategy for boxes that need not form a grid: any box may be cut in two, up to five times in all."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        boxes.append((offset, (*size[:axis], at, *size[axis + 1 :])))
        second = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        boxes.append((second, (*size[:axis], size[axis] - at, *size[axis + 1 :])))
    return boxes, None


_MOST_PREPENDED = 12


@st.composite
def layouts(draw: st.DrawFn, global_shape: tuple[int, ...], ranks: int, *, prepended: int | None = None) -> Layout:
    """Return a strategy for layouts of every kind; it shrinks to one whole box on rank 0.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        global_shape: Shape of the global tensor.
        ranks: Number of ranks; some may hold nothing.
        prepended: Number of prepended leading axes; any number by default.

    Examples:
        >>> from hypothesis import find
        >>> find(layouts((4,), 2), lambda layout: layout.grid == (2,)).pieces[1].offset
        (2,)
    """
    if prepended is None:
        prepended = draw(st.integers(0, prependable(global_shape, _MOST_PREPENDED)))
    front, local = global_shape[:prepended], global_shape[prepended:]
    cells, grid = draw(st.one_of(regular_cells(local), uneven_cells(local), irregular_cells(local)))
    boxes = [((*place, *offset), (*(1,) * prepended, *shape)) for place in places(front) for offset, shape in cells]
    ranges = [(box, flat) for box in boxes for flat in draw(_flat_ranges(math.prod(box[1])))]
    holders = draw(_holders(len(ranges), ranks))
    pieces = [
        Piece(rank, *box, flat, replica)
        for (box, flat), copies in zip(ranges, holders, strict=True)
        for rank, replica in copies
    ]
    return Layout(ranks, global_shape, tuple(pieces), prepended, None if grid is None else (*front, *grid))


def regular_layouts(global_shape: tuple[int, ...], ranks: int) -> SearchStrategy[Layout]:
    """Return a strategy for layouts of equal boxes in a grid, without replicas; it shrinks to one box on rank 0.

    Examples:
        >>> from hypothesis import find
        >>> find(regular_layouts((4, 6), 2), lambda layout: layout.grid == (2, 1))
        Layout(ranks=2, global_shape=(4, 6), pieces=(Piece(0, (0, 0), (2, 6)), Piece(0, (2, 0), (2, 6))), grid=(2, 1))
    """
    return _layouts_of_cells(regular_cells(global_shape), global_shape, ranks)


def irregular_layouts(global_shape: tuple[int, ...], ranks: int) -> SearchStrategy[Layout]:
    """Return a strategy for layouts that aren't a regular grid: uneven cuts, boxes cut in two, empty boxes.

    Examples:
        >>> from hypothesis import find
        >>> find(irregular_layouts((4,), 1), lambda layout: len(layout.pieces) == 2).pieces
        (Piece(0, (0,), (0,)), Piece(0, (0,), (4,)))
    """
    return _layouts_of_cells(uneven_cells(global_shape) | irregular_cells(global_shape), global_shape, ranks)


@st.composite
def flat_layouts(draw: st.DrawFn, global_shape: tuple[int, ...], ranks: int) -> Layout:
    """Return a strategy for layouts of flat ranges of equal boxes, as with ZeRO; ranges may be empty.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        global_shape: Shape of the global tensor.
        ranks: Number of ranks.

    Examples:
        >>> from hypothesis import find
        >>> find(flat_layouts((4,), 1), lambda layout: [0 < piece.flat[1] < 4 for piece in layout.pieces][0]).pieces
        (Piece(0, (0,), (4,), flat=(0, 1)), Piece(0, (0,), (4,), flat=(1, 4)))
    """
    boxes = draw(regular_layouts(global_shape, ranks))
    pieces = []
    for piece in boxes.pieces:
        volume = math.prod(piece.shape)
        inner = draw(st.lists(st.integers(0, volume), max_size=3).map(sorted))
        for flat in pairwise([0, *inner, volume]):
            pieces.append(replace(piece, rank=draw(st.integers(0, ranks - 1)), flat=flat))
    return replace(boxes, pieces=tuple(pieces))


@st.composite
def replicas(draw: st.DrawFn, layout: Layout) -> Layout:
    """Return a strategy for layouts with added replicas of pieces on other ranks; it shrinks to no replicas.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        layout: Layout without replicas.

    Examples:
        >>> from hypothesis import find
        >>> find(replicas(even_layout((4,), 2, 0)), lambda layout: len(layout.pieces) == 3).pieces
        (Piece(0, (0,), (2,)), Piece(1, (2,), (2,)), Piece(0, (2,), (2,), replica=1))
    """
    copies = []
    for piece in layout.pieces:
        others = [rank for rank in range(layout.ranks) if rank != piece.rank]
        more = draw(st.lists(st.sampled_from(others), max_size=3, unique=True)) if others else []
        copies += [replace(piece, rank=rank, replica=number) for number, rank in enumerate(more, 1)]
    return replace(layout, pieces=(*layout.pieces, *copies))


@st.composite
def _layouts_of_cells(
    draw: st.DrawFn, cells: SearchStrategy[Cells], global_shape: tuple[int, ...], ranks: int
) -> Layout:
    boxes, grid = draw(cells)
    pieces = (Piece(draw(st.integers(0, ranks - 1)), *box) for box in boxes)
    return Layout(ranks, global_shape, tuple(pieces), grid=grid)


def even_layout(global_shape: tuple[int, ...], ranks: int, axis: int | None = None) -> Layout:
    """Return the layout that cuts one axis into a piece for each rank, or replicates the tensor on all ranks.

    Args:
        global_shape: Shape of the global tensor.
        ranks: Number of ranks; must divide the length of the axis.
        axis: Axis that is cut; None for replicas on all ranks.

    Examples:
        >>> [piece.offset for piece in even_layout((4, 6), 2, axis=1).pieces]
        [(0, 0), (0, 3)]
    """
    zeros, grid = (0,) * len(global_shape), [1] * len(global_shape)
    if axis is None:
        copies = tuple(Piece(rank, zeros, global_shape, replica=rank) for rank in range(ranks))
        return Layout(ranks, global_shape, copies, grid=tuple(grid))
    size, remainder = divmod(global_shape[axis], ranks)
    assert not remainder, f"{ranks} ranks do not divide axis {axis} of {global_shape}"
    shape = (*global_shape[:axis], size, *global_shape[axis + 1 :])
    grid[axis] = ranks
    offsets = [(*zeros[:axis], rank * size, *zeros[axis + 1 :]) for rank in range(ranks)]
    return Layout(ranks, global_shape, tuple(Piece(r, at, shape) for r, at in enumerate(offsets)), grid=tuple(grid))


def prependable(shape: tuple[int, ...], most: int) -> int:
    """Return the largest number of leading axes that can be prepended if a tensor has at most `most` shards.

    A tensor with prepended axes needs a shard for each index along them.
    """
    return next((axes for axes in range(len(shape), 0, -1) if 0 < math.prod(shape[:axes]) <= most), 0)


def _flat_ranges(volume: int) -> SearchStrategy[list[tuple[int, int] | None]]:
    # Whole boxes twice, so that they are drawn about two times in three: they are the common kind.
    whole: SearchStrategy[list[tuple[int, int] | None]] = st.just([None])
    cuts = st.lists(st.integers(0, volume), max_size=2).map(sorted)
    return whole | whole | cuts.map(lambda inner: list(pairwise([0, *inner, volume])))


@st.composite
def _holders(draw: st.DrawFn, pieces: int, ranks: int) -> list[list[tuple[int, ReplicaId]]]:
    """Return a strategy for the ranks that hold pieces: for each piece, a list of (rank, replica number) pairs.

    Args:
        draw: Draw function that Hypothesis's `composite` passes. Callers omit it, and get a strategy.
        pieces: Number of pieces.
        ranks: Number of ranks.
    """
    # The main replica isn't always on the lowest rank, so that code which assumes that fails.
    mains = draw(st.lists(st.integers(0, ranks - 1), min_size=pieces, max_size=pieces))
    copies, stride = draw(st.integers(1, min(ranks, 3))), draw(st.sampled_from([1, ranks - 1]))
    as_tuple = draw(st.booleans())
    return [[((main + n * stride) % ranks, (0, n) if as_tuple else n) for n in range(copies)] for main in mains]
