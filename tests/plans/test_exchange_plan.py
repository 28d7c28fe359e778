"""Who reads for others: each wanted shard is read once, and passed on whole to all the others in bounded rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.plans import ExchangePlan, plan_exchange
from tests.trees.samples import assert_caught

Case = tuple[ShardColumns, int]


@st.composite
def wanted(draw: st.DrawFn) -> Case:
    """Return what ranks want: each of a few tensors whole, on some of them."""
    ranks = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 40), max_size=5))
    parts = []
    for rank in range(ranks):
        own = [number for number in range(len(sizes)) if draw(st.integers(0, 2))]
        shards = [ShardedTensor.from_rank_offsets(f"w{n}", torch.zeros(sizes[n], dtype=torch.int8)) for n in own]
        parts.append(shard_columns(shards, rank))
    return join_columns(parts), ranks


def passes_everything_on(plan_of: Callable[..., ExchangePlan], case: Case, round_bytes: int) -> None:
    columns, ranks = case
    plan = plan_of(columns, ranks, round_bytes=round_bytes)
    size = columns.elements
    assert sorted(columns.key[plan.reads].tolist()) == sorted(set(columns.key.tolist()))
    got = [np.full(length, int(plan.reads[row])) for row, length in enumerate(size.tolist())]
    for source, target, start, stop in zip(plan.source, plan.target, plan.start, plan.stop, strict=True):
        assert plan.reads[source]
        assert columns.key[source] == columns.key[target]
        got[target][start:stop] += 1
    assert all((count == 1).all() for count in got)
    assert plan.round.tolist() == sorted(plan.round.tolist())
    moved = np.bincount(plan.round, weights=plan.stop - plan.start, minlength=plan.rounds)
    assert moved.max(initial=0) <= round_bytes
    assert plan.rounds <= -(-int(moved.sum()) // round_bytes) + 1


@given(wanted(), st.integers(1, 60))
def test_every_wanted_byte_is_read_once_or_passed_on_once_in_bounded_rounds(case: Case, round_bytes: int) -> None:
    passes_everything_on(plan_exchange, case, round_bytes)


def test_the_law_catches_a_shard_that_is_cut_off() -> None:
    def cut_off(columns: ShardColumns, ranks: int, *, round_bytes: int) -> ExchangePlan:
        plan = plan_exchange(columns, ranks, round_bytes=round_bytes)
        return ExchangePlan(plan.reads, plan.source, plan.target, plan.start, np.minimum(plan.stop, 20), plan.round)

    assert_caught(passes_everything_on, cut_off, wanted(), st.integers(1, 60))


def test_rounds_are_full_but_the_last() -> None:
    shards = [[ShardedTensor.from_rank_offsets(key, torch.zeros(40, dtype=torch.int8)) for key in "abc"]] * 2
    columns = join_columns([shard_columns(part, rank) for rank, part in enumerate(shards)])
    plan = plan_exchange(columns, 2, round_bytes=64)
    moved = np.bincount(plan.round, weights=plan.stop - plan.start)
    assert moved.tolist() == [64, 56]
