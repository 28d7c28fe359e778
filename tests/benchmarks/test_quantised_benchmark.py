"""The benchmark of quantised weights runs, and prints its two bars; nothing is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quantised import main


def test_it_prints_both_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--quick", "--dir", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.count("FP8 by blocks to bfloat16") == 2
    assert list(tmp_path.iterdir()) == []
