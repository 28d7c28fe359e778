"""Who writes what: each shard once, by a holder, in equal shares, whoever computes it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.layouts import select_rows
from shardtree.core.plans import level_writes
from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.testing import check_writes, cut, layouts, shapes

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


@given(held(), st.randoms(use_true_random=False))
def test_every_rank_computes_the_same_writers_whatever_the_order_of_rows(case: Case, random: object) -> None:
    columns, ranks = case
    check_writes(columns, ranks, level_writes(columns, ranks))
    order = list(range(len(columns)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rows = np.array(order, dtype=np.int64)
    one, other = (
        {(int(each.rank[row]), box(each, row)) for row in np.flatnonzero(level_writes(each, ranks)).tolist()}
        for each in (columns, select_rows(columns, rows))
    )
    assert one == other


def test_nothing_is_dealt_to_nobody() -> None:
    assert level_writes(join_columns([shard_columns([]), shard_columns([], 1)]), 2).tolist() == []
