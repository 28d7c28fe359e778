"""The benchmark runs, checks what everybody loaded, and prints a row for everybody; nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._bars import Bar
from benchmarks._contenders import (
    HASH,
    LOAD,
    LOAD_COLUMNS,
    LOAD_NEW,
    OURS,
    OURS_UNCHECKED,
    RAW,
    SAFETENSORS,
    SAVE,
    Contender,
)
from benchmarks._peers import everybody, missing
from benchmarks._report import BARS, bars_of, rows
from benchmarks._rounds import _round, is_enough
from benchmarks._work import Work, work
from benchmarks.roundtrip import _chosen

REPOSITORY = Path(__file__).parents[2]
TINY = ["--size", "20KB", "--tensors", "3", "--rounds", "1", "--tries", "1"]


def places(ranks: int) -> set[tuple[str, str]]:
    """Return every (operation, row) that has to be printed."""
    found = {(SAVE, one.name) for one in everybody(ranks)} | {place for one in everybody(ranks) for place in one.loads}
    return {place for place in found if place[0] != HASH}


def asked(ranks: int) -> set[tuple[str, str]]:
    """Return every (operation, row) that has a bar."""
    return {(operation, name) for operation, name in places(ranks) if operation in BARS.get(name, {})}


@pytest.mark.exhaustive
@pytest.mark.torchrun
def test_it_prints_a_row_for_everybody_and_every_bar(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "benchmarks.roundtrip", *TINY, "--dir", str(tmp_path), "--json", str(numbers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = [Bar(**bar) for bar in json.loads(numbers.read_text())]
    for processes in (1, 2):
        job = f" 2e-05 GB, {processes} process{'es' * (processes > 1)}"
        told = {(bar.operation.removesuffix(job), bar.beside) for bar in found if bar.operation.endswith(job)}
        assert told == asked(processes) | {(SAVE, name) for name in missing(processes)}
        checked = {bar.operation for bar in found if bar.operation.endswith(f"{job}, checksums on")}
        assert len(checked) == 2 + processes
    assert all(bar.ours > 0 and (bar.note if bar.other is None else bar.other > 0) for bar in found)
    assert all(name in done.stdout for _, name in places(2))
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


def test_who_takes_part_can_be_chosen() -> None:
    names = [one.name for one in _chosen([SAFETENSORS], 2)]
    assert sorted(names) == sorted([RAW, OURS, OURS_UNCHECKED, SAFETENSORS])
    assert len(_chosen([], 1)) == 3
    assert [one.name for one in _chosen(None, 1)] == [one.name for one in everybody(1)]


def test_every_bar_has_its_row() -> None:
    there = {(operation, name) for name, bars in BARS.items() if name not in missing(2) for operation in bars}
    assert there <= places(2)
    assert not any(operation == LOAD_COLUMNS for operation, _ in places(1))


def test_ratios_are_ours_by_theirs_and_a_round_that_is_slow_for_all_changes_none() -> None:
    seconds = {(operation, name): [1.0, 9.0, 1.0] if name == RAW else [1.2, 10.8, 1.2] for operation, name in places(1)}
    table = rows(1, 10**9, seconds)
    raw = {row.operation: row for row in table if row.name == RAW}
    assert [raw[operation].checked for operation in (SAVE, LOAD, LOAD_NEW)] == pytest.approx([1.2] * 3)
    assert (raw[SAVE].passed, raw[LOAD].passed, raw[LOAD_NEW].passed) == (False, False, None)
    assert raw[SAVE].speed == 1.0


def test_checksums_are_compared_with_none_in_one_process_and_with_raw_and_the_hash_in_two() -> None:
    for ranks in (1, 2):
        seconds = {place: [1.0] for place in places(ranks)} | {(HASH, RAW): [0.5]}
        seconds |= {(operation, OURS): [1.2] for operation in (SAVE, LOAD, LOAD_NEW)}
        found = {bar.beside: bar for bar in bars_of("1 GB", ranks, seconds) if bar.operation.startswith("save 1 GB, ")}
        alone, both = found["the same without"], found["raw, and the hash alone"]
        assert (alone.figure, both.figure) == pytest.approx((1.2, 0.8))
        assert (alone.passed, both.passed) == ((False, None) if ranks == 1 else (None, True))


@pytest.mark.slow
def test_a_contender_that_loads_something_else_is_found(tmp_path: Path) -> None:
    def lazy(mine: Work, folder: Path) -> dict[str, torch.Tensor]:
        return mine.targets

    mine = work(0, 1, tmp_path, size=1000, tensors=2)
    liar = Contender("liar", lambda mine, folder: None, {(LOAD, "liar"): lazy})
    with pytest.raises(ValueError, match="was loaded wrong"):
        _round(mine, (liar,), check=True, tries=1)


@pytest.mark.parametrize(
    ("seconds", "tries", "enough"),
    [
        ([], 3, False),
        ([0.3, 0.3], 3, False),
        ([0.3, 0.305, 0.31], 3, True),
        ([0.3, 1.2, 0.31], 3, False),
        ([0.3, 1.2, 0.31, 0.3], 3, True),
        ([1.2, 1.22, 0.31, 0.3], 3, False),
        ([0.3] + [1.2] * 11, 3, True),
        ([0.3, *[4.95] * 4], 3, True),
        ([0.3], 1, True),
        ([5.1], 3, True),
        ([4.9], 3, False),
    ],
)
def test_tries_end_when_the_three_fastest_agree(seconds: list[float], tries: int, enough: bool) -> None:
    assert is_enough(seconds, tries) == enough
