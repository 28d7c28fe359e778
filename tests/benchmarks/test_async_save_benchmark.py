"""The benchmark of asynchronous saves runs and prints a row for everybody; nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks._async_contenders import COPY, DCP_THREAD_STAGED, MEGATRON, OURS, OURS_UNCOPIED, everybody
from benchmarks._work import work
from benchmarks.async_save import _measured, main, table

TINY = ["--size", "2MB", "--tensors", "3", "--rounds", "1"]


@pytest.mark.torchrun
def test_it_prints_a_row_for_everybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [OURS, OURS_UNCOPIED, DCP_THREAD_STAGED, MEGATRON]
    assert main([*TINY, "--processes", "1", "--only", *names, "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"│ {name} ") == 1 for name in (COPY, *names))
    assert "Error" not in printed
    assert list(tmp_path.iterdir()) == []


def test_who_fails_gets_a_row_that_says_why(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        contenders = everybody([OURS]) | {"broken": lambda mine, folder: 1 // 0}
        found = _measured(work(0, 1, tmp_path, size=2000, tensors=2), contenders, 2)
    finally:
        dist.destroy_process_group()
    assert found.errors == {"broken": "ZeroDivisionError: integer division or modulo by zero"}
    assert [len(taken) for taken in found.seconds.values()] == [2, 2, 0]
    assert table(1, found).row_count == 3
