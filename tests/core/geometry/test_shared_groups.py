"""Which groups of boxes have two that share an element: as comparing all pairs says, and quickly for any boxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import Column, shared_groups
from shardtree.core.geometry import _coverage as module
from tests.core.trees.samples import assert_caught

Find = Callable[[Column, Column, Column], Column]


@st.composite
def grouped_boxes(draw: st.DrawFn) -> tuple[Column, Column, Column]:
    axes, count = draw(st.integers(1, 3)), draw(st.integers(0, 12))
    rows = st.lists(st.integers(0, 6), min_size=axes, max_size=axes)
    offset = draw(st.lists(rows, min_size=count, max_size=count))
    shape = draw(st.lists(rows.map(lambda row: [min(size, 3) for size in row]), min_size=count, max_size=count))
    group = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    boxes = [np.array(column, dtype=np.int64).reshape(count, axes) for column in (offset, shape)]
    return np.array(group, dtype=np.int64), boxes[0], boxes[1]


def check_pairs(find: Find, boxes: tuple[Column, Column, Column]) -> None:
    """The law: the groups are those of the pairs that meet, each pair looked at."""
    group, offset, shape = (column.tolist() for column in boxes)
    met = set()
    for one in range(len(group)):
        for other in range(one):
            edges = zip(offset[one], shape[one], offset[other], shape[other], strict=True)
            if group[one] == group[other] and all(max(a, c) < min(a + b, c + d) for a, b, c, d in edges):
                met.add(group[one])
    assert find(*boxes).tolist() == sorted(met)


@pytest.mark.slow
@pytest.mark.parametrize("few", [2, 64])
def test_shared_groups_are_those_of_the_pairs_that_meet(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW_TOGETHER", few)

    @given(grouped_boxes())
    def law(boxes: tuple[Column, Column, Column]) -> None:
        check_pairs(shared_groups, boxes)

    law()


def test_shared_groups_law_catches_one_that_looks_at_neighbours_only() -> None:
    def neighbours(group: Column, offset: Column, shape: Column) -> Column:
        meets = ((offset[1:] < (offset + shape)[:-1]) & (offset[:-1] < (offset + shape)[1:])).all(axis=1)
        return np.unique(group[1:][meets & (group[1:] == group[:-1])])

    boxes = np.zeros(3, np.int64), np.array([[0], [4], [0]]), np.array([[2], [2], [2]])
    assert_caught(check_pairs, neighbours, st.just(boxes))


def _line(count: int) -> tuple[Any, Any]:
    return np.arange(count)[:, None], np.ones((count, 1), np.int64)


def _bars(count: int) -> tuple[Any, Any]:
    k, zeros = count // 2, np.zeros(count // 2, np.int64)
    offset = np.concatenate([np.stack([np.arange(k), zeros], 1), np.stack([zeros + k, np.arange(k)], 1)])
    return offset, np.concatenate([np.tile([1, k], (k, 1)), np.tile([k, 1], (k, 1))])


def _nested(count: int) -> tuple[Any, Any]:
    return np.arange(count)[:, None], count - np.arange(count)[:, None]


@pytest.mark.parametrize(
    ("make", "shared"),
    [
        (_line, False),
        (_bars, False),
        (_nested, True),
        (lambda count: (np.zeros((count, 2), np.int64), np.ones((count, 2), np.int64)), True),
        (lambda count: (np.tile(np.arange(count)[:, None], 3), np.full((count, 3), count)), True),
        (lambda count: (np.tile(np.arange(count)[:, None], 2), np.tile([count, 1], (count, 1))), False),
    ],
    ids=["line", "bars", "nested", "equal", "stacked", "steps"],
)
def test_boxes_that_meet_on_every_axis_are_told_apart_in_little_time(make: Callable[[int], Any], shared: bool) -> None:
    offset, shape = make(20_000)
    begin = time.process_time()
    assert shared_groups(np.zeros(20_000, np.int64), offset, shape).tolist() == [0] * shared
    assert time.process_time() - begin < 10
