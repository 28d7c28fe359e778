"""Boxes in columns: alignment, and the types in which they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.geometry import (
    Column,
    as_int64,
    box_column,
    narrowed,
    widen,
)
from tests.trees.samples import assert_caught

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


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
