"""What a load reads: every requested byte once, from the byte that holds it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.plans import LoadPlan, Runs, StoredChunks, plan_load, runs_plan
from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.testing import check_load_plan, cut, layouts, shapes
from tests.laws.test_plan_laws import columns_of, stored_chunks

SMALL = shapes(max_axes=3, sizes=(1, 2, 3, 4, 0))
DTYPES = st.sampled_from([torch.int8, torch.int16, torch.complex64])
Request = tuple[ShardColumns, StoredChunks]


@st.composite
def requests(draw: st.DrawFn, *, complete: bool = False) -> Request:
    """Return one rank's shards of one or two tensors, and where the tensors lie in files, in another layout."""
    wanted, kept = [], []
    for key in "ab"[: draw(st.integers(1, 2))]:
        shape, dtype = draw(SMALL), draw(DTYPES)
        wanted.append(shard_columns(cut(draw(layouts(shape, 2)), key, torch.zeros(shape, dtype=dtype), 0)))
        kept.append(columns_of(draw(layouts(shape, 3)), dtype, key))
    columns = join_columns(wanted)
    chunks = stored_chunks(join_columns([each for each in kept if {*each.keys} <= {*columns.keys}]))
    rows = [row for row in draw(st.permutations(range(len(chunks.key)))) if complete or draw(st.booleans())]
    return columns, of_rows(chunks, rows)


def of_rows(chunks: StoredChunks, rows: list[int]) -> StoredChunks:
    columns: Any = (getattr(chunks, name)[np.array(rows, dtype=np.int64)] for name in StoredChunks.__slots__)
    return StoredChunks(*columns)


SHORTEST = st.sampled_from([1, 4, 16, 2**20])
Plan = Callable[..., LoadPlan]


def reads_every_byte_once(plan: Plan, request: Request, shortest_run: int) -> None:
    columns, chunks = request
    found = plan(columns, chunks, shortest_run=shortest_run)
    check_load_plan(columns, chunks, found)
    assert found.doubled.size == 0
    assert not found.strided.file.size or shortest_run > 1


@given(requests(), SHORTEST)
def test_a_plan_reads_every_requested_byte_once_from_where_it_is(request: Request, shortest_run: int) -> None:
    reads_every_byte_once(plan_load, request, shortest_run)


@given(requests(), SHORTEST)
def test_runs_are_in_file_order_and_can_not_be_joined_further(request: Request, shortest_run: int) -> None:
    runs = plan_load(*request, shortest_run=shortest_run).runs
    rows = list(zip(*(getattr(runs, name).tolist() for name in Runs.__slots__), strict=True))
    assert rows == sorted(rows, key=lambda row: row[:2])
    for (file, byte, target, to, length), following in pairwise(rows):
        assert following[:4] != (file, byte + length, target, to + length)


@given(requests(complete=True))
def test_a_chunk_that_is_stored_twice_is_named(request: Request) -> None:
    columns, chunks = request
    twice = StoredChunks(
        *(np.concatenate([column, column]) for column in (getattr(chunks, name) for name in StoredChunks.__slots__))
    )
    wanted = np.unique(columns.key[columns.elements > 0])
    assert plan_load(columns, twice).doubled.tolist() == wanted.tolist()


@given(requests(), st.randoms(use_true_random=False))
def test_the_order_of_the_index_does_not_matter(request: Request, random: object) -> None:
    columns, chunks = request
    rows = list(range(len(chunks.key)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    shuffled = of_rows(chunks, rows)
    one, other = plan_load(columns, chunks, shortest_run=8), plan_load(columns, shuffled, shortest_run=8)
    assert one.bytes_read == other.bytes_read
    for name in Runs.__slots__:
        assert getattr(one.runs, name).tolist() == getattr(other.runs, name).tolist()


def test_tensors_of_few_axes_are_loaded_beside_those_of_many() -> None:
    vector, matrix = (
        ShardedTensor.from_rank_offsets(key, torch.zeros(size)) for key, size in (("v", 4), ("w", (6, 4)))
    )
    few, many = shard_columns([vector]), shard_columns([vector, matrix])
    assert plan_load(few, stored_chunks(many)).covered.tolist() == [4]
    assert plan_load(many, stored_chunks(few)).covered.tolist() == [4, 0]


def test_runs_by_themselves_make_a_plan() -> None:
    column = np.array([8, 0, 4])
    plan = runs_plan(Runs(file=column * 0, byte=column, target=column * 0, target_byte=column, length=column * 0 + 4))
    assert (plan.runs.byte.tolist(), plan.runs.length.tolist(), plan.bytes_read) == ([0], [12], 12)
