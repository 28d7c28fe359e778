"""The benchmark of object stores runs, and prints a row for each measure; nothing is timed."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.exhaustive
def test_whole_models_have_their_rows(tmp_path: Path) -> None:
    # By itself: its processes come from one that has to be started once the environment names the server.
    command = [sys.executable, "-m", "benchmarks.remote_scale", "--quick", "--dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 0, ended.stderr
    rows = ("Hugging Face to torch_dist", "load the same", "load halves", "open a Hugging Face", "verify", "64 KiB")
    assert all(row in ended.stdout for row in rows), ended.stdout
