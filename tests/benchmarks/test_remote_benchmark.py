"""The benchmark of object stores runs, and prints a row for each measure; nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks._bars import run
from benchmarks.remote import bars

pytest.importorskip("obstore")


@pytest.mark.exhaustive
def test_it_prints_a_row_for_every_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bars, ["--quick", "--dir", str(tmp_path)], "benchmarks.remote", None) == 0
    printed = capsys.readouterr().out
    rows = ("save, 50 ms", "load, checked, 0 ms", "columns of saved rows", "requests: open", "extra memory of a load")
    assert all(row in printed for row in rows)
