"""Who reads for others: each wanted element is read once, and passed on to all others that want it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.live.resharding._exchange import ExchangePlan, SharedReads, plan_exchange, plan_reads
from shardtree.mapping import ShardedTensor
from shardtree.plans import plan_reshard
from shardtree.testing._law_schedules import check_moved, element_numbers, moved
from tests.core.trees.samples import assert_caught

Case = tuple[ShardColumns, int]
SHAPE = (6, 5)


@st.composite
def wanted(draw: st.DrawFn) -> Case:
    """Return what ranks want: boxes of two matrices, or flat ranges of these; many overlap, some twice on a rank."""

    def shard(_: Any) -> ShardedTensor:
        spans = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in SHAPE]
        box = tuple(high - low for low, high in spans)
        flat = sorted(draw(st.tuples(*[st.integers(0, box[0] * box[1])] * 2)))
        part = slice(*flat) if draw(st.booleans()) else None
        key = draw(st.sampled_from(["v", "w"]))
        return ShardedTensor(
            key, None, torch.int16, box, SHAPE, tuple(low for low, _ in spans), None, flattened_range=part
        )

    parts = draw(st.lists(st.lists(st.builds(shard, st.none()), max_size=3), min_size=1, max_size=4))
    return join_columns([shard_columns(shards, rank) for rank, shards in enumerate(parts)]), len(parts)


def passes_everything_on(
    plan_of: Callable[..., ExchangePlan], case: Case, stripe_bytes: int, is_cut: bool, most_cells: int
) -> None:
    """Raise unless each wanted element is read once, by one who wants it, and every shard ends up with its own."""
    columns, ranks = case
    plan = plan_of(columns, ranks, stripe_bytes=stripe_bytes, is_cut=is_cut, most_cells=most_cells)
    shared, passed = plan.shared, plan.passed_on
    if is_cut and most_cells > 1:
        assert shared.targets is columns
    wants = [element_numbers(shared.targets, row, shared.targets.keys) for row in range(len(columns))]
    reads = [element_numbers(shared.reads, row, shared.targets.keys) for row in range(len(shared.reads))]
    times = Counter(number for each in reads for number in each.tolist())
    assert times == dict.fromkeys((number for each in wants for number in each.tolist()), 1)
    after = moved(passed, passed.schedule(max_bytes_in_flight=stripe_bytes + 1))
    for number, row, element in zip(reads, shared.row.tolist(), plan.element.tolist(), strict=True):
        assert set(number.tolist()) <= set(wants[row].tolist())
        if element >= 0:
            place = after[row][element : element + number.size]
            assert place.tolist() == [-1] * number.size, "what is read into its place is copied too"
            place[:] = number
    check_moved(passed, after)
    assert shared.targets.rank[shared.row].tolist() == shared.reads.rank.tolist()
    for said, found in ((shared.bytes_sent, passed.sent), (shared.bytes_received, passed.received)):
        assert said.tolist() == [found.get(rank, 0) for rank in range(ranks)]


PASSING = wanted(), st.integers(1, 60), st.booleans(), st.sampled_from([0, 10**6])


@given(*PASSING)
def test_every_wanted_element_is_read_once_and_sent_once_to_each_other_rank(
    case: Case, stripe_bytes: int, is_cut: bool, most_cells: int
) -> None:
    passes_everything_on(plan_exchange, case, stripe_bytes, is_cut, most_cells)


def cut_off(plan: ExchangePlan) -> ExchangePlan:
    moves = plan.passed_on.transfers
    short = replace(moves, shape=np.minimum(moves.shape, 2))
    return replace(plan, passed_on=replace(plan.passed_on, transfers=short))


def shifted(plan: ExchangePlan) -> ExchangePlan:
    return replace(plan, element=np.where(plan.element >= 0, plan.element + 1, -1))


def copied_too(plan: ExchangePlan) -> ExchangePlan:
    return replace(plan, passed_on=plan_reshard(plan.shared.reads, plan.shared.targets))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [cut_off, shifted, copied_too])
def test_the_law_catches(fault: Callable[[ExchangePlan], ExchangePlan]) -> None:
    def wrong(*arguments: Any, **options: Any) -> ExchangePlan:
        return fault(plan_exchange(*arguments, **options))

    assert_caught(passes_everything_on, wrong, *PASSING)


def replicated(sizes: list[int], ranks: int) -> ShardColumns:
    """Return tensors of bytes that all ranks want whole, and one that only rank 0 wants."""
    shards = [meta_shard(f"w{n}", size) for n, size in enumerate(sizes)]
    own = [meta_shard("alone", sum(sizes) // ranks)]
    return join_columns([shard_columns(shards + (own if rank == 0 else []), rank) for rank in range(ranks)])


def meta_shard(key: str, size: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.empty(size, dtype=torch.int8, device="meta"))


def levels_readers(plan_of: Callable[..., SharedReads], sizes: list[int], ranks: int, stripe_bytes: int) -> None:
    columns = replicated(sizes, ranks)
    read = plan_of(columns, ranks, stripe_bytes=stripe_bytes).bytes_read
    part = (sum(sizes) + sum(sizes) // ranks) / ranks
    # Each end of a rank's range is moved by half a stripe at most.
    assert np.abs(read - part).max() <= stripe_bytes + 1


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 100))
def test_readers_are_level_within_a_stripe(sizes: list[int], ranks: int, stripe_bytes: int) -> None:
    levels_readers(plan_reads, sizes, ranks, stripe_bytes)


def test_the_law_catches_a_rank_that_reads_all() -> None:
    def lazy(columns: ShardColumns, ranks: int, *, stripe_bytes: int) -> SharedReads:
        return plan_reads(columns, ranks, stripe_bytes=10**6)

    sizes = st.lists(st.integers(0, 4000), min_size=1, max_size=6)
    assert_caught(levels_readers, lazy, sizes, st.integers(1, 8), st.integers(1, 100))


def test_a_plan_prints_what_each_rank_reads_sends_and_receives() -> None:
    text = repr(plan_reads(replicated([4000], 2), 2, stripe_bytes=1))
    assert [line.split() for line in text.splitlines()] == [
        ["rank", "reads", "sends", "receives"],
        ["0", "3.0", "kB", "1.0", "kB", "3.0", "kB"],
        ["1", "3.0", "kB", "3.0", "kB", "1.0", "kB"],
    ]


Spans = list[tuple[int, int, int]]
Alike = tuple[list[Spans], list[int]]


@st.composite
def alike_ranks(draw: st.DrawFn) -> Alike:
    """Return what a few ranks want, as spans of tensors, and which of these each of more ranks is like."""
    span = st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 30))
    few = draw(st.lists(st.lists(span, max_size=3), min_size=1, max_size=3))
    return few, draw(st.lists(st.integers(0, len(few) - 1), min_size=1, max_size=6))


def of_spans(spans: Spans, rank: int) -> ShardColumns:
    rows = [ShardedTensor(f"w{n}", None, torch.int8, (size,), (60,), (at,), None) for n, at, size in spans]
    return shard_columns(rows, rank)


def alike_once(plan_of: Callable[..., SharedReads], case: Alike, stripe_bytes: int, is_cut: int) -> None:
    """Raise unless the plan of ranks that are described once is the one in which each is."""
    few, like = case
    every = join_columns([of_spans(few[one], rank) for rank, one in enumerate(like)])
    once = join_columns([of_spans(few[one], number) for number, one in enumerate(sorted(set(like)))])
    alike = [np.flatnonzero(np.array(like) == one) for one in sorted(set(like))]
    keywords = {"stripe_bytes": stripe_bytes, "is_cut": bool(is_cut)}
    expected, found = plan_reads(every, len(like), **keywords), plan_of(once, len(like), alike=alike, **keywords)
    names = ("key", "offset", "shape", "start", "stop", "rank")
    for name in names:
        assert getattr(found.reads, name).tolist() == getattr(expected.reads, name).tolist(), name
    for name in ("is_whole", "bytes_sent", "bytes_received"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    # The row is the same one of the reader's own shards.
    rows = [(one.row - one.first[one.reads.rank]).tolist() for one in (found, expected)]
    assert rows[0] == rows[1]


ALIKE = alike_ranks(), st.integers(1, 60), st.integers(0, 1)


@given(*ALIKE)
def test_ranks_that_want_the_same_are_planned_as_one_by_one(case: Alike, stripe_bytes: int, is_cut: int) -> None:
    alike_once(plan_reads, case, stripe_bytes, is_cut)


def test_the_law_catches_ranks_that_count_as_one() -> None:
    def as_one(columns: ShardColumns, ranks: int, *, alike: Any, **options: Any) -> SharedReads:
        return plan_reads(columns, ranks, alike=[each[:1] for each in alike], **options)

    assert_caught(alike_once, as_one, *ALIKE)
