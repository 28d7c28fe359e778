"""docs/scripts/check_my_job.py: a job under FSDP2 and tensor parallelism is found to resume, by a script of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "scripts" / "check_my_job.py"
pytestmark = [pytest.mark.slow, pytest.mark.torchrun]


def output_of(script: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_job_resumes() -> None:
    assert output_of(SCRIPT) == "0 problems in 4 resumptions\n"


def test_a_load_that_forgets_the_data_is_named(tmp_path: Path) -> None:
    forgetful = SCRIPT.read_text().replace('    job["data"].update(loaded["data"])\n', "")
    (tmp_path / SCRIPT.name).write_text(forgetful)
    printed = output_of(tmp_path / SCRIPT.name)
    assert "Mesh(dp=2, tp=1) → Mesh(dp=2, tp=2) 'data': position: not restored; found 0, expected 24" in printed
