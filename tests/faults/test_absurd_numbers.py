"""Absurd numbers in the metadata of every format end every call in a result or an error of ours, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.sampling import EXHAUSTIVE, SEED
from tests.fuzz.slots import FORMATS


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [6, pytest.param(400, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("name", FORMATS)
def test_absurd_numbers_are_refused_in_bounded_time_and_memory(name: str, count: int) -> None:
    # In a process of its own, whose memory is limited: a tensor that is made as large as it claims to be ends there.
    command = [sys.executable, "-m", "tests.faults.absurd_numbers", name, str(count), str(SEED)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[:-1] == [], done.stdout
    assert done.stdout.startswith("tried ")
