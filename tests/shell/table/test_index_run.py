"""A box that is one run of one chunk is read without a plan: the same bytes, the same report, the same errors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.plans import plan_load
from shardtree.errors import CheckpointReplaced, CorruptCheckpoint
from shardtree.layouts import shard_columns
from shardtree.shell.table.index import _load, build_index, chunks_of
from shardtree.storage import MemoryStorage, StoredFile
from tests.core.trees.samples import assert_caught
from tests.options import load_keywords


@dataclass
class Case:
    """Stored chunks of one tensor, what it holds, and a box of it."""

    shards: list
    whole: torch.Tensor
    offset: tuple
    shape: tuple


@some.composite
def cases(draw):
    lengths = [draw(some.lists(some.integers(0, 3), min_size=1, max_size=3)) for _ in range(draw(some.integers(0, 3)))]
    spans = [list(pairwise(accumulate(cuts, initial=0))) for cuts in lengths]
    whole = torch.arange(int(np.prod([sum(cuts) for cuts in lengths])), dtype=torch.int16)
    whole = whole.reshape([sum(cuts) for cuts in lengths])
    places = list(product(*spans))
    dropped = draw(some.integers(-3, len(places) - 1))  # what isn't stored is a gap
    shards = [chunk(whole, place) for number, place in enumerate(places) if number != dropped]
    if draw(some.booleans()):
        # Overlaps another: a checkpoint that contradicts itself.
        shards.append(chunk(whole, [(0, draw(some.integers(0, size))) for size in whole.shape]))
    offset = tuple(draw(some.integers(0, size)) for size in whole.shape)
    shape = tuple(draw(some.integers(0, size - low)) for low, size in zip(offset, whole.shape, strict=True))
    return Case(shards, whole, offset, shape)


def chunk(whole, place):
    data = whole[tuple(slice(*span) for span in place)].clone()
    return st.ShardedTensor(
        "w", data, whole.dtype, tuple(data.shape), tuple(whole.shape), tuple(a for a, _ in place), None
    )


def index_of(case):
    columns = shard_columns(case.shards, 0)
    ends = np.cumsum(columns.elements * 2)
    return build_index(columns, np.zeros_like(ends), 64 + ends - columns.elements * 2, files=[StoredFile("f", 10**6)])


def box(case, data=None):
    return st.ShardedTensor("w", data, case.whole.dtype, case.shape, tuple(case.whole.shape), case.offset, None)


def check_run_is_the_plan(single_run, case):
    """Where there is a run, a plan of everything comes to that run and nothing else, and covers the box."""
    if not case.shards:
        return None
    index, shard = index_of(case), box(case)
    file, run = single_run(index, shard) or (None, None)
    if run is not None:
        assert file.name == "f"
        (number,) = index.find_keys(["w"])
        plan = plan_load(shard_columns([shard], 0), chunks_of(index, np.array([number])))
        assert not plan.strided.file.size and not plan.doubled.size and plan.covered.tolist() == [np.prod(case.shape)]
        rows = [getattr(plan.runs, name).tolist() for name in ("file", "byte", "target", "target_byte", "length")]
        assert rows == [[run.file], [run.byte], [0], [0], [run.length]]
    return run


@pytest.mark.slow
@settings(max_examples=200)
@given(cases())
def test_a_run_is_what_a_plan_comes_to(case):
    check_run_is_the_plan(_load.single_run, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_first_element", lambda chunk, offset, box: 0),
        ("_only_chunk", lambda index, first, last, offset, box: first),
    ],
)
def test_the_law_catches(name, broken, monkeypatch):
    monkeypatch.setattr(_load, name, broken)
    assert_caught(check_run_is_the_plan, _load.single_run, cases())


def rows_of(folder, **options):
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4096).reshape(64, 64))}, folder)
    return st.open_checkpoint(folder, **load_keywords(verify=None, **options))["w"].data[3:5]


def test_a_file_that_is_gone_shorter_or_replaced_is_told_so():
    folder = MemoryStorage()
    rows = rows_of(folder)
    (save,) = [name for name in folder.names() if folder.is_folder(name)]
    name = f"{save}/00000-of-00001.safetensors"
    data = folder.read(name)
    folder.remove(name)
    with pytest.raises(CorruptCheckpoint, match="no such file"):
        rows.read()
    folder.write(name, [memoryview(data[:-1])], durable=False)
    with pytest.raises(CorruptCheckpoint, match=f"{len(data) - 1} bytes"):
        rows.read()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(64, 64))}, folder, overwrite=True)
    with pytest.raises(CheckpointReplaced):
        rows.read()
