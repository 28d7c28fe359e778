"""docs/scripts/train_until_told.py: told to stop, the ranks save once, all at the same step, and go on from there."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.quick_python.command import started_torchrun, torchrun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "scripts" / "train_until_told.py"
ONE_RANK_TOLD = Path(__file__).parent / "scripts" / "one_rank_told.py"
pytestmark = [pytest.mark.slow, pytest.mark.torchrun]


def last_steps(output: str) -> dict[int, int]:
    """Return the last step that each rank has printed."""
    return {int(rank): int(step) for rank, step in re.findall(r"rank (\d+) step (\d+)$", output, re.MULTILINE)}


def check_saved_once(run: Path, output: str) -> int:
    """Raise unless a whole checkpoint of the last step of both ranks is there, and no other; return the step."""
    (saved,) = st.CheckpointSeries(run).steps()
    assert last_steps(output) == {0: saved.number, 1: saved.number}
    assert st.verify(run / saved.folder) == ()
    weight = st.load_plain_tensors(run / saved.folder)["weight"]
    assert torch.equal(weight, torch.full((8, 8), float(saved.number)))
    return saved.number


def check_resumes(run: Path, step: int) -> None:
    done = torchrun(2, SCRIPT, str(run), str(step + 2))
    assert sorted(re.findall(r"step (\d+)", done.stdout)) == sorted([str(step + 1), str(step + 2)] * 2), done.stderr


def test_torchrun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # seconds, on a busy machine
    job = started_torchrun(2, SCRIPT, str(tmp_path), str(10**9))
    try:
        assert job.stdout is not None
        begun = ""
        while len(last_steps(begun)) < 2:  # each rank has installed its handler
            begun += job.stdout.readline()
        job.send_signal(signal.SIGTERM)
        rest, errors = job.communicate(timeout=900)
    finally:
        job.kill()
    assert "death signal" in errors
    check_resumes(tmp_path, check_saved_once(tmp_path, begun + rest))


def test_one_rank_is_told_and_all_stop_after_the_same_step(tmp_path: Path) -> None:
    done = torchrun(2, ONE_RANK_TOLD, str(tmp_path), str(100))
    # It was told after it had looked, in its fifth step.
    assert check_saved_once(tmp_path, done.stdout) == 6
