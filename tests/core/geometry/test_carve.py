"""Boxes cut out of boxes: pieces and rest together are the boxes, and each element goes to the first that has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import Column, Cuts, carve_boxes, flat_boxes
from tests.core.trees.samples import assert_caught

Carve = Callable[[Column, Column, Column, Column, Column], Cuts]
Case = tuple[Column, Column, Column, Column, Column]


@st.composite
def cuts(draw: st.DrawFn) -> Case:
    axes, boxes, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    offset, shape = rng.integers(0, 3, (boxes, axes)), rng.integers(1, 5, (boxes, axes))
    left = rng.integers(0, boxes, pairs)
    return offset, shape, left, rng.integers(0, 5, (pairs, axes)), rng.integers(1, 4, (pairs, axes))


def elements(offset: Column, shape: Column) -> Counter[tuple[int, ...]]:
    return Counter(
        product(*(range(low, low + size) for low, size in zip(offset.tolist(), shape.tolist(), strict=True)))
    )


def goes_to_the_first(carve: Carve, case: Case) -> None:
    offset, shape, left, cut_offset, cut_shape = case
    carved = carve(*case)
    for row in range(len(offset)):
        rest = elements(offset[row], shape[row])
        for pair in np.flatnonzero(left == row):
            expected = rest & elements(cut_offset[pair], cut_shape[pair])
            mine = np.flatnonzero(carved.pair == pair)
            found = sum((elements(carved.offset[one], carved.shape[one]) for one in mine), Counter())
            assert found == expected, f"pair {pair} takes {sorted(found)}, expected {sorted(expected)}"
            rest -= expected
        mine = np.flatnonzero(carved.row == row)
        left_over = sum((elements(carved.rest_offset[one], carved.rest_shape[one]) for one in mine), Counter())
        assert left_over == rest, f"{sorted(left_over)} is left of box {row}, expected {sorted(rest)}"


@given(cuts())
def test_each_element_goes_to_the_first_that_has_it_or_is_left(case: Case) -> None:
    goes_to_the_first(carve_boxes, case)


def test_the_law_of_carving_catches_the_last_that_has_it() -> None:
    def last(offset: Column, shape: Column, left: Column, cut_offset: Column, cut_shape: Column) -> Cuts:
        carved = carve_boxes(offset, shape, left[::-1], cut_offset[::-1], cut_shape[::-1])
        return replace(carved, pair=left.size - 1 - carved.pair)

    assert_caught(goes_to_the_first, last, cuts())


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("longest", [1, 3, 9])
def test_of_many_cuts_too_each_element_goes_to_the_first(axes: int, longest: int) -> None:
    random, size, pairs = np.random.default_rng(axes), {1: 300, 2: 17, 3: 7}[axes], 150
    shape = random.integers(1, longest + 1, (pairs, axes))
    left, offset = random.integers(0, 2, pairs), random.integers(-2, size, (pairs, axes))
    goes_to_the_first(carve_boxes, (np.zeros((2, axes), int), np.full((2, axes), size), left, offset, shape))


def test_cuts_that_are_apart_are_taken_whole() -> None:
    begin = np.arange(100_000) * 3
    offset, shape = np.stack([begin, begin * 0], 1), np.full((begin.size, 2), [2, 5])
    carved = carve_boxes(np.zeros((1, 2), int), np.array([[300_000, 5]]), begin * 0, offset, shape)
    assert carved.pair.tolist() == list(range(begin.size))
    assert np.array_equal(carved.offset, offset) and np.array_equal(carved.shape, shape)
    assert np.array_equal(carved.rest_offset[:, 0], begin + 2) and (carved.rest_shape == [1, 5]).all()


def test_a_huge_box_is_not_walked_over() -> None:
    row, _, shape, _ = flat_boxes(np.array([[2**20, 2**20]]), np.array([1]), np.array([2**40 - 1]))
    assert (row.size, int(shape.prod(axis=1).sum())) == (3, 2**40 - 2)
