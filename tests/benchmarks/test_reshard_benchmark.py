"""The benchmark of resharding runs, checks what was moved, and prints a row for everybody; nothing is timed."""

from __future__ import annotations

import pytest

from benchmarks._live import CASES, PEER
from benchmarks.reshard import COPY, LAYOUTS, main


def test_it_prints_a_row_for_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "20KB", "--tensors", "2", "--pairs", "4096", "--rounds", "1"]
    assert main([*sizes, "--threads", "1", "--parts", "memory", "plan"]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"│ {name} ") == 3 for name in (COPY, *LAYOUTS))
    assert "plan of 4,096 pairs of chunks" in printed


@pytest.mark.exhaustive
@pytest.mark.torchrun
def test_its_live_part_has_dtensor_beside_it_where_that_can_do_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "1MB", "--tensors", "2", "--rounds", "1", "--parts", "live"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("│ redistribute ") == len(CASES)
    assert printed.count(f"│ {PEER} ") == sum(case.placements is not None for case in CASES)
