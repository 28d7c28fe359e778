"""What a load reads: every requested byte once, from the byte that holds it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.layouts import ShardColumns, join_columns, shard_columns
from shardtree.mapping import is_main_replica
from shardtree.plans import LoadPlan, Runs, StoredChunks, plan_load, runs_plan
from shardtree.testing import Layout, check_load_plan, cut, layouts, shapes

SMALL = shapes(max_axes=3, sizes=(1, 2, 3, 4, 0))
DTYPES = st.sampled_from([torch.int8, torch.int16, torch.complex64])
Request = tuple[ShardColumns, StoredChunks]


def columns_of(key: str, layout: Layout, dtype: torch.dtype, rank: int) -> ShardColumns:
    return shard_columns(cut(layout, key, torch.zeros(layout.global_shape, dtype=dtype), rank), rank)


def stored(parts: list[tuple[Layout, torch.dtype]], order: list[int], files: int) -> StoredChunks:
    """Return the main replicas one after the other, in some order, over some files; each file begins with 24 bytes."""
    rows = [
        (number, piece, prod(piece.shape) if piece.flat is None else piece.flat[1] - piece.flat[0], dtype.itemsize)
        for number, (layout, dtype) in enumerate(parts)
        for piece in layout.pieces
        if is_main_replica(piece.replica)
    ]
    rows = [rows[place % len(rows)] for place in dict.fromkeys(place % len(rows) for place in order)] if rows else []
    ends, found = [24] * files, []
    for place, (number, piece, elements, size) in enumerate(rows):
        file = place % files
        found.append((number, file, ends[file], *((-1, -1) if piece.flat is None else piece.flat)))
        ends[file] += elements * size
    key, file, byte, start, stop = np.array(found, dtype=np.int64).reshape(-1, 5).T
    axes = max([1, *(len(piece.shape) for _, piece, _, _ in rows)])
    offset = [[0] * (axes - len(piece.offset)) + list(piece.offset) for _, piece, _, _ in rows]
    shape = [[1] * (axes - len(piece.shape)) + list(piece.shape) for _, piece, _, _ in rows]
    boxes = (np.array(column, dtype=np.int64).reshape(-1, axes) for column in (offset, shape))
    return StoredChunks(key, *boxes, start, stop, file, byte)


@st.composite
def requests(draw: st.DrawFn, *, complete: bool = False) -> Request:
    """Return one rank's shards of one or two tensors, and where the tensors lie in files, in another layout."""
    wanted, kept = [], []
    for key in "ab"[: draw(st.integers(1, 2))]:
        shape, dtype = draw(SMALL), draw(DTYPES)
        wanted.append(columns_of(key, draw(layouts(shape, 2)), dtype, 0))
        kept.append((draw(layouts(shape, 3)), dtype))
    order = draw(st.permutations(range(24)))
    if not complete:
        order = order[: draw(st.integers(1, 24))]
    columns = join_columns(wanted)
    named = [part for key, part in zip("ab", kept, strict=False) if key in columns.keys]
    return columns, stored(named, list(range(1000)) if complete else order, draw(st.integers(1, 2)))


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
    shuffled = StoredChunks(*(getattr(chunks, name)[np.array(rows, dtype=np.int64)] for name in StoredChunks.__slots__))
    one, other = plan_load(columns, chunks, shortest_run=8), plan_load(columns, shuffled, shortest_run=8)
    assert one.bytes_read == other.bytes_read
    for name in Runs.__slots__:
        assert getattr(one.runs, name).tolist() == getattr(other.runs, name).tolist()


def test_runs_by_themselves_make_a_plan() -> None:
    column = np.array([8, 0, 4])
    plan = runs_plan(Runs(file=column * 0, byte=column, target=column * 0, target_byte=column, length=column * 0 + 4))
    assert (plan.runs.byte.tolist(), plan.runs.length.tolist(), plan.bytes_read) == ([0], [12], 12)
