"""explain says what a load would do: the same problems in the same words, and the bytes that it would read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtree as st
from shardtree.core.plans import read_rounds
from shardtree.errors import (
    KeyMismatch,
    StrategyError,
)
from shardtree.shell.storage import _blocks
from shardtree.storage import MemoryStorage, Storage
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import Layout, cut, layouts
from tests.options import load_keywords
from tests.shell.checkpoint.parts import ALL_FORMATS, counted, saved, whole

Explain = Callable[..., st.plans.Explanation]


def payload(counts: dict[str, int], folder: Storage) -> int:
    """Return how much was read of files that hold tensors."""
    return sum(size for name, size in counts.items() if "-of-" in name or name.startswith(("w/", "v/")))


@pytest.fixture(autouse=True)
def _no_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the small files of these tests as large ones, of which not each touched block is read whole."""
    monkeypatch.setattr(_blocks, "_SMALL_FILE_BYTES", 0)


# The law: what a load reads is what was foretold.


def check_foretold(
    targets: Sequence[Any], folder: Storage, explain: Explain = st.explain_ranks, **options: Any
) -> None:
    """Raise unless each rank reads as many bytes as was said."""
    watched = counted(folder)
    explanation = explain(targets, watched, validate_access_integrity=False, **load_keywords(**options))
    index = dict(watched.counts)
    assert explanation.ok, str(explanation)
    assert not payload(index, folder), f"explaining read tensors: {index}"
    places = [counted(folder) for _ in targets]
    reports: list[st.storage.ReadReport] = [st.storage.ReadReport()] * len(targets)

    def load(world: st.World) -> None:
        rank = world.rank
        st.load(
            targets[rank],
            places[rank],
            world=world,
            validate_access_integrity=False,
            **load_keywords(report=lambda report: reports.__setitem__(rank, report), **options),
        )

    st.simulate(len(targets), load)
    for foretold, report, place in zip(explanation.reads, reports, places, strict=True):
        cost = foretold.cost
        assert cost is not None
        assert cost.bytes_wanted == report.bytes_read, f"{foretold}: {report.bytes_read} bytes were loaded"
        found = payload(place.counts, folder)
        assert cost.bytes_read == found, f"{foretold}: {found} bytes were read"
        moved = (report.bytes_sent, report.bytes_received)
        assert (foretold.sent, foretold.received) == moved, f"{foretold}: {moved} bytes were sent and received"


def trees(layout: Layout, tensor: torch.Tensor) -> list[dict[str, Any]]:
    """Return each rank's tree."""
    return [
        {f"{number}": shard for number, shard in enumerate(cut(layout, "w", tensor, rank))}
        for rank in range(layout.ranks)
    ]


def save_as(layout: Layout, tensor: torch.Tensor) -> MemoryStorage:
    folder, parts = MemoryStorage(), trees(layout, tensor)
    st.simulate(layout.ranks, lambda world: st.save(parts[world.rank], folder, world=world))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["whole", "all", None])
@settings(max_examples=12)
@given(data=some.data())
def test_explain_foretells_each_byte(verify: Any, data: some.DataObject) -> None:
    shape = (4, 6, data.draw(some.sampled_from([3_000, 20_000]), label="length"))
    before, after = (data.draw(layouts(shape, ranks)) for ranks in (2, 3))
    tensor = torch.zeros(shape)
    options = {"exchange": data.draw(some.sampled_from(["never", "always"])), "verify": verify}
    check_foretold(trees(after, tensor), save_as(before, tensor), **options)


ROWS = torch.arange(600_000.0).view(300, 2000)
PART = {"w": whole("w", ROWS[:, :500].contiguous(), (1, 0, 4))}


def test_the_law_catches_checks_of_hashes_that_are_forgotten() -> None:
    def forgetful(targets: Sequence[Any], folder: Storage, **options: Any) -> st.plans.Explanation:
        return st.explain_ranks(targets, folder, **load_keywords(**{**options, "verify": None}))

    folder = saved({"w": whole("w", ROWS)})
    check_foretold([PART], folder, verify="all")
    with pytest.raises(AssertionError, match="bytes were read"):
        check_foretold([PART], folder, forgetful, verify="all")


@pytest.mark.parametrize("exchange", ["never", "always"])
def test_explain_foretells_conversions(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rounds, "__kwdefaults__", {"most_bytes": 500_000})
    folder = saved({key: whole(key, ROWS[:100]) for key in "abcd"})
    target = {key: whole(key, torch.zeros(100, 2000, dtype=dtype)) for key, dtype in zip("abcd", DTYPES, strict=True)}
    check_foretold([target, target], folder, cast=True, exchange=exchange, verify="all")


DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("backend", ALL_FORMATS, ids=lambda backend: backend[0])
def test_each_format_says_what_it_reads(backend: tuple[str, int]) -> None:
    folder = MemoryStorage()
    st.save({"w": whole("w", ROWS), "v": whole("v", ROWS[:2])}, folder, backend)
    for target in (PART, {"w": whole("w", ROWS), "v": whole("v", ROWS[:2])}):
        (reads,) = st.explain(target, folder, validate_access_integrity=False).reads
        reports: list[st.storage.ReadReport] = []
        place = counted(folder)
        st.load(target, place, options=st.LoadOptions(report=reports.append), validate_access_integrity=False)
        assert reads.cost is not None
        assert reads.cost.bytes_wanted == reports[0].bytes_read
        found = sum(place.counts.values())
        assert reads.cost.bytes_wanted <= reads.cost.bytes_read <= found < reads.cost.bytes_read + 100_000


def test_compressed_chunks_are_read_whole(tmp_path: Any) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path, mode="w", zarr_format=3)
    group.create_array("w", data=ROWS.numpy(), chunks=(150, 2000))
    (reads,) = st.explain({"w": whole("w", ROWS[:10].contiguous(), (0, 0, 30))}, tmp_path).reads
    file = tmp_path / "w" / "c" / "0" / "0"
    assert reads.cost == st.plans.ReadCost(80_000, file.stat().st_size, 1, 1)


# What is said.


FOLDER = saved(
    {"model": [whole(f"layers.{n}.weight", ROWS[:4]) for n in range(2)], "rng": st.ShardedObject("rng", 5, (2,), (0,))},
    validate_access_integrity=False,
)


def asked(**changes: Any) -> dict[str, Any]:
    shard = whole("layers.0.weight", torch.empty(4, 2000, device="meta"))
    return {"shard": replace(shard, data=None, **changes)}


def test_all_problems_are_told_at_once_by_explain_and_load() -> None:
    target = {
        "typo": whole("layers.0.wieght", torch.zeros(4, 2000)),
        "shape": whole("layers.1.weight", torch.zeros(5, 2000)),
        "dtype": whole("layers.0.weight", torch.zeros(4, 2000, dtype=torch.float16)),
        "grid": st.ShardedObject("rng", None, (3,), (0,)),
        "object": st.ShardedObject("rnk", None, (2,), (0,)),
    }
    explanation = st.explain(target, FOLDER, validate_access_integrity=False)
    assert explanation.ok is False
    assert len(explanation.unexpected) == len(explanation.mismatches) == 2
    assert explanation.reshaped == (st.objects.ShapeChange("rng", ((2,),), (3,)),)
    with pytest.raises(KeyMismatch) as refused:
        st.load(target, FOLDER, validate_access_integrity=False)
    for problem in explanation.problems:
        assert str(problem) in str(refused.value)
        assert str(problem) in str(explanation)


def test_missing_is_what_no_rank_asks_for() -> None:
    first, second = ({"w": whole(f"layers.{n}.weight", ROWS[:4])} for n in range(2))
    assert st.explain(first, FOLDER).missing == ("layers.1.weight", "rng")
    assert st.explain_ranks([first, second], FOLDER).missing == ("rng",)
    assert st.explain(first, FOLDER).ok


def test_no_process_group_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective was called")

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        for name in ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier", "new_group"):
            monkeypatch.setattr(torch.distributed, name, collective)
        assert st.explain(asked(), FOLDER).ok
        with pytest.raises((AssertionError, st.CheckpointingException)):
            st.load(asked(), FOLDER)
    finally:
        monkeypatch.undo()
        torch.distributed.destroy_process_group()


def test_a_function_of_the_callers_own_is_told_of_without_figures() -> None:
    found = st.explain(asked(), FOLDER, lambda checkpoint, shards: st.storage.ReadReport())
    assert found.ok is None and found.cost is None and found.over_read is None
    assert [one.key for one in found.undecided] == ["sharded_strategy"]
    assert "unknown" in str(found)


def test_whether_tied_weights_are_stored_alike_only_values_decide() -> None:
    folder, tied = MemoryStorage(), torch.zeros(2)
    whole = st.ShardedTensor.from_rank_offsets
    st.save({"a": whole("a", tied), "b": whole("b", tied + 1)}, folder)
    target = {"a": whole("a", tied), "b": whole("b", tied)}
    assert st.explain(target, folder).ok
    told = st.explain(target, folder, donate=True)
    assert told.ok is None and "'b': whether it is stored with the values of 'a'" in str(told)


def test_a_format_that_only_lists_is_told_of_without_figures() -> None:
    row = (StrategyAction.LOAD_METADATA, "safetensors", 1)
    table = default_strategies | {row: lambda checkpoint: dict(default_strategies[row](checkpoint))}
    found = st.explain(asked(), FOLDER, strategies=table)
    assert found.reads[0].cost is None and found.ok is None
    assert [str(one) for one in found.undecided] == [
        "'layers.0.weight': the format does not say whether it is stored whole"
    ]
    assert not st.explain(asked(dtype=torch.int8), FOLDER, strategies=table).ok


def test_a_format_that_lists_nothing_can_not_be_explained() -> None:
    table = {row: fn for row, fn in default_strategies.items() if row[0] is not StrategyAction.LOAD_METADATA}
    with pytest.raises(StrategyError, match="load_metadata"):
        st.explain(asked(), FOLDER, strategies=table)
    assert st.load(asked(), FOLDER, strategies=table)["shard"].shape == (4, 2000)
    with pytest.raises(StrategyError, match="load_metadata"):
        st.load(asked(), FOLDER, strategies=table, cast=True)


def test_one_rank_of_several_is_told_of_explain_ranks() -> None:
    quarter = {"w": whole("layers.0.weight", ROWS[:2], (0, 0, 4))}
    alone = str(st.explain(quarter, FOLDER))
    assert "This is one rank's target: if others load the rest, pass all of them to `explain_ranks`." in alone
    assert "explain_ranks" not in str(st.explain_ranks([quarter] * 2, FOLDER))
