"""Plans: each requested byte is read once from where it is, each shard written once, and writers are level."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree
from shardtree.core.layouts import select_rows
from shardtree.core.plans import LoadPlan, Runs, StoredChunks, level_writes, plan_load
from shardtree.errors import CheckpointingException, ShapeError
from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.shell.table.index import load_from_index, read_index
from shardtree.storage import MemoryStorage, ReadReport
from shardtree.strategies import Checkpoint, Strategies, StrategyAction, default_strategies
from shardtree.testing import Layout, check_load_plan, check_writes, cut, even_layout, layouts
from shardtree.world import simulate

SHAPES = st.sampled_from([(), (0,), (5,), (4, 6), (3, 2, 4), (2, 3, 1, 2)])
DTYPES = st.sampled_from([torch.int8, torch.float32])


def columns_of(layout: Layout, dtype: torch.dtype, key: str = "w") -> ShardColumns:
    whole = torch.zeros(layout.global_shape, dtype=dtype)
    return join_columns([shard_columns(cut(layout, key, whole, rank), rank) for rank in range(layout.ranks)])


def stored_chunks(columns: ShardColumns) -> StoredChunks:
    """Return what a save would store of these shards: the main replicas, one after the other, in a file a rank."""
    main = select_rows(columns, np.flatnonzero(columns.main))
    size, byte = main.elements * main.item_size[main.key], np.zeros(len(main), dtype=np.int64)
    for rank in np.unique(main.rank):
        rows = np.flatnonzero(main.rank == rank)
        byte[rows] = 64 + np.cumsum(size[rows]) - size[rows]
    return StoredChunks(main.key, main.offset, main.shape, main.start, main.stop, main.rank, byte)


def draw_case(data: st.DataObject) -> tuple[ShardColumns, StoredChunks]:
    shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
    one, other = (data.draw(layouts(shape, data.draw(st.integers(1, 4)))) for _ in "ab")
    return columns_of(other, dtype), stored_chunks(columns_of(one, dtype))


@given(data=st.data())
def test_each_requested_byte_is_read_once_from_where_it_is(data: st.DataObject) -> None:
    requests, chunks = draw_case(data)
    shortest_run = data.draw(st.sampled_from([1, 8, 10**6]))
    check_load_plan(requests, chunks, plan_load(requests, chunks, shortest_run=shortest_run))


def one_byte_off(plan: LoadPlan) -> LoadPlan:
    return replace(plan, runs=replace(plan.runs, byte=plan.runs.byte + 1))


def read_twice(plan: LoadPlan) -> LoadPlan:
    doubled = (np.concatenate([getattr(plan.runs, name)] * 2) for name in Runs.__slots__)
    return replace(plan, runs=Runs(*doubled))


def axes_swapped(plan: LoadPlan) -> LoadPlan:
    return replace(plan, strided=replace(plan.strided, target_stride=plan.strided.target_stride[:, ::-1]))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (one_byte_off, "is stored at"),
        (read_twice, "read twice"),
        (axes_swapped, "comes from|read twice"),
    ],
)
def test_the_law_of_reads_catches(fault: Callable[[LoadPlan], LoadPlan], message: str) -> None:
    requests = columns_of(even_layout((4, 6), 2, axis=1), torch.float32)
    chunks = stored_chunks(columns_of(even_layout((4, 6), 2, axis=0), torch.float32))
    plan = plan_load(requests, chunks, shortest_run=10**6 if fault is axes_swapped else 1)
    check_load_plan(requests, chunks, plan)
    with pytest.raises(AssertionError, match=message):
        check_load_plan(requests, chunks, fault(plan))


@st.composite
def many_columns(draw: st.DrawFn) -> tuple[list[Layout], int]:
    ranks = draw(st.integers(1, 6))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    return [draw(layouts(shape, ranks)) for shape in shapes], ranks


def joined(layouts: list[Layout]) -> ShardColumns:
    return join_columns([columns_of(layout, torch.float32, f"w{n}") for n, layout in enumerate(layouts)])


@given(many_columns())
def test_each_shard_is_written_once_and_writers_are_level(case: tuple[list[Layout], int]) -> None:
    columns, ranks = joined(case[0]), case[1]
    writes = level_writes(columns, ranks)
    check_writes(columns, ranks, writes)
    written = int((columns.elements * columns.item_size[columns.key])[writes].sum())
    # Zero-size shards apart, main replicas tile their tensors, so that this is the least that any plan can write.
    assert written == sum(4 * int(np.prod(layout.global_shape)) for layout in case[0])


def all_by_the_first(columns: ShardColumns, ranks: int) -> Any:
    return columns.main & (columns.rank == 0)


def by_every_holder(columns: ShardColumns, ranks: int) -> Any:
    return np.ones(len(columns), dtype=np.bool_)


@pytest.mark.parametrize(("fault", "message"), [(all_by_the_first, "at most"), (by_every_holder, "2 times")])
def test_the_law_of_writes_catches(fault: Callable[[ShardColumns, int], Any], message: str) -> None:
    columns = joined([even_layout((4, 6), 2)] * 6)
    check_writes(columns, 2, level_writes(columns, 2))
    with pytest.raises(AssertionError, match=message):
        check_writes(columns, 2, fault(columns, 2))


def save_half(storage: MemoryStorage) -> None:
    shard = ShardedTensor("w", torch.ones(2, 6), torch.float32, (2, 6), (4, 6), (0, 0), None)
    shardtree.save({"w": shard}, storage, validate_access_integrity=False)


def load_columns(storage: MemoryStorage, strategies: Strategies = default_strategies, **options: Any) -> list[Any]:
    def load(world: Any) -> Any:
        target = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), (1, world.rank, 2), **options)
        return shardtree.load({"w": target}, storage, world=world, strategies=strategies)["w"]

    return simulate(2, load)


def check_refused(load: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Raise unless a load is refused with an error that says so."""
    try:
        loaded = load()
    except error as refusal:
        assert re.search(message, str(refusal)), f"the error says: {refusal}"
        return
    raise AssertionError(f"loaded what is not stored: {loaded}")


def check_uncovered(strategies: Strategies) -> None:
    storage = MemoryStorage()
    save_half(storage)
    check_refused(
        lambda: load_columns(storage, strategies), ShapeError, r"'w' at \(0, 0\): 6 of 12 elements are stored"
    )


UNSTORED: dict[str, tuple[str, int, type[Exception], str]] = {
    "key": ("v", 4, shardtree.errors.KeyMismatch, "'v'"),
    "shape": ("w", 8, ShapeError, r"checkpoint has \(4,\) float32, target asks for \(8,\)"),
}


def check_unstored(strategies: Strategies, kind: str) -> None:
    key, length, error, message = UNSTORED[kind]
    storage = MemoryStorage()
    shardtree.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, storage)
    target = {key: ShardedTensor.from_rank_offsets(key, torch.ones(length))}
    check_refused(lambda: shardtree.load(target, storage, strategies=strategies), error, message)


def test_a_load_that_is_not_covered_is_an_error() -> None:
    check_uncovered(default_strategies)


@pytest.mark.parametrize("kind", UNSTORED)
def test_a_target_that_is_not_stored_is_an_error(kind: str) -> None:
    check_unstored(default_strategies, kind)


def filling(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """The planted fault: zeros where nothing is stored, and nobody hears of it."""
    report = ReadReport()
    for shard in shards:
        shard.data.zero_()
        with suppress(CheckpointingException):
            report += load_from_index(checkpoint, read_index(checkpoint), [shard])
    return report


FILLING: Strategies = {
    row: fn for row, fn in default_strategies.items() if row != (StrategyAction.LOAD_METADATA, "safetensors", 1)
} | {(StrategyAction.LOAD_SHARDED, "safetensors", 1): filling}
"""Without the row that says what is stored, nothing but loading can find that out."""


@pytest.mark.parametrize("check", [check_uncovered, *(partial(check_unstored, kind=kind) for kind in UNSTORED)])
def test_the_law_catches_zeros_for_what_is_not_stored(check: Callable[[Strategies], None]) -> None:
    with pytest.raises(AssertionError, match="loaded what is not stored"):
        check(FILLING)


def test_an_allowed_mismatch_hides_no_gap_in_what_is_stored() -> None:
    storage = MemoryStorage()
    save_half(storage)
    with pytest.raises(ShapeError, match=r"'w' at \(0, 0\): 6 of 12 elements are stored"):
        load_columns(storage, allow_shape_mismatch=True)
