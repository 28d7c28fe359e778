"""Who writes what: each shard once, by a holder, in equal shares, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import ShardColumns, join_columns, select_rows, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.plans import level_writes, main_writes
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


def share_the_work(writes: Writes, case: Case) -> None:
    check_writes(*case, writes(*case))


@given(held())
def test_each_shard_is_written_once_and_writers_are_level(case: Case) -> None:
    share_the_work(level_writes, case)


def test_level_writes_catch_the_lowest_rank_that_writes_all() -> None:
    def lowest_rank(columns: ShardColumns, ranks: int) -> np.ndarray:
        writes = np.zeros(len(columns), dtype=np.bool_)
        seen = set()
        wanted = level_writes(columns, ranks)
        places = [
            tuple(getattr(columns, name)[row].tolist() for name in ("offset", "shape")) for row in range(len(columns))
        ]
        boxes = [(int(columns.key[row]), str(places[row]), int(columns.start[row])) for row in range(len(columns))]
        written = {boxes[row] for row in np.flatnonzero(wanted)}
        for row in np.argsort(columns.rank, kind="stable"):
            if boxes[row] in written and boxes[row] not in seen:
                seen.add(boxes[row])
                writes[row] = True
        return writes

    def many_replicas(sizes: list[int]) -> Case:
        shards = [
            [
                ShardedTensor.from_rank_offsets(f"w{n}", torch.zeros(size), replica_id=rank)
                for n, size in enumerate(sizes)
            ]
            for rank in range(3)
        ]
        return join_columns([shard_columns(part, rank) for rank, part in enumerate(shards)]), 3

    assert_caught(share_the_work, lowest_rank, st.lists(st.integers(1, 9), min_size=1, max_size=8).map(many_replicas))


def do_not_depend_on_order(writes: Writes, case: Case, random: object) -> None:
    columns, ranks = case
    order = list(range(len(columns)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rows = np.array(order, dtype=np.int64)
    one, other = (
        sorted(
            (
                int(each.rank[row]),
                int(each.key[row]),
                each.offset[row].tolist(),
                each.shape[row].tolist(),
                int(each.start[row]),
            )
            for row in np.flatnonzero(writes(each, ranks))
        )
        for each in (columns, select_rows(columns, rows))
    )
    assert one == other


@given(held(), st.randoms(use_true_random=False))
def test_every_rank_computes_the_same_writers_whatever_the_order_of_rows(case: Case, random: object) -> None:
    do_not_depend_on_order(level_writes, case, random)


def test_the_order_law_catches_the_first_holder_that_comes() -> None:
    def first_that_comes(columns: ShardColumns, ranks: int) -> np.ndarray:
        boxes = [
            (int(columns.key[row]), str(columns.offset[row]), str(columns.shape[row]), int(columns.start[row]))
            for row in range(len(columns))
        ]
        return np.array([box not in boxes[:row] for row, box in enumerate(boxes)], dtype=np.bool_)

    assert_caught(do_not_depend_on_order, first_that_comes, held(), st.randoms(use_true_random=False))


@given(held())
def test_without_an_exchange_the_main_replicas_are_written(case: Case) -> None:
    columns, _ = case
    assert main_writes(columns).tolist() == columns.main.tolist()


def test_equal_replicas_of_equal_tensors_are_dealt_to_and_fro() -> None:
    shards = [
        [ShardedTensor.from_rank_offsets(key, torch.zeros(4), replica_id=rank) for key in "abcdef"] for rank in range(3)
    ]
    columns = join_columns([shard_columns(part, rank) for rank, part in enumerate(shards)])
    writes = level_writes(columns, 3)
    assert {columns.keys[columns.key[row]]: int(columns.rank[row]) for row in np.flatnonzero(writes)} == dict(
        zip("abcdef", (0, 1, 2, 2, 1, 0), strict=True)
    )


def test_nothing_is_dealt_to_nobody() -> None:
    assert level_writes(join_columns([shard_columns([]), shard_columns([], 1)]), 2).tolist() == []
