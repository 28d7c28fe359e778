"""The benchmark of asynchronous saves runs and tells of everybody, and reads what was saved; nothing is timed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks._async_contenders import DCP_THREAD_STAGED, MEGATRON, OURS, OURS_UNCOPIED, Save, everybody
from benchmarks._work import Work, work
from benchmarks.async_save import COPY, MOST_COPIES, Job, Measured, bars_of, main, measured

TINY = Job(2000, 2, 2, 2, ())


@pytest.mark.torchrun
@pytest.mark.exhaustive
def test_it_prints_a_row_for_everybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"│ {name} ") >= 1 for name in (COPY, OURS_UNCOPIED, DCP_THREAD_STAGED))
    assert "Error" not in printed
    assert list(tmp_path.iterdir()) == []


def measured_here(tmp_path: Path, contenders: dict[str, Save]) -> Measured:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        return measured(work(0, 1, tmp_path, size=TINY.size, tensors=TINY.tensors), contenders, TINY)
    finally:
        dist.destroy_process_group()


def test_who_fails_gets_a_row_that_says_why(tmp_path: Path) -> None:
    found = measured_here(tmp_path, everybody([OURS]) | {"broken": lambda mine, folder: 1 // 0})
    assert found.errors == {"broken": "ZeroDivisionError: integer division or modulo by zero"}
    assert [len(taken) for taken in found.seconds.values()] == [2, 0]
    bars = bars_of(found, 1)
    assert [(bar.beside, bar.most) for bar in bars] == [(COPY, MOST_COPIES), ("broken", 1.0)]
    assert bars[1].passed is None and "ZeroDivisionError" in bars[1].note


def test_who_saves_something_else_is_found_out(tmp_path: Path) -> None:
    ours = everybody([OURS])[OURS]

    def late(mine: Work, folder: Path) -> Any:
        wait, commit = ours(mine, folder)
        for tensor in mine.rows.values():
            tensor.add_(1)  # so that what is read isn't what it was
        return wait, commit

    found = measured_here(tmp_path, {"late": late})
    assert "isn't what was saved" in found.errors["late"]


def test_who_saves_nothing_is_found_out(tmp_path: Path) -> None:
    ours = everybody([OURS])[OURS]

    def nothing(mine: Work, folder: Path) -> Any:
        wait, commit = ours(mine, folder)
        return wait, lambda: (commit(), shutil.rmtree(folder))

    assert measured_here(tmp_path, {"nothing": nothing}).errors.keys() == {"nothing"}


@pytest.mark.torchrun
@pytest.mark.exhaustive
def test_megatron_takes_part(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = measured_here(tmp_path, everybody([MEGATRON]))
    assert not found.errors and len(found.seconds[MEGATRON]) == TINY.rounds
