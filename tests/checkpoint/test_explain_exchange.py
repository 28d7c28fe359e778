"""explain_ranks says what ranks read for each other, send and receive, before a byte moves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.checkpoint.loading import _foretell, _read
from shardtree.plans import ExchangePlan, plan_exchange
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
    explain: Callable[..., Any], case: Case, dtypes: Sequence[torch.dtype], stripe: int
) -> None:
    """Raise unless each rank reads, sends and receives what was said, and all of them read each element once."""
    shape, wanted = case
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(shape, dtype=torch.int16))}, folder)
    targets = [
        dict(enumerate(shards_of(shape, boxes, dtypes[rank % len(dtypes)]))) for rank, boxes in enumerate(wanted)
    ]

    def striped(columns: Any, ranks: int, **options: Any) -> ExchangePlan:
        return plan_exchange(columns, ranks, stripe_bytes=stripe, most_cells=10**6, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_read, "plan_exchange", striped)
        patch.setattr(_foretell, "plan_exchange", striped)
        foretold = explain(targets, folder, validate_access_integrity=False, cast=True, options=ALWAYS).reads
        found = reports_of(targets, folder)
    assert [(one.cost.bytes_wanted, one.sent, one.received) for one in foretold] == [
        (one.bytes_read, one.bytes_sent, one.bytes_received) for one in found
    ]
    assert len(set(dtypes)) > 1 or sum(one.bytes_read for one in found) == 2 * wanted_elements(case).sum()


CHOSEN = cases(), some.lists(DTYPES, min_size=1, max_size=3), some.integers(1, 30)


@settings(max_examples=40)
@given(*CHOSEN)
def test_what_ranks_read_send_and_receive_is_foretold(case: Case, dtypes: Sequence[torch.dtype], stripe: int) -> None:
    check_exchange_foretold(st.explain_ranks, case, dtypes, stripe)


def test_the_law_catches_boxes_that_are_taken_for_whole() -> None:
    def uncut(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_foretell, "plan_exchange", lambda *of, **_: plan_exchange(*of, is_cut=False))
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
