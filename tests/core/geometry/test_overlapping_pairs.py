"""Which boxes overlap, compared with trying all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import Column, overlapping_pairs
from shardtree.core.geometry._pairs import GroupedBoxes, _candidates, _cut_into_slabs

Side = tuple[Column, Column, Column]  # group, offset, shape


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[Side, Side]:
    axes, far = draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 2**40]))
    seed, low = draw(st.integers(0, 2**16)), draw(st.integers(0, 1))
    rng = np.random.default_rng(seed)

    def side(count: int) -> Side:
        offset = rng.integers(0, 6, (count, axes)) + far * rng.integers(0, 2, (count, axes))
        return rng.integers(0, 3, count), offset, rng.integers(low, 4, (count, axes))

    return side(draw(st.integers(0, 8))), side(draw(st.integers(0, 8)))


def share_an_element(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    (group, low, size), (other_group, other_low, other_size) = left, right
    begin, end = np.maximum(low, other_low), np.minimum(low + size, other_low + other_size)
    return bool(group == other_group and (begin < end).all())


@given(two_sides())
def test_pairs_are_those_that_share_an_element_in_order(sides: tuple[Side, Side]) -> None:
    pairs = overlapping_pairs(*sides[0], *sides[1])
    assert list(zip(*(column.tolist() for column in pairs), strict=True)) == all_pairs(*sides)


@pytest.mark.parametrize("axes", [1, 2])
def test_a_hundred_thousand_chunks_meet_a_few_requests_without_all_pairs(axes: int) -> None:
    count = 100_000
    offset = np.zeros((count, axes), dtype=np.int64)
    offset[:, -1] = np.arange(count) * 4
    shape, group = np.full((count, axes), 4), np.zeros(count, dtype=np.int64)
    wanted = np.full((1, axes), 0)
    wanted[:, -1] = 8
    left, right = overlapping_pairs(group[:1], wanted, np.full((1, axes), 4), group, offset, shape)
    assert (left.tolist(), right.tolist()) == ([0], [2])


def all_pairs(left: Side, right: Side) -> list[tuple[int, int]]:
    (group, low, size), (other_group, other_low, other_size) = left, right
    begins = np.maximum(low[:, None], other_low[None])
    ends = np.minimum((low + size)[:, None], (other_low + other_size)[None])
    meets = (begins < ends).all(axis=2) & (group[:, None] == other_group[None])
    return [(int(one), int(other)) for one, other in np.argwhere(meets)]


def grid(cells: int, size: int, axes: int) -> Side:
    """Return the boxes into which a cube is cut, all of one group."""
    edges = np.linspace(0, size, cells + 1).astype(np.int64)
    low, high = (np.stack(np.meshgrid(*[at] * axes), axis=-1).reshape(-1, axes) for at in (edges[:-1], edges[1:]))
    return np.zeros(len(low), dtype=np.int64), low, high - low


def scattered(count: int, axes: int, seed: int) -> Side:
    """Return boxes of three groups, some of them long."""
    rng = np.random.default_rng(seed)
    sizes = np.where(rng.integers(0, 20, (count, axes)) > 0, rng.integers(1, 9, (count, axes)), 500)
    return rng.integers(0, 3, count), rng.integers(0, 500, (count, axes)), sizes


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (grid(30, 420, 2), grid(28, 420, 2)),
        (grid(9, 72, 3), grid(8, 72, 3)),
        (scattered(700, 2, 1), scattered(600, 2, 2)),
        (scattered(700, 3, 3), grid(8, 500, 3)),
    ],
)
def test_many_boxes_side_by_side_are_found_in_slabs(left: Side, right: Side) -> None:
    pairs = overlapping_pairs(*left, *right)
    assert list(zip(*(column.tolist() for column in pairs), strict=True)) == all_pairs(left, right)


@pytest.mark.parametrize("axes", [2, 3])
def test_boxes_side_by_side_make_few_candidates(axes: int) -> None:
    cells = {2: 200, 3: 30}[axes]
    sides = _cut_into_slabs(*(GroupedBoxes(np.arange(cells**axes), *grid(cells, 960, axes)) for _ in "ab"))
    assert len(_candidates(*sides)[0]) < 60 * cells**axes
