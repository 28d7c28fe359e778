"""The benchmark runs, checks what everybody loaded, and prints a row for everybody; nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks._contenders import LOAD, LOAD_COLUMNS, LOAD_NEW, RAW, SAVE, Contender, contenders
from benchmarks._report import BARS, Row, rows
from benchmarks._rounds import _round
from benchmarks._work import Work, work

REPOSITORY = Path(__file__).parents[2]
TINY = ["--size", "20KB", "--tensors", "3", "--rounds", "1", "--tries", "1"]


def places(ranks: int) -> set[tuple[str, str]]:
    """Return every (operation, row) that has to be printed."""
    everybody = contenders(ranks)
    return {(SAVE, one.name) for one in everybody} | {place for one in everybody for place in one.loads}


@pytest.mark.torchrun
def test_it_prints_a_row_for_everybody(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "benchmarks", *TINY, "--dir", str(tmp_path), "--json", str(numbers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table = [Row(**row) for row in json.loads(numbers.read_text())]
    for processes in (1, 2):
        assert {(row.operation, row.name) for row in table if row.processes == processes} == places(processes)
    assert all(row.seconds > 0 and row.name in done.stdout for row in table)
    assert [path.name for path in tmp_path.iterdir()] == ["numbers.json"]


def test_every_bar_has_its_row() -> None:
    assert {(operation, name) for name, bars in BARS.items() for operation in bars} <= places(2)
    assert not any(operation == LOAD_COLUMNS for operation, _ in places(1))


def test_ratios_are_ours_by_theirs_and_a_round_that_is_slow_for_all_changes_none() -> None:
    seconds = {(operation, name): [1.0, 9.0, 1.0] if name == RAW else [1.2, 10.8, 1.2] for operation, name in places(1)}
    table = rows(1, 10**9, seconds)
    raw = {row.operation: row for row in table if row.name == RAW}
    assert [raw[operation].checked for operation in (SAVE, LOAD, LOAD_NEW)] == pytest.approx([1.2] * 3)
    assert (raw[SAVE].passed, raw[LOAD].passed, raw[LOAD_NEW].passed) == (True, True, None)
    assert raw[SAVE].speed == 1.0


def test_a_contender_that_loads_something_else_is_found(tmp_path: Path) -> None:
    def lazy(mine: Work, folder: Path) -> dict[str, torch.Tensor]:
        return mine.targets

    mine = work(0, 1, tmp_path, size=1000, tensors=2)
    liar = Contender("liar", lambda mine, folder: None, {(LOAD, "liar"): lazy})
    with pytest.raises(ValueError, match="was loaded wrong"):
        _round(mine, (liar,), check=True, tries=1)
