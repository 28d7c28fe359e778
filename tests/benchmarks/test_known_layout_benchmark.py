"""The benchmark of known layouts runs, and with them a rank says less."""

from __future__ import annotations

import re

import pytest

from benchmarks import known_layout


def test_a_rank_that_knows_the_layout_says_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert known_layout.main(["--ranks", "4", "--tp", "2", "--tensors", "20", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    said = re.search(r"bytes that a rank says\D*([\d,]+)\D*([\d,]+)", printed)
    assert said is not None, printed
    exchanged, known = (int(number.replace(",", "")) for number in said.groups())
    assert known < exchanged
    assert "4 ranks, 20 tensors" in printed
