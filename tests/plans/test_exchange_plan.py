"""Who reads for others: each wanted shard is read once, and passed on to all the others in bounded rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.plans import ExchangePlan, SharedReads, plan_exchange, plan_reads
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


def passes_everything_on(plan_of: Callable[..., ExchangePlan], case: Case, round_bytes: int, stripe_bytes: int) -> None:
    columns, ranks = case
    plan = plan_of(columns, ranks, round_bytes=round_bytes, stripe_bytes=stripe_bytes)
    size = dict(zip(columns.key.tolist(), columns.elements.tolist(), strict=True))
    read = {key: np.zeros(length, dtype=int) for key, length in size.items()}
    got = [np.zeros(length, dtype=int) for length in columns.elements.tolist()]
    for reader, row, start, stop in zip(plan.reader, plan.row, plan.read_start, plan.read_stop, strict=True):
        assert columns.rank[row] == reader
        read[int(columns.key[row])][start:stop] += 1
        got[row][start:stop] += 1
    for number, target, start, stop in zip(plan.read, plan.target, plan.start, plan.stop, strict=True):
        assert plan.read_start[number] <= start < stop <= plan.read_stop[number]
        assert columns.key[plan.row[number]] == columns.key[target]
        got[target][start:stop] += 1
    assert all((count == 1).all() for count in [*got, *read.values()])
    assert plan.round.tolist() == sorted(plan.round.tolist())
    moved = np.bincount(plan.round, weights=plan.stop - plan.start, minlength=plan.rounds)
    assert moved.max(initial=0) <= round_bytes
    assert plan.rounds <= -(-int(moved.sum()) // round_bytes) + 1


@given(wanted(), st.integers(1, 60), st.integers(1, 60))
def test_every_wanted_byte_is_read_once_and_sent_once_to_each_other_rank(
    case: Case, round_bytes: int, stripe_bytes: int
) -> None:
    passes_everything_on(plan_exchange, case, round_bytes, stripe_bytes)


def test_the_law_catches_a_shard_that_is_cut_off() -> None:
    def cut_off(*arguments: Any, **options: Any) -> ExchangePlan:
        plan = plan_exchange(*arguments, **options)
        return replace(plan, stop=np.minimum(plan.stop, 20))

    assert_caught(passes_everything_on, cut_off, wanted(), st.integers(1, 60), st.integers(1, 60))


def replicated(sizes: list[int], ranks: int) -> ShardColumns:
    """Return tensors of bytes that all ranks want whole, and one that only rank 0 wants."""
    shards = [meta_shard(f"w{n}", size) for n, size in enumerate(sizes)]
    own = [meta_shard("alone", sum(sizes) // ranks)]
    return join_columns([shard_columns(shards + (own if rank == 0 else []), rank) for rank in range(ranks)])


def meta_shard(key: str, size: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.empty(size, dtype=torch.int8, device="meta"))


def levels_readers(plan_of: Callable[..., ExchangePlan], sizes: list[int], ranks: int, stripe_bytes: int) -> None:
    columns = replicated(sizes, ranks)
    read = plan_of(columns, ranks, stripe_bytes=stripe_bytes).bytes_read
    part = (sum(sizes) + sum(sizes) // ranks) / ranks
    # Each end of a rank's range is moved by half a stripe at most.
    assert np.abs(read - part).max() <= stripe_bytes + 1


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 100))
def test_readers_are_level_within_a_stripe(sizes: list[int], ranks: int, stripe_bytes: int) -> None:
    levels_readers(plan_exchange, sizes, ranks, stripe_bytes)


def test_the_law_catches_a_rank_that_reads_all() -> None:
    def lazy(columns: ShardColumns, ranks: int, *, stripe_bytes: int) -> ExchangePlan:
        return plan_exchange(columns, ranks, stripe_bytes=10**6)

    sizes = st.lists(st.integers(0, 4000), min_size=1, max_size=6)
    assert_caught(levels_readers, lazy, sizes, st.integers(1, 8), st.integers(1, 100))


def test_64_replicas_read_once_level_within_a_twentieth() -> None:
    size = 1 << 30
    columns = join_columns([shard_columns([meta_shard("w", size), meta_shard("v", size)], rank) for rank in range(64)])
    read = plan_exchange(columns, 64).bytes_read
    assert read.sum() == 2 * size
    assert read.max() <= 1.05 * read.mean()


def test_a_plan_prints_what_each_rank_reads_sends_and_receives() -> None:
    text = repr(plan_exchange(replicated([4000], 2), 2, stripe_bytes=1))
    assert [line.split() for line in text.splitlines()] == [
        ["rank", "reads", "sends", "receives"],
        ["0", "3.0", "kB", "1.0", "kB", "3.0", "kB"],
        ["1", "3.0", "kB", "3.0", "kB", "1.0", "kB"],
    ]


def test_rounds_are_full_but_the_last() -> None:
    shards = [[ShardedTensor.from_rank_offsets(key, torch.zeros(40, dtype=torch.int8)) for key in "abc"]] * 2
    columns = join_columns([shard_columns(part, rank) for rank, part in enumerate(shards)])
    plan = plan_exchange(columns, 2, round_bytes=64)
    moved = np.bincount(plan.round, weights=plan.stop - plan.start)
    assert moved.tolist() == [64, 56]


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
    expected, found = plan_exchange(every, len(like), **keywords), plan_of(once, len(like), alike=alike, **keywords)
    names = ("reader", "cell", "read_start", "read_stop", "size", "bytes_wanted", "bytes_sent", "bytes_received")
    for name in names:
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert found.cells.offset.tolist() == expected.cells.offset.tolist()
    # The row is the same one of the reader's own shards.
    first, own = (np.searchsorted(part.rank, range(len(like))) for part in (once, every))
    assert (found.row - first[found.number[found.reader]]).tolist() == (expected.row - own[expected.reader]).tolist()
    moved = np.where(expected.sender == expected.receiver, 0, expected.stop - expected.start)
    for name, end in (("bytes_sent", expected.sender), ("bytes_received", expected.receiver)):
        assert getattr(found, name).tolist() == np.bincount(end, weights=moved, minlength=len(like)).tolist()


ALIKE = alike_ranks(), st.integers(1, 60), st.integers(0, 1)


@given(*ALIKE)
def test_ranks_that_want_the_same_are_planned_as_one_by_one(case: Alike, stripe_bytes: int, is_cut: int) -> None:
    alike_once(plan_reads, case, stripe_bytes, is_cut)


def test_the_law_catches_ranks_that_count_as_one() -> None:
    def as_one(columns: ShardColumns, ranks: int, *, alike: Any, **options: Any) -> SharedReads:
        return plan_reads(columns, ranks, alike=[each[:1] for each in alike], **options)

    assert_caught(alike_once, as_one, *ALIKE)
