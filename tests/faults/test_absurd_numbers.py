"""Absurd numbers in the metadata of every format end every call in a result or an error of ours, in bounded memory.

A usual run tries six changes of each format. `-m exhaustive` tries every number of every place of every format's files,
with each absurd number, in parts, each in a process of its own: to run one format's, add ``-k dcp`` or its name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.sampling import EXHAUSTIVE, SEED
from tests.fuzz.slots import FORMATS

PARTS = 24


def found(*arguments: object) -> list[str]:
    """Return what is wrong with the calls on some changes of a format's checkpoints."""
    # In a process of its own, whose memory is limited: a tensor that is made as large as it claims to be ends there.
    command = [sys.executable, "-m", "tests.faults.absurd_numbers", *map(str, arguments)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *wrong, last = done.stdout.splitlines()
    assert last.startswith("tried "), done.stdout
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FORMATS)
def test_absurd_numbers_are_refused_in_bounded_time_and_memory(name: str) -> None:
    assert found(name, 6, SEED) == []


@EXHAUSTIVE
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", FORMATS)
def test_all_absurd_numbers_are(name: str, part: int) -> None:
    assert found(name, 0, SEED, part, PARTS) == []
