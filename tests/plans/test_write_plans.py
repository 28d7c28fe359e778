"""Who writes what: each shard once, by a holder, in equal shares, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import ShardColumns, join_columns, select_rows, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.plans import level_writes
from shardtree.testing import check_writes, cut, layouts, shapes
from tests.trees.samples import assert_caught

Writes = Callable[[ShardColumns, int], np.ndarray]
Case = tuple[ShardColumns, int]


@st.composite
def held(draw: st.DrawFn) -> Case:
    """Return all ranks' shards of a few tensors; some tensors have no main replica."""
    ranks = draw(st.integers(1, 5))
    shards: list[list[ShardedTensor]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        layout = draw(layouts(draw(shapes(max_axes=2)), ranks))
        whole = torch.zeros(layout.global_shape, dtype=draw(st.sampled_from([torch.int8, torch.float64])))
        for rank in range(ranks):
            shards[rank] += cut(layout, f"w{number}", whole, rank)
    lost = draw(st.sampled_from([None, None, "w0"]))
    columns = join_columns([shard_columns(part, rank) for rank, part in enumerate(shards)])
    if lost in columns.keys:
        columns.main[columns.key == columns.keys.index(lost)] = False
    return columns, ranks


def box(columns: ShardColumns, row: int) -> tuple[object, ...]:
    spans = zip(columns.offset[row].tolist(), columns.shape[row].tolist(), strict=True)
    return int(columns.key[row]), *spans, int(columns.start[row])


def do_not_depend_on_order(writes: Writes, case: Case, random: object) -> None:
    """Each shard is written once, where no main replica is lost, and by the same rank in any order of rows."""
    columns, ranks = case
    check_writes(columns, ranks, writes(columns, ranks))
    order = list(range(len(columns)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rows = np.array(order, dtype=np.int64)
    one, other = (
        {(int(each.rank[row]), box(each, row)) for row in np.flatnonzero(writes(each, ranks))}
        for each in (columns, select_rows(columns, rows))
    )
    assert one == other


@given(held(), st.randoms(use_true_random=False))
def test_every_rank_computes_the_same_writers_whatever_the_order_of_rows(case: Case, random: object) -> None:
    do_not_depend_on_order(level_writes, case, random)


def test_the_order_law_catches_the_first_holder_that_comes() -> None:
    def first_that_comes(columns: ShardColumns, ranks: int) -> np.ndarray:
        boxes = [box(columns, row) for row in range(len(columns))]
        return np.array([boxes[row] not in boxes[:row] for row in range(len(boxes))], dtype=np.bool_)

    assert_caught(do_not_depend_on_order, first_that_comes, held(), st.randoms(use_true_random=False))


def test_nothing_is_dealt_to_nobody() -> None:
    assert level_writes(join_columns([shard_columns([]), shard_columns([], 1)]), 2).tolist() == []
