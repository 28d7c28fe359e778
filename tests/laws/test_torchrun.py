"""The law of round trips between real processes: torchrun, gloo, a folder that they share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import shardtree
from tests.quick_python.command import torchrun

SCRIPT = Path(__file__).parent / "scripts" / "roundtrip.py"

pytestmark = pytest.mark.torchrun


def done_by(processes: int, folder: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    """Run steps of the script, each ``what:axis``, on several processes."""
    return torchrun(processes, SCRIPT, str(folder), *steps)


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_4_processes_save_and_2_load_in_another_layout(tmp_path: Path) -> None:
    check(done_by(4, tmp_path, "save:0", "fail:0"))
    assert len(list(tmp_path.glob("save-*/*-of-00004.safetensors"))) == 4, "each process writes a file of its own"
    assert set(shardtree.load_plain_tensors(tmp_path)) > {"flat", "layers", "norm", "scale", "glu"}
    check(done_by(2, tmp_path, "load:1", "load:0"))
    # The planted fault: a flipped bit, which hashes would find, must be found by the comparison.
    for file in tmp_path.glob("save-*/00000-of-*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    done = done_by(2, tmp_path, "load unverified:1")
    assert done.returncode != 0
    assert "1 of 48 elements differ" in done.stderr
