"""The benchmark of peak memory runs, sees what a job takes, and counts neither its result nor mapped files."""

from __future__ import annotations

import json
import mmap
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import memory
from benchmarks._peak import Action, peak

MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def taking(nbytes: int, returned: int, rank: int, ranks: int) -> Action:
    def action() -> int:
        for _ in range(30):  # it is looked at now and then, on a busy machine seldom
            torch.ones(nbytes, dtype=torch.uint8)
        return returned

    return action


def mapping(path: Path, rank: int, ranks: int) -> Action:
    def action() -> int:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return len(mapped[:: mmap.PAGESIZE]) * 0

    return action


def failing(rank: int, ranks: int) -> Action:
    raise ValueError("not today")


@pytest.mark.exhaustive
def test_a_passing_copy_is_seen(tmp_path: Path) -> None:
    seen = peak(partial(taking, 80 * MIB, 0), tmp_path)
    assert 60 * MIB < seen.own < 90 * MIB
    assert 79 * MIB < seen.mapped < 90 * MIB


@pytest.mark.slow
def test_what_is_returned_is_not_counted(tmp_path: Path) -> None:
    seen = peak(partial(taking, 80 * MIB, 80 * MIB), tmp_path)
    assert abs(seen.own) < 10 * MIB


@pytest.mark.slow
def test_pages_of_a_mapped_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(50 * MIB))
    seen = peak(partial(mapping, tmp_path / "file"), tmp_path)
    assert seen.own < 5 * MIB
    assert seen.mapped > 45 * MIB


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_rank_that_takes_most_counts(tmp_path: Path) -> None:
    assert peak(partial(taking, 40 * MIB, 0), tmp_path, ranks=2).own > 30 * MIB


def test_a_job_that_fails_is_no_figure(tmp_path: Path) -> None:
    with pytest.raises(EOFError):
        peak(failing, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.torchrun
def test_each_case_has_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    numbers = tmp_path / "numbers.json"
    assert memory.main(["--quick", "--json", str(numbers), "--dir", str(tmp_path / "files")]) == 0
    bars = json.loads(numbers.read_text())
    assert [bar["operation"] for bar in bars] == [f"safetensors: {case.operation}" for case in memory.CASES]
    assert {bar["most"] for bar in bars[:7]} == {memory.MOST}
    assert list((tmp_path / "files").iterdir()) == []
    assert "mapped pages" in capsys.readouterr().out
