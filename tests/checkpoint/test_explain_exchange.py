"""explain_ranks says what ranks read for each other, send and receive, before a byte moves."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.checkpoint.loading import _exchange, _read
from shardtree.plans import ExchangePlan, plan_exchange, plan_reads
from shardtree.storage import MemoryStorage, ReadReport
from tests.checkpoint.test_exchange_overlaps import Case, cases, shards_of, wanted_elements
from tests.trees.samples import assert_caught

ALWAYS = st.LoadOptions(exchange="always", verify=None)
DTYPES = some.sampled_from([torch.int16, torch.int32])


def reports_of(targets: Sequence[Any], folder: MemoryStorage) -> list[ReadReport]:
    """Return what each rank of a load reads, sends and receives."""

    def on_rank(world: st.World) -> ReadReport:
        reports: list[ReadReport] = []
        options = st.LoadOptions(exchange="always", verify=None, report=reports.append)
        keywords = {"validate_access_integrity": False, "cast": True, "options": options}
        st.load(targets[world.rank], folder, world=world, **keywords)
        return reports[0]

    return st.simulate(len(targets), on_rank)


def check_exchange_foretold(
    explain: Callable[..., Any], case: Case, dtypes: Sequence[torch.dtype], stripe: int, replicas: int
) -> None:
    """Raise unless each rank reads, sends and receives what was said, and all of them read each element once."""
    shape, wanted = case[0], case[1] * replicas
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(shape, dtype=torch.int16))}, folder)
    targets = [
        dict(enumerate(shards_of(shape, boxes, dtypes[rank % len(dtypes)]))) for rank, boxes in enumerate(wanted)
    ]

    def striped(columns: Any, ranks: int, **options: Any) -> ExchangePlan:
        return plan_exchange(columns, ranks, stripe_bytes=stripe, most_cells=10**6, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_read, "plan_exchange", striped)
        patch.setattr(_exchange, "plan_reads", partial(plan_reads, stripe_bytes=stripe, most_cells=10**6))
        foretold = explain(targets, folder, validate_access_integrity=False, cast=True, options=ALWAYS).reads
        found = reports_of(targets, folder)
    assert [(one.cost.bytes_wanted, one.sent, one.received) for one in foretold] == [
        (one.bytes_read, one.bytes_sent, one.bytes_received) for one in found
    ]
    assert len(set(dtypes)) > 1 or sum(one.bytes_read for one in found) == 2 * wanted_elements(case).sum()


CHOSEN = cases(), some.lists(DTYPES, min_size=1, max_size=3), some.integers(1, 30), some.integers(1, 3)


@given(*CHOSEN)
def test_what_ranks_read_send_and_receive_is_foretold(
    case: Case, dtypes: Sequence[torch.dtype], stripe: int, replicas: int
) -> None:
    check_exchange_foretold(st.explain_ranks, case, dtypes, stripe, replicas)


def test_the_law_catches_boxes_that_are_taken_for_whole() -> None:
    def uncut(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_exchange, "plan_reads", lambda *of, alike, **_: plan_reads(*of, alike=alike, is_cut=False))
            return st.explain_ranks(*arguments, **options)

    assert_caught(check_exchange_foretold, uncut, *CHOSEN)


def test_64_replicas_are_foretold_to_read_once_and_level() -> None:
    folder, size = MemoryStorage(), 1 << 28
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(size, dtype=torch.int8))}, folder)
    empty = torch.empty(size // 2, dtype=torch.int8, device="meta")
    # HSDP: two ranks hold a half each, and 64 replicas of the two the same.
    targets = [
        {"w": st.ShardedTensor.from_rank_offsets("w", empty, (0, rank % 2, 2), replica_id=rank // 2)}
        for rank in range(128)
    ]
    found = st.explain_ranks(targets, folder, options=ALWAYS)
    assert found.ok and found.cost is not None
    reads = [one.cost.bytes_read for one in found.reads if one.cost is not None]
    assert sum(reads) == found.cost.bytes_wanted == size
    assert max(reads) <= 1.05 * size / 128
    assert sum(one.sent for one in found.reads) == sum(one.received for one in found.reads) == 63 * size


def test_a_copy_that_a_rank_makes_for_itself_is_not_counted_as_sent() -> None:
    both = {key: st.ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=1) for key in "ab"}
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, folder)
    found = st.explain_ranks([both, {}], folder, validate_access_integrity=False, options=ALWAYS)
    assert [(one.sent, one.received) for one in found.reads] == [(0, 0), (0, 0)]
    assert "sent" not in str(found)


class Made(Sequence[Any]):
    """Targets of ranks that are made when they are asked for; `most` is how many there have been at once."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.most = ranks, 0
        self.made: list[ReferenceType[torch.Tensor]] = []

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        if rank >= self.ranks:
            raise IndexError
        rows = torch.zeros(2)
        self.made.append(ref(rows))
        gc.collect()
        self.most = max(self.most, sum(one() is not None for one in self.made))
        return {"w": st.ShardedTensor.from_rank_offsets("w", rows, (0, rank, self.ranks))}


def check_none_is_kept(explain: Callable[..., Any], exchange: str) -> None:
    gc.collect()
    gc.freeze()  # else the collections that count what is kept look through all that other tests left
    folder, made = MemoryStorage(), Made(8)
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(16, dtype=torch.float64))}, folder)
    found = explain(made, folder, cast=True, options=st.LoadOptions(exchange=exchange))
    assert found.ok and [one.cost.bytes_wanted for one in found.reads] == [16] * 8
    assert made.most <= 3


@pytest.mark.parametrize("exchange", ["always", "never"])
def test_targets_that_are_made_when_they_are_asked_for_are_not_kept(exchange: str) -> None:
    check_none_is_kept(st.explain_ranks, exchange)


def test_the_check_sees_targets_that_are_kept() -> None:
    with pytest.raises(AssertionError):
        check_none_is_kept(lambda made, *others, **options: st.explain_ranks(list(made), *others, **options), "never")


class Replicas(Sequence[Any]):
    """Targets of ranks that all want all of many tensors, made when they are asked for."""

    def __init__(self, keys: Sequence[str], ranks: int) -> None:
        self.keys, self.ranks = keys, ranks

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        if rank >= self.ranks:
            raise IndexError
        return {key: st.ShardedTensor(key, None, torch.int8, (2,), (2,), (0,), None, rank) for key in self.keys}


def peak_bytes(explain: Callable[..., Any], keys: Sequence[str], folder: MemoryStorage, ranks: int) -> int:
    """Return how much memory an explanation takes at once."""
    explain(Replicas(keys[:1], 2), folder, options=ALWAYS)  # what is imported, and parsed once, counts for none
    tracemalloc.start()
    try:
        found = explain(Replicas(keys, ranks), folder, options=ALWAYS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.ok and found.cost is not None and found.cost.bytes_read == 2 * len(keys)
    return peak


def check_replicas_take_no_memory(explain: Callable[..., Any]) -> None:
    keys, folder = [f"layers.{number}.weight" for number in range(100)], MemoryStorage()
    one = torch.zeros(2, dtype=torch.int8)
    st.save({key: st.ShardedTensor.from_rank_offsets(key, one) for key in keys}, folder)
    few, many = (peak_bytes(explain, keys, folder, ranks) for ranks in (4, 16))
    assert many <= 1.5 * few


def test_memory_does_not_grow_with_the_replicas() -> None:
    check_replicas_take_no_memory(st.explain_ranks)


def test_the_check_sees_columns_of_every_rank() -> None:
    def described(columns: Any, ranks: int, **options: Any) -> Any:
        parts = [replace(columns, rank=np.full_like(columns.rank, rank)) for rank in range(ranks)]
        plan_exchange(st.layouts.join_columns(parts), ranks)
        return plan_reads(columns, ranks, **options)

    def explain(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_exchange, "plan_reads", described)
            return st.explain_ranks(*arguments, **options)

    with pytest.raises(AssertionError):
        check_replicas_take_no_memory(explain)


def test_what_converted_shards_disagree_about_is_said_of_their_ranks() -> None:
    """They may, if they are padded; a load fails, too."""
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4))}, folder)
    targets = [
        {"w": st.ShardedTensor("w", None, torch.float64, (size,), (size,), (0,), None, allow_shape_mismatch=True)}
        for size in (4, 4, 6)
    ]
    found = st.explain_ranks(targets, folder, validate_access_integrity=False, cast=True, options=ALWAYS)
    (problem,) = found.failed
    assert "'w' (ranks 0-2): (4,) float32 on ranks 0, 1, (6,) float32 on rank 2" in problem.text
