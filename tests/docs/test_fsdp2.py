"""The scripts of docs/fsdp2.md, under torchrun: killed at any time and resumed on another number of processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardtree as st

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "scripts"
pytestmark = pytest.mark.torchrun


# A thread of gloo that drops a tensor while Python ends is ended by it, inside of C++ code that can't be: the process
# aborts after all its work, and torchrun ends the others. Seen on busy machines, up to twice in a row.
_ABORTED = "terminate called without an active exception"
_TRIES = 6


def start(script: str, processes: int, run: Path, steps: int, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    given = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    arguments = [str(SCRIPTS / script), str(run), str(steps)]
    return subprocess.Popen([*command, *arguments], stdout=-1, stderr=-2, text=True, env=given)


def loss_of(line: str) -> tuple[int, float] | None:
    found = re.fullmatch(r"step (\d+) loss (\S+)\n", line)
    return (int(found[1]), float(found[2])) if found else None


def finished(job: subprocess.Popen[str]) -> tuple[dict[int, float], str]:
    """Return the losses that a job has printed, and all that it has, once it has ended."""
    output = job.communicate(timeout=900)[0]
    return dict(filter(None, map(loss_of, output.splitlines(keepends=True)))), output


def killed(job: subprocess.Popen[str], run: Path) -> dict[int, float]:
    """Kill a job's processes two steps after the first that follows a finished checkpoint; return its losses."""
    losses, committed = dict[int, float](), 0
    assert job.stdout is not None
    for line in job.stdout:
        if found := loss_of(line):
            losses[found[0]] = found[1]
            committed = committed or (found[0] if any(run.glob("step[_-]*/metadata.json")) else 0)
        if committed and len(losses) > committed + 2:
            break
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for process in (job.pid, *map(int, children)):
        os.kill(process, signal.SIGKILL)
    rest = dict(filter(None, map(loss_of, job.stdout)))
    job.communicate()
    assert len(losses | rest) > committed > 4, (losses, rest)
    return losses | rest


def resumed(script: str, processes: int, run: Path, before: dict[int, float], **environment: str) -> dict[int, float]:
    """Return the losses of a job that goes on, up to the last step of the one before."""
    for _ in range(_TRIES):
        job = start(script, processes, run, len(before), **environment)
        losses, output = finished(job)
        if _ABORTED not in output or len(before) in losses:
            break
    assert job.returncode == 0 or _ABORTED in output, output
    assert 1 not in losses and max(losses, default=0) == len(before), output
    return losses


@pytest.mark.slow
def test_a_killed_run_goes_on_on_three_processes_with_the_same_losses(tmp_path: Path) -> None:
    before = killed(start("train_shardtree.py", 2, tmp_path, 100_000), tmp_path)
    after = resumed("train_shardtree.py", 3, tmp_path, before)
    assert after == {step: pytest.approx(before[step], rel=1e-4) for step in after}
    assert all(st.verify(step) == () for step in tmp_path.iterdir() if st.is_checkpoint(step))


@pytest.mark.exhaustive
def test_random_numbers_go_on_on_as_many_processes(tmp_path: Path) -> None:
    before = killed(start("train_shardtree.py", 2, tmp_path, 100_000, DROPOUT="0.2"), tmp_path)
    after = resumed("train_shardtree.py", 2, tmp_path, before, DROPOUT="0.2")
    assert after == {step: before[step] for step in after}


@pytest.mark.exhaustive
@pytest.mark.peers
def test_dcp_refuses_random_states_on_more_processes(tmp_path: Path) -> None:
    assert len(finished(start("train_dcp.py", 2, tmp_path, 12))[0]) == 12
    assert min(finished(start("train_dcp.py", 2, tmp_path, 14))[0]) == 13
    losses, output = finished(start("train_dcp.py", 3, tmp_path, 16))
    assert losses == {} and "Missing key in checkpoint state_dict: rng.2" in output
