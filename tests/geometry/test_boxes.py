"""Boxes in columns: alignment, volumes, strides and what two boxes have in common."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.geometry import (
    Column,
    as_int64,
    box_column,
    intersect,
    narrowed,
    row_major_strides,
    volumes,
    widen,
)
from tests.trees.samples import assert_caught

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape

SIZES = st.integers(0, 4)
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
COLUMNS = st.integers(1, 4).flatmap(lambda axes: st.lists(st.tuples(*[SIZES] * axes), min_size=1, max_size=5))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    axes = draw(st.integers(1, 3))
    one, other = (tuple(draw(st.tuples(*[st.integers(0, 4)] * axes)) for _ in range(2)) for _ in range(2))
    return (one[0], one[1]), (other[0], other[1])


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, low + size) for low, size in zip(*box, strict=True))))


def keeps_rows_right_aligned(column: Callable[..., Column], rows: list[tuple[int, ...]], axes: int) -> None:
    found = column(rows, 1, axes)
    assert found.dtype == np.int64
    assert found.shape == (len(rows), max([1, axes, *map(len, rows)]))
    for row, wide in zip(rows, found.tolist(), strict=True):
        assert wide == [1] * (len(wide) - len(row)) + list(row)


@given(st.lists(SHAPES, max_size=5), st.integers(0, 5))
def test_a_column_keeps_rows_right_aligned(rows: list[tuple[int, ...]], axes: int) -> None:
    keeps_rows_right_aligned(box_column, rows, axes)


def test_alignment_catches_padding_on_the_right() -> None:
    def padded_right(rows: Any, fill: int, axes: int) -> Column:
        width = max([1, axes, *map(len, rows)])
        return np.array([[*row, *[fill] * (width - len(row))] for row in rows], dtype=np.int64).reshape(-1, width)

    assert_caught(keeps_rows_right_aligned, padded_right, st.lists(SHAPES, max_size=5), st.integers(0, 5))


@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(0, 5))
def test_widening_a_column_is_building_it_wider(rows: list[tuple[int, ...]], axes: int) -> None:
    assert widen(box_column(rows, 1), axes, 1).tolist() == box_column(rows, 1, axes).tolist()


def are_numpy_strides(strides: Callable[[Column], Column], rows: list[tuple[int, ...]]) -> None:
    shape = np.array(rows, dtype=np.int64)
    for row, found in zip(rows, strides(shape).tolist(), strict=True):
        assert found == [prod(row[axis + 1 :]) for axis in range(len(row))]


@given(COLUMNS)
def test_row_major_strides_are_products_of_what_follows(rows: list[tuple[int, ...]]) -> None:
    are_numpy_strides(row_major_strides, rows)


def test_strides_catch_column_major_order() -> None:
    assert_caught(are_numpy_strides, lambda shape: row_major_strides(shape[:, ::-1])[:, ::-1], COLUMNS)


@given(COLUMNS)
def test_volumes_count_elements(rows: list[tuple[int, ...]]) -> None:
    found = volumes(np.array(rows, dtype=np.int64))
    assert found.tolist() == [len(elements(((0,) * len(row), row))) for row in rows]


def test_volumes_beyond_32_bits() -> None:
    assert volumes(np.array([[2**20, 2**20]])).tolist() == [2**40]


def holds_what_both_hold(meet: Callable[..., tuple[Column, Column]], pair: tuple[Box, Box]) -> None:
    offset, shape = meet(*(np.array([part], dtype=np.int64) for box in pair for part in box))
    assert (shape >= 0).all()
    assert elements((tuple(offset[0].tolist()), tuple(shape[0].tolist()))) == elements(pair[0]) & elements(pair[1])


@given(box_pairs())
def test_an_intersection_holds_what_both_boxes_hold(pair: tuple[Box, Box]) -> None:
    holds_what_both_hold(intersect, pair)


def test_an_intersection_catches_an_end_off_by_one() -> None:
    def one_more(*columns: Column) -> tuple[Column, Column]:
        offset, shape = intersect(*columns)
        return offset, shape + 1

    assert_caught(holds_what_both_hold, one_more, box_pairs())


INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300) | st.integers(0, 2**33), max_size=5)


def check_narrowed(narrow: Callable[[Any], Any], values: list[int]) -> None:
    """Raise unless integers come back, and no narrower type would hold them."""
    column = np.array(values, dtype=np.int64)
    sent = narrow(column)
    back = as_int64(sent)
    assert (back.dtype, back.tolist(), back.flags.writeable) == (np.int64, values, True)
    smaller = [np.dtype(kind) for kind in "bBhHiI" if np.dtype(kind).itemsize < sent.dtype.itemsize]
    assert not any(all(np.iinfo(kind).min <= each <= np.iinfo(kind).max for each in values) for kind in smaller)


@given(INTEGERS)
def test_integers_are_sent_in_the_narrowest_type_that_holds_them(values: list[int]) -> None:
    check_narrowed(narrowed, values)


@pytest.mark.parametrize("narrow", [lambda column: column, lambda column: column.astype(np.int32)])
def test_the_law_catches_other_types(narrow: Callable[[Any], Any]) -> None:
    assert_caught(check_narrowed, narrow, INTEGERS)
