"""Ways to cut a box into boxes: regular grids, uneven ones, and boxes of no grid."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import strategies as st

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape
Cells = tuple[list[Box], tuple[int, ...] | None]  # the boxes, and into how many each axis is cut if that is regular


def places(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all indices of a shape, in row-major order."""
    return list(product(*map(range, shape)))


def _grid_cells(edges: list[list[int]]) -> list[Box]:
    """Return the boxes between edges along each axis."""
    cells = product(*(pairwise(axis) for axis in edges))
    return [(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in cells]


@st.composite
def regular_cells(draw: st.DrawFn, shape: tuple[int, ...]) -> Cells:
    """Return a strategy for equal cuts of each axis; it shrinks to none."""
    counts = [draw(st.sampled_from([n for n in (1, 2, 3, 4) if size % n == 0] if size else [1])) for size in shape]
    edges = [[size // n * i for i in range(n + 1)] for size, n in zip(shape, counts, strict=True)]
    return _grid_cells(edges), tuple(counts)


@st.composite
def uneven_cells(draw: st.DrawFn, shape: tuple[int, ...]) -> Cells:
    """Return a strategy for cuts of each axis anywhere; two at one place give boxes without elements."""
    cuts = [draw(st.lists(st.integers(0, size), max_size=2).map(sorted)) for size in shape]
    return _grid_cells([[0, *inner, size] for inner, size in zip(cuts, shape, strict=True)]), None


@st.composite
def irregular_cells(draw: st.DrawFn, shape: tuple[int, ...]) -> Cells:
    """Return a strategy for cuts of some box in two, several times."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        boxes.append((offset, (*size[:axis], at, *size[axis + 1 :])))
        moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        boxes.append((moved, (*size[:axis], size[axis] - at, *size[axis + 1 :])))
    return boxes, None
