"""The benchmark of traces runs: all ways load the same, and its engine's loader is traced there and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import trace
from benchmarks._deepseek import SMALL, shapes_of


@pytest.mark.torchrun
@pytest.mark.exhaustive
def test_it_prints_a_row_for_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["--quick", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(trace.READ) == printed.count(trace.MAPPED) == 3
    assert list(tmp_path.iterdir()) == []


def test_its_engine_loses_nothing() -> None:
    shapes = shapes_of(SMALL)
    first, *others = [trace.traced(shapes, rank, 4) for rank in range(4)]
    assert first.check(*others) == ()
    whole = trace.traced(shapes, 0, 1)
    assert whole.inverse().inverse() == whole
