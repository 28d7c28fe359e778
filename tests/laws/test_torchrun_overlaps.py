"""Ranks that want overlapping boxes, as real processes: each stored byte is read once, all elements are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick_python.command import torchrun

SCRIPT = Path(__file__).parent / "scripts" / "overlaps.py"

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.mark.parametrize("processes", [3, 4])
def test_processes_read_overlapping_boxes_once(tmp_path: Path, processes: int) -> None:
    done = torchrun(processes, SCRIPT, str(tmp_path), "rows", "columns", "choose")
    assert done.returncode == 0, done.stderr


def test_the_count_sees_processes_that_each_read_their_own(tmp_path: Path) -> None:
    done = torchrun(3, SCRIPT, str(tmp_path), "alone")
    assert done.returncode != 0
    assert "14400000 bytes are loaded for 7200000" in done.stderr
