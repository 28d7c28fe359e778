"""How tensors are cut, as their chunks tell it, compared with the layouts that the chunks come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import box_column
from shardtree.core.layouts import Grid, chunk_grids
from shardtree.layouts import join_columns, shard_columns
from shardtree.testing import Layout, cut, layouts, shapes
from tests.core.trees.samples import assert_caught

SHAPES = shapes(max_axes=3, sizes=(1, 2, 3, 4))
LAYOUTS = st.tuples(SHAPES, st.integers(1, 4)).flatmap(lambda args: layouts(*args))
Box = tuple[Sequence[int], Sequence[int], int]  # offset, shape, start of a flat range
Describe = Callable[..., list[Grid]]


def grids_of(tensors: Sequence[Sequence[Box]], describe: Describe = chunk_grids) -> list[Grid]:
    """Return how tensors are cut that consist of these boxes."""
    boxes = [box for tensor in tensors for box in tensor]
    axes = max(len(offset) for offset, _, _ in boxes)
    return describe(
        np.repeat(np.arange(len(tensors)), [len(tensor) for tensor in tensors]),
        box_column([offset for offset, _, _ in boxes], 0, axes),
        box_column([shape for _, shape, _ in boxes], 1, axes),
        np.array([start for _, _, start in boxes]),
        np.array([len(tensor[0][0]) if tensor else 0 for tensor in tensors]),
    )


def stored(layout: Layout) -> list[Box]:
    """Return the boxes that a save stores of a layout: each once."""
    whole = torch.zeros(layout.global_shape, dtype=torch.int8)
    columns = join_columns([shard_columns(cut(layout, "w", whole, rank), rank) for rank in range(layout.ranks)])
    rows = zip(
        *(column[columns.main].tolist() for column in (columns.offset, columns.shape, columns.start)), strict=True
    )
    axes = len(layout.global_shape)
    return [(offset[len(offset) - axes :], shape[len(shape) - axes :], start) for offset, shape, start in rows]


def by_counting(boxes: Sequence[Box], axes: int) -> Grid:
    """Return how one tensor is cut, by asking every box."""
    if any(start >= 0 for _, _, start in boxes):
        return Grid("flat", (), len(boxes))
    along = [{(offset[axis], shape[axis]) for offset, shape, _ in boxes} for axis in range(axes)]
    counts = tuple(map(len, along))
    if len(boxes) == 1:
        return Grid("whole", counts, 1)
    if np.prod(counts) != len(boxes):
        return Grid("irregular", (), len(boxes))
    equal = len({tuple(shape) for _, shape, _ in boxes}) == 1
    return Grid("regular" if equal else "uneven", counts, len(boxes))


def check_grids(describe: Describe, several: Sequence[Layout]) -> None:
    tensors = [stored(layout) for layout in several]
    found = grids_of(tensors, describe)
    pairs = zip(tensors, several, strict=True)
    assert found == [by_counting(boxes, len(layout.global_shape)) for boxes, layout in pairs]


@given(st.lists(LAYOUTS, min_size=1, max_size=4))
def test_grids_are_what_counting_finds(several: list[Layout]) -> None:
    check_grids(chunk_grids, several)


def test_lost_boundaries_between_tensors_are_caught() -> None:
    def broken(key: np.ndarray, *rest: np.ndarray) -> list[Grid]:
        return chunk_grids(np.maximum(key - 1, 0), *rest)

    assert_caught(check_grids, broken, st.lists(LAYOUTS, min_size=1, max_size=4))


def test_a_tensor_without_chunks_is_empty() -> None:
    assert grids_of([[], [((0,), (1,), -1)], []])[::2] == [Grid("empty", (), 0)] * 2
