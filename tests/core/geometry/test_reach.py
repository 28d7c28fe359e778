"""Different values, rows that are the same, and which boxes lie in what others reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import _pairs as module
from shardtree.core.geometry import reach_of, row_numbers, rows_in_reach
from tests.core.geometry.test_overlapping_pairs import Side, share_an_element, two_sides
from tests.core.trees.samples import assert_caught

NUMBERS = st.sampled_from([0, 1, 2, 5, -3, 2**40, 2**62, -(2**62)])
ROWS = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), max_size=9))
Number = Callable[[list[Any]], tuple[Any, int]]


def are_numbered_in_order(number: Number, rows: list[list[int]]) -> None:
    width = len(rows[0]) if rows else 1
    columns = list(np.array(rows, dtype=np.int64).reshape(-1, width).T)
    found, count = number(columns)
    different = sorted(map(tuple, {tuple(row) for row in rows}))
    assert (found.tolist(), count) == ([different.index(tuple(row)) for row in rows], len(different))


@given(ROWS)
def test_rows_are_numbered_in_their_order(rows: list[list[int]]) -> None:
    are_numbered_in_order(row_numbers, rows)


@pytest.mark.parametrize("fault", [lambda columns: columns[:1], lambda columns: columns[::-1]], ids=["first", "last"])
def test_numbering_catches_columns_that_are_forgotten_or_in_another_order(fault: Callable[[Any], Any]) -> None:
    assert_caught(are_numbered_in_order, lambda columns: row_numbers(fault(columns)), ROWS)


def are_near(find: Callable[..., Any], sides: tuple[Side, Side]) -> None:
    """The law: those of the right boxes that have an element in the box around the left ones of their group."""
    group, offset, shape = sides[0]
    some = (shape > 0).all(axis=1)
    expected = []
    for row, other in enumerate(zip(*sides[1], strict=True)):
        own = some & (group == other[0])
        if own.any():
            low, high = offset[own].min(axis=0), (offset + shape)[own].max(axis=0)
            expected += [row] if share_an_element((other[0], low, high - low), other) else []
    rows, number = find(reach_of(*sides[0]), *sides[1])
    assert sorted(rows.tolist()) == expected
    assert reach_of(*sides[0]).group[number].tolist() == sides[1][0][rows].tolist()


@pytest.mark.parametrize("at_once", [1, 3, 2**15])
def test_boxes_in_reach_are_those_that_meet_the_box_around_their_group(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)

    @given(two_sides(), st.booleans())
    def law(sides: tuple[Side, Side], by_group: bool) -> None:
        order = np.argsort(sides[1][0], kind="stable") if by_group else np.arange(len(sides[1][0]))
        group, offset, shape = (column[order] for column in sides[1])
        are_near(rows_in_reach, (sides[0], (group, offset, shape)))

    law()


def test_reach_catches_boxes_that_only_touch() -> None:
    def touching(reach: Any, group: Any, offset: Any, shape: Any) -> Any:
        return rows_in_reach(reach, group, offset, shape + 1)

    assert_caught(are_near, touching, two_sides())
