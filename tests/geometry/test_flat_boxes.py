"""Flat ranges taken apart into boxes, compared with walking over every element."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardtree.geometry import Column, flat_boxes
from tests.trees.samples import assert_caught

Flat = tuple[tuple[int, ...], int, int]  # shape, start, stop
Boxes = tuple[Column, Column, Column, Column]


@st.composite
def flat_ranges(draw: st.DrawFn) -> list[Flat]:
    axes = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.tuples(*[st.integers(0, 4)] * axes))
        start, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
        found.append((shape, start, stop))
    return found


def tile_their_ranges(split: Callable[..., Boxes], ranges: list[Flat]) -> None:
    row, offset, shape, position = split(*(np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True)))
    for number, (whole, start, stop) in enumerate(ranges):
        place = np.arange(prod(whole)).reshape(whole)
        boxes = np.flatnonzero(row == number)
        assert boxes.size <= 2 * len(whole) - 1
        inside = [
            place[tuple(slice(low, low + size) for low, size in zip(offset[box], shape[box], strict=True))].reshape(-1)
            for box in boxes
        ]
        # In order and end to end: each box is contiguous in the range, at its position.
        assert np.concatenate([*inside, place.reshape(-1)[:0]]).tolist() == list(range(start, stop))
        assert position[boxes].tolist() == [part[0] - start for part in inside]
    assert row.tolist() == sorted(row.tolist())


@given(flat_ranges())
def test_boxes_tile_their_flat_range_in_order(ranges: list[Flat]) -> None:
    tile_their_ranges(flat_boxes, ranges)


def test_tiling_catches_a_missing_last_box() -> None:
    def without_the_last(shape: Column, start: Column, stop: Column) -> Boxes:
        row, offset, part, position = flat_boxes(shape, start, stop)
        return row[:-1], offset[:-1], part[:-1], position[:-1]

    assert_caught(tile_their_ranges, without_the_last, flat_ranges())


def test_a_huge_box_is_not_walked_over() -> None:
    row, _, shape, _ = flat_boxes(np.array([[2**20, 2**20]]), np.array([1]), np.array([2**40 - 1]))
    assert (row.size, int(shape.prod(axis=1).sum())) == (3, 2**40 - 2)
