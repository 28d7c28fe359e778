"""exchange="auto": what takes less time by the speeds that a load measures, and the reason in the report."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.checkpoint.loading import _auto
from shardtree.storage import MemoryStorage, ReadReport
from shardtree.testing import WatchedStorage

ROWS = torch.arange(1 << 19).view(1 << 9, -1)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[float]]]:
    """Return a function that plants what is measured, and returns a list of what is measured from then on."""
    monkeypatch.setattr(_auto, "_WORTH_BYTES", 0)
    monkeypatch.setattr(_auto, "_measured", {})

    def plant(*seconds: float) -> list[float]:
        measured: list[float] = []
        # Each rank is a thread, and measures in the same order: a read, the same again, a message.
        rest = defaultdict(partial(iter, seconds))

        def planted_seconds(work: Callable[[], object]) -> float:
            work()
            measured.append(next(rest[threading.get_ident()]))
            return measured[-1]

        monkeypatch.setattr(_auto, "_seconds", planted_seconds)
        return measured

    return plant


def saved() -> WatchedStorage:
    """Return a storage that isn't known to be local or in memory."""
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", ROWS)}, folder)
    return WatchedStorage(folder)


def replica(rank: int, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(ROWS.shape, dtype=dtype), replica_id=rank)}


def loaded(storage: Any, ranks: int = 2, dtype: torch.dtype = torch.int64, **options: Any) -> list[ReadReport]:
    """Return each rank's report of a load of replicas, whose values are compared."""

    def on_rank(world: st.World) -> ReadReport:
        reports: list[ReadReport] = []
        how = st.LoadOptions(report=reports.append, **options)
        tree = st.load(replica(world.rank, dtype), storage, world=world, cast=True, options=how)
        assert torch.equal(tree["w"], ROWS.to(dtype))
        return reports[0]

    return st.simulate(ranks, on_rank)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_slow_storage_is_read_once_and_fast_storage_by_each(planted: Any, dtype: torch.dtype) -> None:
    for send, times, start in ((0.5, 1, "Ranks read for each other: "), (5.0, 2, "Each rank reads by itself: ")):
        _auto._measured.clear()
        measured = planted(1.0, 2.0, send)
        reports = loaded(saved(), dtype=dtype)
        assert sum(report.bytes_read for report in reports) == times * ROWS.nbytes
        assert all(report.exchange.startswith(start) and report.exchange in str(report) for report in reports)
        assert sorted(measured) == sorted([1.0, 2.0, send] * 2)


def test_what_was_measured_is_remembered_for_the_process(planted: Any) -> None:
    storage = saved()
    planted(1.0, 1.0, 0.5)
    first = loaded(storage)
    measured = planted()
    assert [report.exchange for report in loaded(storage)] == [report.exchange for report in first]
    assert measured == []


def test_explain_says_what_a_load_decides_and_why(planted: Any) -> None:
    storage, targets = saved(), [replica(rank) for rank in range(2)]
    before = st.explain_ranks(targets, storage)
    assert "A load will measure speeds first" in str(before)
    planted(1.0, 1.0, 5.0)
    reports = loaded(storage)
    after = st.explain_ranks(targets, storage)
    assert after.exchange == reports[0].exchange and after.exchange in str(after)
    assert [one.cost.bytes_wanted for one in after.reads if one.cost] == [report.bytes_read for report in reports]


def test_what_the_caller_says_needs_no_reason(planted: Any) -> None:
    measured = planted()
    for exchange in ("always", "never"):
        assert {report.exchange for report in loaded(saved(), exchange=exchange)} == {""}
    assert measured == []


@pytest.mark.parametrize(("bound", "most"), [("_WORTH_BYTES", ROWS.nbytes), ("_WORTH_BYTES_A_SHARD", ROWS.nbytes // 2)])
def test_little_is_not_measured(planted: Any, monkeypatch: pytest.MonkeyPatch, bound: str, most: int) -> None:
    measured = planted()
    monkeypatch.setattr(_auto, bound, most)
    (report, _) = loaded(saved())
    assert (measured, report.exchange) == ([], "Ranks read for each other, since storage is remote.")


def test_a_sample_that_can_not_be_read_fails_every_rank(planted: Any) -> None:
    planted(1.0, 1.0, 1.0)

    def broken(call: st.testing.Call) -> None:
        if call.method == "open" and "-of-" in call.name:
            raise st.errors.StorageError("the medium is gone")

    storage = WatchedStorage(saved().inner, before=broken)
    target = [replica(rank) for rank in range(2)]

    def on_rank(world: st.World) -> bool:
        with pytest.raises(st.errors.RemoteError):
            st.load(target[world.rank], storage, world=world, options=st.LoadOptions(), donate=True)
        return True

    assert st.simulate(2, on_rank) == [True, True]
    assert not any(tree["w"].data.any() for tree in target)


@pytest.mark.parametrize(
    ("hosts", "reread", "together"), [("aaaa", 100.0, False), ("aaaa", 1.0, True), ("abcd", 100.0, True)]
)
def test_a_second_read_on_one_machine_may_come_from_its_cache(hosts: str, reread: float, *, together: bool) -> None:
    parts = [st.layouts.shard_columns(list(replica(rank).values()), rank) for rank in range(4)]
    columns = st.layouts.join_columns(parts)
    speeds = _auto.Speeds(tuple(hosts), (1.0,) * 4, (reread,) * 4, (10.0,) * 4)
    plan = st.plans.plan_exchange(columns, 4)
    assert _auto.cheaper_choice(plan, speeds).together is together


@pytest.mark.parametrize("is_cut", [True, False])
def test_ranks_sample_other_bytes(is_cut: bool) -> None:
    size = ROWS.nbytes // 4
    shards = [list(replica(rank).values()) for rank in range(4)]
    worlds = st.simulate(4, lambda world: _auto._sample(shards[world.rank], world, size, is_cut=is_cut))
    assert [sum(map(_auto.data_bytes, sample)) for sample in worlds] == [size if is_cut else 4 * size] * 4
    spans = {(one.flattened_range.start, one.flattened_range.stop) for (one,) in worlds if one.flattened_range}
    assert len(spans) == (4 if is_cut else 0)
