"""One run of bytes is read and checked without a plan: the same bytes, the same report, and no damage passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some

from shardtree.core.plans import Runs, runs_plan
from shardtree.errors import CorruptCheckpoint
from shardtree.shell.storage import BLOCK_BYTES, BlockHasher, _fetch, fetch, fetch_run
from shardtree.shell.storage._blocks import hash_column
from shardtree.storage import MemoryStorage, ReadReport, StoredFile

LARGE = np.random.default_rng(0).integers(0, 256, 18 * BLOCK_BYTES + 1000, dtype=np.uint8)


class Case(NamedTuple):
    """A file's length, a run in it, how it is verified, and where a bit is flipped, None for nowhere."""

    length: int
    byte: int
    nbytes: int
    verify: Any
    damaged: int | None


@some.composite
def cases(draw: some.DrawFn) -> Case:
    # One of a few blocks, which counts as small, and one that doesn't.
    length = draw(some.sampled_from([BLOCK_BYTES // 2, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 7, len(LARGE)]))
    near = some.builds(
        lambda block, by: min(max(block * BLOCK_BYTES + by, 0), length),
        some.integers(0, length // BLOCK_BYTES + 1),
        some.sampled_from([-70_000, -60_000, -1, 0, 1, 60_000, 70_000]),
    )
    begin, end = sorted((draw(near), draw(near)))
    end = min(max(end, begin + 1), length, begin + 3 * BLOCK_BYTES)
    begin = min(begin, end - 1)
    verify = draw(some.sampled_from([None, "whole", "all"]))
    damaged = draw(some.none() | some.integers(max(begin - BLOCK_BYTES, 0), min(end + BLOCK_BYTES, length) - 1))
    return Case(length, begin, end - begin, verify, damaged)


def stored(case: Case) -> tuple[MemoryStorage, StoredFile]:
    """Return a storage with the file, damaged or not, and the file as the index describes it."""
    content = LARGE[: case.length]
    hasher = BlockHasher(case.length)
    hasher.update(memoryview(content))
    file = StoredFile("w", case.length, hash_column(hasher))
    if case.damaged is not None:
        content = content.copy()
        content[case.damaged] ^= 4
    storage = MemoryStorage()
    storage.write("w", [memoryview(content)], durable=False)
    return storage, file


def planned(case: Case) -> tuple[bytes, ReadReport] | None:
    """Return what a plan of that run reads, None where it finds damage."""
    storage, file = stored(case)
    numbers = (np.array([number]) for number in (0, case.byte, 0, 0, case.nbytes))
    memory = torch.zeros(case.nbytes, dtype=torch.uint8)
    try:
        report = fetch(storage, {0: file}, runs_plan(Runs(*numbers)), [memory], verify=case.verify)
    except CorruptCheckpoint:
        return None
    return memory.numpy().tobytes(), report


def direct(case: Case) -> tuple[bytes, ReadReport] | None:
    storage, file = stored(case)
    memory = torch.zeros(case.nbytes, dtype=torch.uint8)
    report = fetch_run(storage, file, case.byte, memory, verify=case.verify)
    return None if report is None else (memory.numpy().tobytes(), report)


def check_same(case: Case) -> None:
    assert direct(case) == planned(case)


@settings(max_examples=60)
@given(cases())
@example(Case(len(LARGE), 5, BLOCK_BYTES, "whole", 2))
def test_a_run_is_read_as_its_plan_is(case: Case) -> None:
    check_same(case)


@pytest.mark.parametrize(
    "broken",
    [
        lambda file, begin, end, verify: range(0),
        lambda file, begin, end, verify: range(begin // BLOCK_BYTES + 1, -(-end // BLOCK_BYTES)),
    ],
    ids=["nothing is checked", "the first block is not checked"],
)
def test_the_law_catches(broken: Callable[..., range], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3 * BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES, "all", BLOCK_BYTES + 2)
    check_same(case)
    monkeypatch.setattr(_fetch, "run_blocks", broken)
    with pytest.raises(AssertionError):
        check_same(case)


def test_another_length_and_a_file_that_is_gone_are_left_to_the_plan() -> None:
    case = Case(3 * BLOCK_BYTES, 5, 10, "whole", None)
    storage, file = stored(case)
    longer, gone = StoredFile("w", case.length + 1, file.hashes), StoredFile("v", case.length, file.hashes)
    for each in (longer, gone):
        assert fetch_run(storage, each, 5, torch.zeros(10, dtype=torch.uint8), verify="whole") is None
