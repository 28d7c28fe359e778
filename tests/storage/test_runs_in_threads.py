"""Runs read by several threads, window by window: the same bytes, hashes and counts as by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import StorageError
from shardtree.plans import Runs, runs_plan
from shardtree.storage import BLOCK_BYTES, MemoryStorage, StoredFile, _fetch, _requests, block_hashes, fetch
from shardtree.storage._threads import in_threads
from tests.trees.samples import assert_caught

LENGTH = 9 * BLOCK_BYTES + 77
DATA = np.random.default_rng(1).integers(0, 256, LENGTH, dtype=np.uint8).tobytes()
FILE = StoredFile("f", LENGTH, block_hashes([memoryview(DATA)]))

Spans = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (_fetch, _requests):
        monkeypatch.setattr(module, "STEP_BYTES", BLOCK_BYTES)
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 * BLOCK_BYTES)
    yield
    torch.set_num_threads(1)


def spans() -> st.SearchStrategy[Spans]:
    """Return byte ranges of the file, in its order; some touch, some overlap, some are of whole blocks."""
    near = st.builds(
        lambda block, off: max(0, block * BLOCK_BYTES + off), st.integers(0, 9), st.sampled_from([0, -1, 5])
    )
    place = near | st.integers(0, LENGTH)
    return st.lists(st.tuples(place, place).map(sorted).map(tuple), max_size=6).map(sorted)


def runs_of(chosen: Spans, first: int = 0) -> Runs:
    byte, end = np.array(chosen, dtype=np.int64).reshape(-1, 2).T
    zero = np.zeros(len(chosen), dtype=np.int64)
    return Runs(zero, byte, first + np.arange(len(chosen)), zero, end - byte)


def blocks_of(chosen: Spans) -> set[int]:
    """Return the blocks that have a byte of any range."""
    spans = (range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)) for begin, end in chosen if begin < end)
    return {block for span in spans for block in span}


def read_by(threads: int, chosen: Spans, drop: int = 0) -> None:
    torch.set_num_threads(threads)
    storage = MemoryStorage()
    storage.write("f", [memoryview(DATA)], durable=False)
    memories = [torch.zeros(end - begin, dtype=torch.uint8) for begin, end in chosen]
    told: list[int] = []
    plan = runs_plan(runs_of(chosen[drop:], drop))
    report = fetch(storage, {0: FILE}, plan, memories, verify="all", progress=told.append)
    assert [bytes(memory.numpy()) for memory in memories] == [DATA[begin:end] for begin, end in chosen]
    assert report.bytes_read == sum(told) == sum(end - begin for begin, end in chosen)
    assert (report.blocks_checked, report.blocks_unchecked) == (len(blocks_of(chosen)), 0)


@pytest.mark.parametrize("threads", [1, 2, 4])
@given(spans())
def test_every_run_is_read_and_every_block_checked(threads: int, chosen: Spans) -> None:
    read_by(threads, chosen)


def test_reading_catches_a_run_that_is_left_out() -> None:
    assert_caught(read_by, 2, spans(), st.just(1))


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_thread_is_raised(threads: int) -> None:
    torch.set_num_threads(threads)
    storage = MemoryStorage()
    storage.write("f", [memoryview(DATA)], durable=False)
    memory = torch.zeros(LENGTH + 10, dtype=torch.uint8)
    with pytest.raises(StorageError, match="ends at byte"):
        fetch(storage, {0: StoredFile("f", LENGTH)}, runs_plan(runs_of([(0, LENGTH + 10)])), [memory])


@pytest.mark.parametrize("begun", [0, 1])
def test_work_is_done_where_no_more_threads_can_be_begun(begun: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process, while an asynchronous save adds up its fingerprints."""
    submit, calls = ThreadPoolExecutor.submit, iter(range(3))

    def refused(*arguments: Any) -> Any:
        if next(calls) >= begun:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(*arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    assert in_threads(abs, [-1, 2, -3], threads=2) == [1, 2, 3]
