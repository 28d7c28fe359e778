"""Layouts of every kind: regular, uneven and irregular grids, prepended axes, flat ranges, replicas, idle ranks."""

from __future__ import annotations

import math
from itertools import pairwise, product

from hypothesis import strategies as st

from ..mapping import ReplicaId
from ._layout import Layout, Piece

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape
_MOST_PREPENDED = 12


@st.composite
def layouts(draw: st.DrawFn, global_shape: tuple[int, ...], ranks: int) -> Layout:
    """Return a strategy for layouts of a tensor over ranks; it shrinks to one whole box on rank 0.

    Args:
        draw: Hypothesis's own.
        global_shape: the tensor's.
        ranks: how many there are; some may hold nothing.

    Examples:
        >>> from hypothesis import find
        >>> find(layouts((4,), 2), lambda layout: layout.grid == (2,)).pieces[1].offset
        (2,)
    """
    prepended = draw(st.integers(0, _prependable(global_shape)))
    front, rest = global_shape[:prepended], global_shape[prepended:]
    cells, grid = draw(st.one_of(_regular(rest), _uneven(rest), _irregular(rest)))
    boxes = [((*place, *offset), (*(1,) * prepended, *shape)) for place in _places(front) for offset, shape in cells]
    ranges = [(box, flat) for box in boxes for flat in draw(_flat_ranges(math.prod(box[1])))]
    holders = draw(_holders(len(ranges), ranks))
    pieces = [
        Piece(rank, *box, flat, replica)
        for (box, flat), held in zip(ranges, holders, strict=True)
        for rank, replica in held
    ]
    return Layout(ranks, global_shape, tuple(pieces), prepended, None if grid is None else (*front, *grid))


def even_layout(global_shape: tuple[int, ...], ranks: int, axis: int | None = None) -> Layout:
    """Return the layout that cuts one axis into a piece for each rank, or replicates the tensor on all of them.

    Args:
        global_shape: the tensor's.
        ranks: how many there are; they must divide the axis.
        axis: which one is cut; None for replicas.

    Examples:
        >>> [piece.offset for piece in even_layout((4, 6), 2, axis=1).pieces]
        [(0, 0), (0, 3)]
    """
    zeros, grid = (0,) * len(global_shape), [1] * len(global_shape)
    if axis is None:
        copies = tuple(Piece(rank, zeros, global_shape, replica=rank) for rank in range(ranks))
        return Layout(ranks, global_shape, copies, grid=tuple(grid))
    size, left = divmod(global_shape[axis], ranks)
    assert not left, f"{ranks} ranks don't divide axis {axis} of {global_shape}"
    shape = (*global_shape[:axis], size, *global_shape[axis + 1 :])
    grid[axis] = ranks
    offsets = [(*zeros[:axis], rank * size, *zeros[axis + 1 :]) for rank in range(ranks)]
    return Layout(ranks, global_shape, tuple(Piece(r, at, shape) for r, at in enumerate(offsets)), grid=tuple(grid))


def _prependable(shape: tuple[int, ...]) -> int:
    """Return how many leading axes may be prepended ones: each of their places takes a shard of its own."""
    most = 0
    while most < len(shape) and 0 < math.prod(shape[: most + 1]) <= _MOST_PREPENDED:
        most += 1
    return most


def _places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, shape)))


def _grid_cells(edges: list[list[int]]) -> list[_Box]:
    """Return the boxes between edges along each axis."""
    cells = product(*(pairwise(axis) for axis in edges))
    return [(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in cells]


@st.composite
def _regular(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[_Box], tuple[int, ...] | None]:
    counts = [draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0] if size else [1])) for size in shape]
    edges = [[size // n * i for i in range(n + 1)] for size, n in zip(shape, counts, strict=True)]
    return _grid_cells(edges), tuple(counts)


@st.composite
def _uneven(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[_Box], tuple[int, ...] | None]:
    """Cut each axis anywhere, the same for all; twice at one place gives shards without elements."""
    cuts = [draw(st.lists(st.integers(0, size), max_size=2).map(sorted)) for size in shape]
    return _grid_cells([[0, *inner, size] for inner, size in zip(cuts, shape, strict=True)]), None


@st.composite
def _irregular(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[_Box], tuple[int, ...] | None]:
    """Cut some box in two, several times."""
    boxes: list[_Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        boxes.append((offset, (*size[:axis], at, *size[axis + 1 :])))
        moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        boxes.append((moved, (*size[:axis], size[axis] - at, *size[axis + 1 :])))
    return boxes, None


def _flat_ranges(volume: int) -> st.SearchStrategy[list[tuple[int, int] | None]]:
    whole: st.SearchStrategy[list[tuple[int, int] | None]] = st.just([None])
    cuts = st.lists(st.integers(0, volume), max_size=2).map(sorted)
    return whole | whole | cuts.map(lambda inner: list(pairwise([0, *inner, volume])))


@st.composite
def _holders(draw: st.DrawFn, pieces: int, ranks: int) -> list[list[tuple[int, ReplicaId]]]:
    """Return, for each piece, who holds it as which replica; the main one isn't always the lowest rank."""
    mains = draw(st.lists(st.integers(0, ranks - 1), min_size=pieces, max_size=pieces))
    copies, stride = draw(st.integers(1, min(ranks, 3))), draw(st.sampled_from([1, ranks - 1]))
    as_tuple = draw(st.booleans())
    return [[((main + n * stride) % ranks, (0, n) if as_tuple else n) for n in range(copies)] for main in mains]
