"""The law of round trips between real processes: torchrun, gloo, a folder that they share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardtree

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "roundtrip.py"

pytestmark = pytest.mark.torchrun


def torchrun(processes: int, folder: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    """Run steps of the script, each ``what:axis``, on several processes; warnings are errors."""
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(SCRIPT), str(folder), *steps]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_4_processes_save_and_2_load_in_another_layout(tmp_path: Path) -> None:
    check(torchrun(4, tmp_path, "save:0", "fail:0"))
    assert len(list(tmp_path.glob("save-*/*-of-00004.safetensors"))) == 4, "each process writes a file of its own"
    assert set(shardtree.load_plain_tensors(tmp_path)) > {"flat", "layers", "norm", "scale", "glu"}
    check(torchrun(2, tmp_path, "load:1", "load:0"))
    # The planted fault: a flipped bit, which hashes would find, must be found by the comparison.
    for file in tmp_path.glob("save-*/00000-of-*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    done = torchrun(2, tmp_path, "load unverified:1")
    assert done.returncode != 0
    assert "1 of 48 elements differ" in done.stderr
