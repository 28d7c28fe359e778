"""What is done at once keeps to a bound: items in groups, and tensors in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.plans import grouped, read_rounds
from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from tests.core.trees.samples import assert_caught

Group = Callable[[Iterable[int], Callable[[int], int], int], Iterator[list[int]]]


def groups_are_bounded_and_full(group: Group, sizes: list[int], most: int) -> None:
    groups = list(group(sizes, abs, most))
    assert [size for one in groups for size in one] == sizes
    assert all(one and (sum(one) <= most or len(one) == 1) for one in groups)
    assert all(sum(one) + other[0] > most for one, other in pairwise(groups))


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_groups_keep_the_order_and_the_bound_and_are_as_large_as_it_lets_them(sizes: list[int], most: int) -> None:
    groups_are_bounded_and_full(grouped, sizes, most)


def test_groups_catch_one_item_each() -> None:
    def alone(items: Iterable[int], nbytes: Callable[[int], int], most: int) -> Iterator[list[int]]:
        return ([item] for item in items)

    assert_caught(groups_are_bounded_and_full, alone, st.lists(st.integers(0, 9)), st.integers(0, 20))


Rounds = Callable[..., np.ndarray]


@st.composite
def reads(draw: st.DrawFn) -> ShardColumns:
    """Return what up to three ranks read of a few tensors."""
    sizes = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=6))
    ranks: list[list[ShardedTensor]] = [[], [], []]
    for number, held in enumerate(sizes):
        for rank, size in enumerate(held):
            data = torch.zeros(size, dtype=torch.int8)
            ranks[rank].append(ShardedTensor(f"w{number}", data, data.dtype, (size,), (30,), (10 * rank,), None))
    return join_columns([shard_columns(shards, rank) for rank, shards in enumerate(ranks)])


def rounds_are_bounded_and_full(rounds: Rounds, columns: ShardColumns, most: int) -> None:
    turns = rounds(columns, most_bytes=most).tolist()
    turn_of = dict(zip(columns.key.tolist(), turns, strict=True))
    assert [turn_of[key] for key in columns.key.tolist()] == turns, "a tensor is read in two rounds"
    order = [turn_of[key] for key in sorted(turn_of)]
    assert order == sorted(order) and set(order) == set(range(len(set(order)))), "rounds are out of order"
    loads = np.zeros((len(set(order)), 3), dtype=np.int64)
    np.add.at(loads, (np.array(turns, dtype=np.int64), columns.rank), columns.elements)
    for number, load in enumerate(loads):
        keys = [key for key, turn in turn_of.items() if turn == number]
        assert (load <= most).all() or len([key for key in keys if columns.elements[columns.key == key].any()]) == 1
        if number:
            first = columns.key == min(keys)
            more = np.bincount(columns.rank[first], weights=columns.elements[first], minlength=3)
            assert (loads[number - 1] + more > most).any(), "it had room in the round before"


@given(reads(), st.integers(0, 20))
def test_rounds_keep_tensors_whole_and_the_bound_and_are_as_large_as_it_lets_them(
    columns: ShardColumns, most: int
) -> None:
    rounds_are_bounded_and_full(read_rounds, columns, most)


def test_rounds_catch_all_at_once() -> None:
    assert_caught(
        rounds_are_bounded_and_full,
        lambda columns, most_bytes: np.zeros(len(columns), dtype=np.int64),
        reads(),
        st.integers(0, 20),
    )


def test_bytes_count_and_rounds_are_int64() -> None:
    shards = [ShardedTensor.from_rank_offsets(key, torch.zeros(4, dtype=torch.float64)) for key in "abc"]
    turns = read_rounds(shard_columns(shards), most_bytes=64)
    assert (turns.tolist(), turns.dtype) == ([0, 0, 1], np.dtype(np.int64))
    assert read_rounds(shard_columns([])).tolist() == []
