"""Which groups of boxes tile what is around them, compared with counting how often each element is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardtree.core.geometry import Column, group_sums, tiled_groups, volumes
from tests.core.trees.samples import assert_caught

Boxes = tuple[Column, Column, Column, int]
Find = Callable[[Column, Column, Column, int], Any]


def halved(draw: st.DrawFn, offset: list[int], shape: list[int], times: int) -> list[tuple[list[int], list[int]]]:
    """Return boxes that tile one, which is cut in two again and again."""
    axis = draw(st.integers(0, len(shape) - 1))
    if not times or shape[axis] < 2:
        return [(offset, shape)]
    size, found = draw(st.integers(1, shape[axis] - 1)), []
    for begin, length in ((0, size), (size, shape[axis] - size)):
        place, part = list(offset), list(shape)
        place[axis] += begin
        part[axis] = length
        found += halved(draw, place, part, times - 1)
    return found


@st.composite
def grouped_boxes(draw: st.DrawFn) -> Boxes:
    """Return boxes of up to three groups: some tile, and of some a box was lost, doubled, moved or made larger."""
    axes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 3), min_size=axes, max_size=axes)
    far = draw(st.sampled_from([0, 2**40]))
    rows: list[tuple[int, list[int], list[int]]] = []
    for number in range(groups):
        size = draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes))
        boxes = halved(draw, [far + at for at in draw(numbers)], size, draw(st.integers(0, 3)))
        change = draw(st.sampled_from(["none", "none", "lose", "double", "move", "grow"]))
        place, part = boxes.pop() if change != "none" else ([], [])
        if change == "double":
            boxes += [(place, part)] * 2
        if change == "move":
            boxes.append(([one + more for one, more in zip(place, draw(numbers), strict=True)], part))
        if change == "grow":
            boxes.append((place, [one + more for one, more in zip(part, draw(numbers), strict=True)]))
        rows += [(number, *box) for box in boxes]
    rows = draw(st.permutations(rows))
    group = np.array([row[0] for row in rows], dtype=np.int64)
    offset = np.array([row[1] for row in rows], dtype=np.int64).reshape(-1, axes)
    shape = np.array([row[2] for row in rows], dtype=np.int64).reshape(-1, axes)
    return group, offset, shape, groups


def counted(group: Column, offset: Column, shape: Column, groups: int) -> list[bool]:
    """Return which groups have each element around them exactly once, by counting."""
    tiled = []
    for number in range(groups):
        low, size = offset[group == number], shape[group == number]
        if not len(low):
            tiled.append(True)
            continue
        held = np.zeros((low + size).max(axis=0) - low.min(axis=0), dtype=np.int64)
        for begin, length in zip(low - low.min(axis=0), size, strict=True):
            held[tuple(slice(at, at + count) for at, count in zip(begin, length, strict=True))] += 1
        tiled.append(bool((held == 1).all()))
    return tiled


def finds_what_tiles(find: Find, boxes: Boxes) -> None:
    assert find(*boxes).tolist() == counted(*boxes)


@given(grouped_boxes())
@example((np.zeros(3, np.int64), np.array([[0], [0], [3]]), np.array([[2], [1], [1]]), 1))
@example((np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64), 2))
def test_a_group_is_tiled_if_each_element_around_it_is_held_once(boxes: Boxes) -> None:
    finds_what_tiles(tiled_groups, boxes)


def by_volume(group: Column, offset: Column, shape: Column, groups: int) -> Any:
    """Compare numbers of elements alone: a gap and an overlap of one size make up for each other."""
    around = np.zeros(groups, dtype=np.int64)
    for number in np.unique(group).tolist():
        own = group == number
        around[number] = np.prod((offset + shape)[own].max(axis=0) - offset[own].min(axis=0))
    return group_sums(group, volumes(shape), groups) == around


def without_the_axis(group: Column, offset: Column, shape: Column, groups: int) -> Any:
    """Look along the first axis alone."""
    return tiled_groups(group, offset[:, :1], shape[:, :1], groups)


MADE_UP = (np.zeros(3, np.int64), np.array([[0], [0], [3]]), np.array([[2], [1], [1]]), 1)
"""Element 0 is held twice, and element 2 not at all."""


@pytest.mark.parametrize(
    ("fault", "boxes"), [(by_volume, st.just(MADE_UP)), (without_the_axis, grouped_boxes())], ids=["volume", "axis"]
)
def test_the_law_catches(fault: Find, boxes: st.SearchStrategy[Boxes]) -> None:
    assert_caught(finds_what_tiles, fault, boxes)


@pytest.mark.slow
def test_many_equal_boxes_do_not_tile_one() -> None:
    """Sums of 2**20 equal numbers modulo 2**64 have twenty bits less to tell them apart; that is enough."""
    count = 2**20
    group, box = np.zeros(count + 1, dtype=np.int64), np.ones((count + 1, 2), dtype=np.int64)
    assert tiled_groups(group[:count], box[:count], box[:count], 1).tolist() == [False]
    assert tiled_groups(group, box, box, 1).tolist() == [False]


@pytest.mark.parametrize("axes", [7, 64, 128])
def test_axes_without_number_do_not_make_anything_tile(axes: int) -> None:
    """With a weight for each, half of which are even, the products of so many would all be zero."""
    group, offset, shape, groups = MADE_UP
    more = np.zeros((len(group), axes - 1), dtype=np.int64)
    flat = np.column_stack([more, offset]), np.column_stack([more + 1, shape])
    assert tiled_groups(group, *flat, groups).tolist() == [False]
    assert tiled_groups(group[:1], flat[0][:1], flat[1][:1], groups).tolist() == [True]
    halves = np.zeros((2, axes), dtype=np.int64), np.ones((2, axes), dtype=np.int64)
    halves[0][1] = 1
    assert tiled_groups(group[:2], *halves, groups).tolist() == [False]
