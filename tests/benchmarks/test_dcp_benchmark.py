"""The benchmark beside DCP runs, checks what everybody loaded, and prints a row for everybody; nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._contenders import LOAD_COLUMNS, SAVE
from benchmarks.dcp import DCP, OPERATIONS, OURS, contenders, main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.exhaustive
def test_it_prints_a_row_for_everybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "20KB", "--tensors", "3", "--rounds", "1", "--tries", "1", "--processes", "1"]
    assert main([*sizes, "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for one in contenders(1) for _, name in one.loads)
    assert list(tmp_path.iterdir()) == []


def test_everybody_is_compared_with_dcp_in_every_operation() -> None:
    places = {(SAVE, one.name) for one in contenders(2)} | {place for one in contenders(2) for place in one.loads}
    assert {(operation, name) for operation in OPERATIONS for name in (DCP, OURS)} <= places
    assert not any(operation == LOAD_COLUMNS for one in contenders(1) for operation, _ in one.loads)
