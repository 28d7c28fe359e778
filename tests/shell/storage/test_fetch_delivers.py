"""What is delivered is what was checked: a medium that says one thing once and another the next time is found out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from shardtree.core.geometry import joined_rows, rows_of
from shardtree.core.plans import LoadPlan, Runs, Strided, plan_load
from shardtree.errors import CorruptCheckpoint
from shardtree.layouts import shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.shell.storage import BLOCK_BYTES, Verify, _requests, _strided, block_hashes, fetch, fetch_cost
from shardtree.shell.storage._requests import with_left_out
from shardtree.storage import MemoryStorage, StoredFile
from shardtree.testing import random_bits
from tests.core.trees.samples import assert_caught
from tests.shell.storage.test_fetch import (
    COLUMNS,
    LONG,
    ROWS,
    SHORTEST,
    START,
    WHOLE,
    boxes,
    one_chunk,
    request,
    stored,
)


@dataclass(frozen=True)
class LyingReader:
    """A reader that has one byte wrong in all reads of it but one; what it has read is counted."""

    inner: Any
    byte: int
    honest: int
    reads: list[int]
    sizes: list[int]

    @property
    def length(self) -> int:
        return int(self.inner.length)

    def read_into(self, byte: int, buffers: Sequence[memoryview]) -> None:
        self.inner.read_into(byte, buffers)
        for buffer in buffers:
            self.sizes.append(buffer.nbytes)
            if byte <= self.byte < byte + buffer.nbytes:
                self.reads.append(byte)
                if len(self.reads) - 1 != self.honest:
                    buffer[self.byte - byte] ^= 1
            byte += buffer.nbytes

    def read(self, begin: int = 0, end: int | None = None) -> memoryview:
        data = memoryview(bytearray((self.length if end is None else end) - begin))
        self.read_into(begin, [data])
        return data


@dataclass(frozen=True)
class LyingStorage:
    """A storage of one file that lies."""

    inner: MemoryStorage
    byte: int
    honest: int
    reads: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def where(self, name: str = "") -> str:
        return self.inner.where(name)

    @contextmanager
    def open(self, name: str) -> Iterator[LyingReader]:
        with self.inner.open(name) as reader:
            yield LyingReader(reader, self.byte, self.honest, self.reads, self.sizes)


def delivers_what_was_checked(parts: Any, shortest: int, byte: int, honest: int, verify: Verify, end: bytes) -> None:
    """Raise unless a load from a medium that lies raises, or delivers what was saved."""
    source, columns = stored(end=end), request(parts)
    plan = plan_load(columns, source.chunks, shortest_run=shortest)
    memories = [torch.zeros(int(size) * 4, dtype=torch.uint8) for size in columns.elements]
    storage: Any = LyingStorage(source.storage, byte, honest)
    try:
        fetch(storage, {0: source.file}, plan, memories, verify=verify)
    except CorruptCheckpoint:
        assert len(storage.reads) > (honest == 0), "what was read was right"
        return
    for ((top, bottom), (left, right)), memory in zip(parts, memories, strict=True):
        expected = WHOLE[top:bottom, left:right].contiguous()
        assert memory.numpy().tobytes() == expected.numpy().tobytes(), f"lies delivered, of reads at {storage.reads}"
    assert fetch_cost({0: source.file}, plan, verify=verify).bytes_read == sum(storage.sizes)


CASES = (boxes(), SHORTEST, some.integers(0, START + ROWS * COLUMNS * 4 - 1), some.integers(0, 2))


@given(*CASES, some.sampled_from(["all", "whole"]))
def test_what_is_delivered_is_what_was_checked(parts: Any, shortest: int, byte: int, honest: int, verify: Any) -> None:
    end = LONG if verify == "all" else b"the end"  # by default all that is touched is checked in small files
    delivers_what_was_checked(parts, shortest, byte, honest, verify, end)


@given(*CASES)
def test_so_it_is_where_pieces_reach_far(parts: Any, shortest: int, byte: int, honest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_strided, "_READ_BYTES", 2000)
        delivers_what_was_checked(parts, shortest, byte, honest, "all", b"the end")


def hashed_alone(runs: Runs, file: int, low: Any, high: Any) -> Runs:
    """The planted fault: a read of its own is hashed, and another one delivered."""
    return joined_rows([runs, Runs(low * 0 + file, low, low * 0 - 1, low * 0, high - low)])


@pytest.mark.slow
def test_the_law_catches_a_second_read_that_is_only_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requests, "with_left_out", hashed_alone)

    def law(end: bytes, parts: Any, shortest: int, byte: int, honest: int) -> None:
        delivers_what_was_checked(parts, shortest, byte, honest, "all", end)

    assert_caught(law, LONG, *CASES)


def test_two_reads_of_a_block_that_differ_are_an_error() -> None:
    parts = [((0, ROWS), (0, COLUMNS)), ((0, ROWS), (240, 260))]  # a run, and a piece out of the same blocks
    for honest in (0, 1):
        with pytest.raises(AssertionError, match="lies"):
            delivers_what_was_checked(parts, 2**20, 2 * BLOCK_BYTES, honest, None, LONG)
        delivers_what_was_checked(parts, 2**20, 2 * BLOCK_BYTES, honest, "whole", LONG)


@pytest.mark.parametrize("verify", [None, "whole", "all"])
def test_what_two_targets_want_is_read_once_and_so_is_a_block_of_which_a_part_is_wanted(verify: Verify) -> None:
    for parts in ([((0, ROWS), (0, COLUMNS))] * 2, [((0, 900), (0, COLUMNS))]):
        source, columns = stored(end=LONG), request(parts)
        storage: Any = LyingStorage(source.storage, -1, 0)
        memories = [torch.zeros(int(size) * 4, dtype=torch.uint8) for size in columns.elements]
        fetch(storage, {0: source.file}, plan_load(columns, source.chunks), memories, verify=verify)
        assert sum(storage.sizes) <= -(-WHOLE.nbytes // BLOCK_BYTES) * BLOCK_BYTES


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("far", [40, 1000, 2**22])
def test_pieces_of_every_item_size_are_cut_anywhere(item: int, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_strided, "_READ_BYTES", far)
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64, 16: torch.complex128}[item]
    whole = random_bits((50, 6), dtype, seed=3)
    data = bytes(5) + whole.view(torch.uint8).numpy().tobytes()
    storage = MemoryStorage()
    storage.write("f", [memoryview(data)], durable=False)
    columns = shard_columns([ShardedTensor("w", None, dtype, (48, 3), (50, 6), (1, 2), None)])
    plan: LoadPlan = plan_load(columns, one_chunk((50, 6), 5))
    assert plan.strided.file.size == 1
    parts: Strided = _strided.split_pieces(plan.strided, 2**30)
    assert (_strided.last_byte(parts) - parts.byte <= far).all()
    memory = torch.zeros(48 * 3 * item, dtype=torch.uint8)
    file = StoredFile("f", len(data), block_hashes([memoryview(data)]))
    fetch(storage, {0: file}, plan, [memory], verify="all")
    assert memory.numpy().tobytes() == whole[1:49, 2:5].contiguous().view(torch.uint8).numpy().tobytes()


def test_what_makes_whole_blocks_together_leaves_nothing_out() -> None:
    begin = np.array([0, 100, BLOCK_BYTES + 7])
    size = np.array([100, BLOCK_BYTES + 7 - 100, BLOCK_BYTES - 7])
    zeros = np.zeros(3, dtype=np.int64)
    runs = Runs(zeros, begin, zeros, begin, size)
    assert with_left_out(runs, 0, np.array([0]), np.array([2 * BLOCK_BYTES])) is runs
    both = with_left_out(rows_of(runs, np.array([0, 2])), 0, np.array([0]), np.array([2 * BLOCK_BYTES + 5]))
    assert both.target.tolist() == [0, -1, 0, -1]
    assert both.byte.tolist() == [0, 100, BLOCK_BYTES + 7, 2 * BLOCK_BYTES]
    assert both.length.tolist() == [100, BLOCK_BYTES - 93, BLOCK_BYTES - 7, 5]
