"""Boxes in columns: alignment, and the types in which they are sent."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import as_int64, box_column, narrowed, widen

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(st.lists(SHAPES, max_size=5), st.integers(0, 5))
def test_a_column_keeps_rows_right_aligned(rows: list[tuple[int, ...]], axes: int) -> None:
    found = box_column(rows, 1, axes)
    assert found.dtype == np.int64
    assert found.shape == (len(rows), max([1, axes, *map(len, rows)]))
    for row, wide in zip(rows, found.tolist(), strict=True):
        assert wide == [1] * (len(wide) - len(row)) + list(row)


@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(0, 5))
def test_widening_a_column_is_building_it_wider(rows: list[tuple[int, ...]], axes: int) -> None:
    assert widen(box_column(rows, 1), axes, 1).tolist() == box_column(rows, 1, axes).tolist()


INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300) | st.integers(0, 2**33), max_size=5)


@given(INTEGERS)
def test_integers_are_sent_in_the_narrowest_type_that_holds_them(values: list[int]) -> None:
    sent = narrowed(np.array(values, dtype=np.int64))
    back = as_int64(sent)
    assert back.dtype == np.int64 and back.tolist() == values and back.flags.writeable
    smaller = [np.dtype(kind) for kind in "bBhHiI" if np.dtype(kind).itemsize < sent.dtype.itemsize]
    assert not any(all(np.iinfo(kind).min <= each <= np.iinfo(kind).max for each in values) for kind in smaller)
