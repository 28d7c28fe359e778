"""The benchmark of fingerprints runs and prints a row for everybody; nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fingerprint import COPY, HASH, SUM, main


def test_it_prints_a_row_for_everybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "64KB", "--rounds", "1", "--threads", "1", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f" {name} ") == 7 + (name == SUM) for name in (SUM, COPY, HASH))
    assert all(name in printed for name in ("save, fingerprint=True", "verify"))
    assert list(tmp_path.iterdir()) == []
