"""Ranks that want overlapping boxes: each element is read by one of them, and all get what they asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.core import limits
from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.live import _reading as _exchange
from shardtree.live._simulated import SimulatedWorld
from shardtree.live.resharding._exchange import ExchangePlan, plan_exchange, plan_reads
from shardtree.storage import MemoryStorage
from shardtree.testing import first_difference, random_bits
from shardtree.world import World
from tests.core.trees.samples import assert_caught

Box = tuple[tuple[int, ...], tuple[int, ...]]
Case = tuple[tuple[int, ...], list[list[Box]]]


@some.composite
def cases(draw: some.DrawFn) -> Case:
    """A tensor's shape, and the boxes (offset, shape) that each of some ranks wants."""
    shape = tuple(draw(some.lists(some.integers(1, 7), min_size=1, max_size=3)))

    def box(_: Any) -> Box:
        spans = [sorted(draw(some.tuples(some.integers(0, size), some.integers(0, size)))) for size in shape]
        return tuple(low for low, _ in spans), tuple(high - low for low, high in spans)

    ranks = draw(some.integers(1, 8))
    return shape, [[box(None) for _ in range(draw(some.integers(0, 2)))] for _ in range(ranks)]


def shards_of(shape: tuple[int, ...], boxes: Sequence[Box], dtype: torch.dtype) -> list[st.ShardedTensor]:
    return [
        st.ShardedTensor("w", torch.zeros(size, dtype=dtype), dtype, size, shape, offset, None)
        for offset, size in boxes
    ]


def slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


def wanted_elements(case: Case) -> np.ndarray:
    """Return which elements any rank wants, bool, with the tensor's shape."""
    shape, wanted = case
    found = np.zeros(shape, dtype=bool)
    for offset, size in (box for boxes in wanted for box in boxes):
        found[slices(offset, size)] = True
    return found


STEP_BYTES = 37


class BytesWorld(SimulatedWorld):
    """A rank that sends no values in place of bytes, and in one step no more than it may have in flight."""

    def all_to_all(self, values: Sequence[Any]) -> NoReturn:
        raise AssertionError("what ranks read for each other is sent as bytes")

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        assert sum(map(len, [*outgoing.values(), *incoming.values()])) <= STEP_BYTES
        super().exchange(outgoing, incoming)


class ByAllToAll(SimulatedWorld):
    """A world of a user's own, which has no exchange but the one that every world has."""

    exchange = World.exchange


def check_load(
    load: Callable[..., Any],
    case: Case,
    dtypes: Sequence[torch.dtype],
    stripe_bytes: int,
    replicas: int = 1,
    kind: type[SimulatedWorld] = BytesWorld,
    *,
    step_bytes: int = STEP_BYTES,
    explain: Callable[..., Any] = st.explain_ranks,
) -> None:
    """Raise unless every rank gets its boxes by the bytes that were foretold, and each wanted element is read once."""
    shape, wanted = case[0], case[1] * replicas
    full = random_bits(shape, torch.int16, 5)
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", full)}, folder)
    targets = [
        dict(enumerate(shards_of(shape, boxes, dtypes[rank % len(dtypes)]))) for rank, boxes in enumerate(wanted)
    ]
    keywords: dict[str, Any] = {"validate_access_integrity": False, "cast": True}

    def on_rank(simulated: st.World) -> st.storage.ReadReport:
        world = kind(simulated.rank, simulated._meeting)  # type: ignore[attr-defined]
        reports: list[st.storage.ReadReport] = []
        options = st.LoadOptions(exchange="always", report=reports.append)
        loaded = load(targets[world.rank], folder, world=world, options=options, **keywords)
        for number, shard in targets[world.rank].items():
            expected = full[slices(shard.global_offset, shard.local_shape)].to(shard.dtype)
            assert first_difference(loaded[number], expected) is None
        return reports[0]

    def striped(columns: ShardColumns, ranks: int, **options: Any) -> ExchangePlan:
        return plan_exchange(columns, ranks, stripe_bytes=stripe_bytes, most_cells=10**6, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_exchange, "plan_exchange", striped)
        patch.setattr(_exchange, "plan_reads", partial(plan_reads, stripe_bytes=stripe_bytes, most_cells=10**6))
        patch.setattr(limits, "EXCHANGE_BYTES", step_bytes)
        foretold = explain(targets, folder, options=st.LoadOptions(exchange="always"), **keywords).reads
        found = st.simulate(len(wanted), on_rank)
    assert [(one.cost.bytes_wanted, one.sent, one.received) for one in foretold] == [
        (one.bytes_read, one.bytes_sent, one.bytes_received) for one in found
    ]
    assert len(set(dtypes)) > 1 or sum(one.bytes_read for one in found) == 2 * wanted_elements(case).sum()


DTYPES = some.lists(some.sampled_from([torch.int16, torch.int32]), min_size=1, max_size=3)
CHOSEN = cases(), DTYPES, some.integers(1, 30), some.integers(1, 3)


@pytest.mark.slow
@given(*CHOSEN, some.sampled_from([BytesWorld, ByAllToAll]))
def test_each_wanted_element_is_read_by_one_rank_and_comes_to_all_as_foretold(
    case: Case, dtypes: Sequence[torch.dtype], stripe_bytes: int, replicas: int, kind: type[SimulatedWorld]
) -> None:
    check_load(st.load, case, dtypes, stripe_bytes, replicas, kind)


def test_the_law_of_loads_catches_steps_that_send_too_much() -> None:
    large: Case = ((7, 7), [[((0, 0), (7, 7))]] * 4)  # few of those that are drawn take more than a step
    check_load(st.load, large, [torch.int16], 30)
    with pytest.raises(AssertionError):
        check_load(st.load, large, [torch.int16], 30, step_bytes=10**6)


def test_the_law_of_loads_catches_ranks_that_each_read_their_own() -> None:
    def alone(*arguments: Any, options: st.LoadOptions, **keywords: Any) -> Any:
        return st.load(*arguments, options=st.LoadOptions(exchange="never", report=options.report), **keywords)

    assert_caught(check_load, alone, *CHOSEN)


def test_the_law_of_loads_catches_a_wrong_element() -> None:
    def wrong(*arguments: Any, world: st.World, **keywords: Any) -> Any:
        loaded = st.load(*arguments, world=world, **keywords)
        return {number: data + (world.rank == 1) for number, data in loaded.items()}

    assert_caught(check_load, wrong, *CHOSEN)


def test_the_law_of_loads_catches_boxes_that_are_taken_for_whole() -> None:
    def uncut(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_exchange, "plan_reads", lambda *of, alike, **_: plan_reads(*of, alike=alike, is_cut=False))
            return st.explain_ranks(*arguments, **options)

    assert_caught(partial(check_load, explain=uncut), st.load, *CHOSEN)


def rows(*spans: tuple[int, int], width: int = 1) -> ShardColumns:
    """Return the columns of ranks that each want so many rows of a matrix."""
    shards = [
        st.ShardedTensor("w", None, torch.uint8, (stop - start, width), (20, width), (start, 0), None)
        for start, stop in spans
    ]
    return join_columns([shard_columns([shard], rank) for rank, shard in enumerate(shards)])


def check_level(plan_of: Callable[..., ExchangePlan], case: Case) -> None:
    """Raise if a rank reads over a twentieth more than some rank must, however the reads are shared out."""
    shape, wanted = case
    scale = 1000
    large = [[(tuple(scale * at for at in o), tuple(scale * at for at in s)) for o, s in boxes] for boxes in wanted]
    described = [
        [
            st.ShardedTensor("w", None, torch.uint8, size, tuple(scale * n for n in shape), at, None)
            for at, size in boxes
        ]
        for boxes in large
    ]
    columns = join_columns([shard_columns(shards, rank) for rank, shards in enumerate(described)])
    plan = plan_of(columns, len(wanted), stripe_bytes=1, most_cells=10**6)
    by = np.zeros(shape, dtype=int)
    for rank, boxes in enumerate(wanted):
        mine = wanted_elements((shape, [boxes]))
        by |= mine.astype(int) << rank
    sets, count = np.unique(by[by > 0], return_counts=True)
    # What only ranks of a group want has to be read by these: the busiest of them reads the mean at least.
    groups = range(1, 2 ** len(wanted))
    least = max((count[(sets & ~group) == 0].sum() / group.bit_count() for group in groups), default=0)
    assert plan.shared.bytes_read.max() <= 1.05 * least * scale ** len(shape) + len(wanted)


@given(cases())
def test_no_rank_reads_more_than_level_sharing_leaves_it(case: Case) -> None:
    check_level(plan_exchange, case)


def test_the_law_of_level_reads_catches_ranks_that_each_read_their_own() -> None:
    def alone(columns: ShardColumns, ranks: int, *, stripe_bytes: int, most_cells: int) -> ExchangePlan:
        return plan_exchange(columns, ranks, stripe_bytes=10**12, most_cells=0)

    assert_caught(check_level, alone, cases())


def test_boxes_of_too_many_cells_stay_whole() -> None:
    spans = [(rank, rank + 10) for rank in range(10)]
    few, many = (plan_reads(rows(*spans), 10, most_cells=most) for most in (16, 9))
    assert (few.bytes_read.sum(), many.bytes_read.sum()) == (19, 100)
    assert (len(few.reads), len(many.reads)) == (19, 10)
    assert many.bytes_sent.sum() == 0
