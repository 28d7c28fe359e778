"""Plans that are carried out: the right bytes in the right places, and what each degree of checking finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core import limits
from shardtree.core.plans import LoadPlan, Runs, StoredChunks, plan_load, runs_plan
from shardtree.errors import CorruptCheckpoint, MetadataError, StorageError
from shardtree.layouts import ShardColumns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.shell.storage import BLOCK_BYTES, Verify, block_hashes, fetch, fetch_from_memory
from shardtree.storage import MemoryStorage, ReadReport, StoredFile
from shardtree.stores._fsspec import FsspecStorage
from shardtree.testing import random_bits
from tests.core.trees.samples import assert_caught
from tests.shell.storage.threads import torch_threads

ROWS, COLUMNS = 1024, 300  # of int32: 4 blocks and a bit, in which rows of a column slice are short
START = 100  # bytes before the tensor
LONG = bytes(4 * 1024 * 1024)  # an end that makes the file a large one, of which less is checked
WHOLE = random_bits((ROWS, COLUMNS), torch.int32, seed=1)
VERIFY: tuple[Verify, ...] = (None, "whole", "all")


@dataclass(frozen=True)
class Stored:
    """A file that holds one tensor behind a few bytes of something else, and what the index says of it."""

    storage: MemoryStorage
    file: StoredFile
    chunks: StoredChunks


def stored(flip: int | None = None, *, end: bytes = b"the end") -> Stored:
    """Return the file, with one bit of it flipped after its hashes were taken."""
    data = bytearray(bytes(range(START)) + WHOLE.numpy().tobytes() + end)
    hashes = block_hashes([memoryview(bytes(data))])
    if flip is not None:
        data[flip // 8] ^= 1 << flip % 8
    storage = MemoryStorage()
    storage.write("f", [memoryview(bytes(data))], durable=False)
    return Stored(storage, StoredFile("f", len(data), hashes), one_chunk((ROWS, COLUMNS), START))


def one_chunk(shape: tuple[int, int], byte: int) -> StoredChunks:
    zero = np.zeros(1, dtype=np.int64)
    return StoredChunks(
        zero, np.zeros((1, 2), dtype=np.int64), np.array([shape]), zero - 1, zero - 1, zero, zero + byte
    )


Span = tuple[int, int]


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[Span, Span]]:
    """Return a few boxes of the tensor: rows, columns, corners, all of it; they may overlap."""

    def span(size: int) -> Span:
        low, high = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
        return draw(st.sampled_from([(0, size), (low, high)]))

    return [(span(ROWS), span(COLUMNS)) for _ in range(draw(st.integers(1, 3)))]


def request(parts: list[tuple[Span, Span]]) -> ShardColumns:
    shards = [
        ShardedTensor("w", None, torch.int32, (bottom - top, right - left), (ROWS, COLUMNS), (top, left), None)
        for (top, bottom), (left, right) in parts
    ]
    return shard_columns(shards)


@pytest.fixture(autouse=True, scope="module")
def _small_windows() -> Iterator[None]:
    """Have several threads take turns in files of few blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "STEP_BYTES", BLOCK_BYTES)
        patch.setattr(limits, "WINDOW_BYTES", 2 * BLOCK_BYTES)
        yield


def fetched(
    source: Stored, plan: LoadPlan, sizes: list[int], verify: Verify, threads: int = 1
) -> tuple[list[torch.Tensor], ReadReport, int]:
    memories = [torch.full((size,), 0xEE, dtype=torch.uint8) for size in sizes]
    told: list[int] = []
    with torch_threads(threads):
        report = fetch(source.storage, {0: source.file}, plan, memories, verify=verify, progress=told.append)
    return memories, report, sum(told)


SHORTEST = st.sampled_from([1, 2000, 2**20])


def fills_targets(
    parts: list[tuple[Span, Span]], shortest_run: int, verify: Verify, threads: int = 1, shift: int = 0
) -> None:
    source, columns = stored(), request(parts)
    plan = plan_load(columns, source.chunks, shortest_run=shortest_run)
    if shift:
        plan = replace(plan, runs=replace(plan.runs, byte=plan.runs.byte + shift))
    memories, report, told = fetched(source, plan, [int(size) * 4 for size in columns.elements], verify, threads)
    for ((top, bottom), (left, right)), memory in zip(parts, memories, strict=True):
        expected = WHOLE[top:bottom, left:right].contiguous()
        same = memory.numpy().tobytes() == expected.numpy().tobytes()
        assert same, "a target has other bytes"  # pytest would compare megabytes line by line to show where
    assert report.bytes_read == told == plan.bytes_read
    assert report.files == int(plan.bytes_read > 0)
    if verify is None:
        assert report.blocks_checked == 0
    if verify == "all":
        assert report.blocks_unchecked == 0


THREADS = st.sampled_from([1, 2, 4])


@given(boxes(), SHORTEST, st.sampled_from(VERIFY), THREADS)
def test_each_target_gets_its_bytes_and_the_report_counts_them(
    parts: list[tuple[Span, Span]], shortest_run: int, verify: Verify, threads: int
) -> None:
    fills_targets(parts, shortest_run, verify, threads)


def test_filling_catches_a_plan_that_is_shifted_by_a_byte() -> None:
    def law(shift: int, parts: list[tuple[Span, Span]]) -> None:
        fills_targets(parts, 1, None, shift=shift)

    assert_caught(law, 1, boxes())


@given(boxes(), SHORTEST, THREADS)
def test_content_in_memory_fills_targets_as_a_file_does(
    parts: list[tuple[Span, Span]], shortest_run: int, threads: int
) -> None:
    source, columns = stored(), request(parts)
    plan, sizes = plan_load(columns, source.chunks, shortest_run=shortest_run), [int(n) * 4 for n in columns.elements]
    expected, report, _ = fetched(source, plan, sizes, None)
    memories = [torch.full((size,), 0xEE, dtype=torch.uint8) for size in sizes]
    with torch_threads(threads):
        assert fetch_from_memory({0: memoryview(source.storage.read("f"))}, plan, memories) == report
    assert all(map(torch.equal, memories, expected))


@pytest.mark.parametrize("rows", [(0, COLUMNS), (10, 20)], ids=["runs", "pieces"])
def test_content_in_memory_that_is_too_short_is_refused(rows: Span) -> None:
    source, columns = stored(), request([((0, ROWS), rows)])
    plan, memories = plan_load(columns, source.chunks), [torch.zeros(int(columns.elements[0]) * 4, dtype=torch.uint8)]
    end = START + ROWS * COLUMNS * 4 - (COLUMNS - rows[1]) * 4
    fetch_from_memory({0: memoryview(source.storage.read("f"))[:end]}, plan, memories)
    with pytest.raises(StorageError, match="too short"):
        fetch_from_memory({0: memoryview(source.storage.read("f"))[: end - 1]}, plan, memories)


def missing_of(plan: LoadPlan, length: int) -> dict[int, int]:
    """Return how many bytes of each block that a plan's runs touch they leave out."""
    read = np.zeros(length, dtype=np.bool_)
    for byte, size in zip(plan.runs.byte.tolist(), plan.runs.length.tolist(), strict=True):
        read[byte : byte + size] = True
    parts = [read[at : at + BLOCK_BYTES] for at in range(0, length, BLOCK_BYTES)]
    return {number: int((~part).sum()) for number, part in enumerate(parts) if part.any()}


def finds_flips(
    verify: Verify, parts: list[Span], flip: int, *, hides: bool = False, end: bytes = b"the end", threads: int = 1
) -> None:
    """Read rows of a file with a flipped bit, and compare what happens with what this degree promises."""
    source, columns = stored(flip, end=end), request([(rows, (0, COLUMNS)) for rows in parts])
    if hides:
        source = replace(source, file=replace(source.file, hashes=None))
    plan = plan_load(columns, source.chunks)
    missing = missing_of(plan, source.file.length)
    nearly = {number for number, count in missing.items() if count <= 64 * 1024}
    touched = set(missing)
    checked: dict[Any, set[int]] = {None: set(), "whole": nearly if end is LONG else touched, "all": touched}
    damaged = flip // 8 // BLOCK_BYTES
    try:
        _, report, _ = fetched(source, plan, [int(size) * 4 for size in columns.elements], verify, threads)
    except CorruptCheckpoint as error:
        assert damaged in checked[verify]
        assert f"bytes {damaged * BLOCK_BYTES} to" in str(error)
    else:
        assert damaged not in checked[verify]
        assert (report.blocks_checked, report.blocks_unchecked) == (
            len(checked[verify]),
            len(touched - checked[verify]),
        )


ROW = st.integers(0, ROWS)
BITS = st.integers(0, (START + ROWS * COLUMNS * 4 + 7) * 8 - 1)


SPANS = st.lists(st.tuples(ROW, ROW).map(lambda ends: (min(ends), max(ends))), min_size=1, max_size=3)


@given(st.sampled_from(VERIFY), SPANS, BITS, st.sampled_from([b"the end", LONG]), THREADS)
def test_each_degree_finds_the_flipped_bits_that_it_promises_and_no_others(
    verify: Verify, parts: list[Span], flip: int, end: bytes, threads: int
) -> None:
    finds_flips(verify, parts, flip, end=end, threads=threads)


def test_finding_flips_catches_a_read_that_checks_nothing() -> None:
    def law(hides: bool, flip: int) -> None:
        finds_flips("all", [(0, ROWS)], flip, hides=hides)

    assert_caught(law, True, BITS)


@given(BITS, st.sampled_from(["all", "whole"]))
def test_any_flip_in_a_block_that_columns_are_read_from_is_found(flip: int, verify: Verify) -> None:
    source, columns = stored(flip), request([((0, ROWS), (10, 20))])
    plan = plan_load(columns, source.chunks)
    assert plan.strided.file.size
    damaged = flip // 8 // BLOCK_BYTES
    with pytest.raises(CorruptCheckpoint, match=f"bytes {damaged * BLOCK_BYTES} to"):
        fetched(source, plan, [int(columns.elements[0]) * 4], verify)
    fetched(source, plan, [int(columns.elements[0]) * 4], None)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_thread_is_raised(threads: int) -> None:
    source, columns = stored(), request([((0, ROWS), (0, COLUMNS))])
    short = MemoryStorage()
    short.write("f", [memoryview(source.storage.read("f"))[:-100]], durable=False)
    file = StoredFile("f", source.file.length - 100)
    with pytest.raises(StorageError, match="ends at byte"):
        fetched(
            Stored(short, file, source.chunks),
            plan_load(columns, source.chunks),
            [int(columns.elements[0]) * 4],
            None,
            threads,
        )


def test_a_file_without_hashes_is_read_unchecked() -> None:
    source = replace(stored(), file=replace(stored().file, hashes=None))
    columns = request([((0, ROWS), (0, COLUMNS))])
    _, report, _ = fetched(source, plan_load(columns, source.chunks), [ROWS * COLUMNS * 4], "all")
    assert (report.blocks_checked, report.blocks_unchecked) == (0, 5)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("verify", VERIFY)
def test_a_file_of_another_length_is_corrupt(change: int, verify: Verify) -> None:
    source, columns = stored(), request([((0, 1), (0, COLUMNS))])
    file = replace(source.file, length=source.file.length + change)
    with pytest.raises(CorruptCheckpoint, match="'memory:f' has the wrong length"):
        fetched(replace(source, file=file), plan_load(columns, source.chunks), [COLUMNS * 4], verify)


def test_a_plan_that_reads_nothing_opens_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    plan = runs_plan(Runs(none, none, none, none, none))
    assert fetch(MemoryStorage(), {}, plan, []) == ReadReport()


def test_columns_of_one_tensor_fetch_no_other_tensor_and_nothing_twice() -> None:
    counted = Counted()
    before, after = bytes(3 * BLOCK_BYTES), bytes(5 * BLOCK_BYTES)
    data = before + WHOLE.numpy().tobytes() + after
    counted.write("f", [memoryview(data)], durable=False)
    columns = request([((0, ROWS), (10, 20)), ((0, ROWS), (20, 30))])
    plan = plan_load(columns, one_chunk((ROWS, COLUMNS), len(before)))
    assert plan.strided.file.size == 2
    memories = [torch.zeros(ROWS * 10 * 4, dtype=torch.uint8) for _ in range(2)]
    fetch(counted, {0: StoredFile("f", len(data), None)}, plan, memories)
    for left, memory in zip((10, 20), memories, strict=True):
        assert memory.numpy().tobytes() == WHOLE[:, left : left + 10].contiguous().numpy().tobytes()
    assert 0 < sum(end - begin for begin, end in counted.ranges) <= WHOLE.nbytes
    assert all(len(before) <= begin < end <= len(before) + WHOLE.nbytes for begin, end in counted.ranges)


class Counted(FsspecStorage):
    """A remote storage that notes which ranges are asked of it."""

    def __init__(self) -> None:
        root = f"/{uuid4().hex}"
        super().__init__(MemoryFileSystem(), root, f"memory:/{root}")
        object.__setattr__(self, "ranges", [])

    ranges: list[tuple[int, int]]

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.ranges.extend(ranges)
        return super().read_ranges(name, ranges)


def test_a_plan_looks_at_no_memory_but_what_it_names() -> None:
    storage = MemoryStorage()
    storage.write("f", [memoryview(b"0123456789")], durable=False)
    column = lambda number: np.array([number], dtype=np.int64)  # noqa: E731
    plan = runs_plan(Runs(file=column(0), byte=column(2), target=column(1), target_byte=column(0), length=column(3)))
    refused, named = torch.zeros(3, 2).t(), torch.zeros(3, dtype=torch.uint8)
    fetch(storage, {0: StoredFile("f", 10)}, plan, [refused, named, refused])
    assert bytes(named.tolist()) == b"234"
    with pytest.raises(MetadataError, match="not contiguous"):
        fetch(storage, {0: StoredFile("f", 10)}, plan, [named, refused])
