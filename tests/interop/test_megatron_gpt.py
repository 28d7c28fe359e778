"""A GPT of Megatron-Core's goes through shardtree unchanged: saved on 2 processes, loaded on 1 and 4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardtree

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = [pytest.mark.peers, pytest.mark.torchrun]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "gpt.py"


def torchrun(processes: int, folder: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    """Run steps of the script, each ``what:backend``, on several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), *steps],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_gpt_saved_on_2_processes_is_loaded_on_1_2_and_4(tmp_path: Path) -> None:
    """In our format, in Megatron-Core's by ours and by its own code; each number of processes starts once."""
    check(torchrun(2, tmp_path, "save:safetensors", "save:torch_dist", "load theirs:torch_dist", "save theirs:theirs"))
    keys = shardtree.load_plain_tensors(tmp_path / "safetensors")
    assert keys["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)
    assert keys["optimizer.exp_avg.decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)
    check(torchrun(1, tmp_path, "load:safetensors", "load:torch_dist", "load theirs:torch_dist"))
    # The one with swapped halves is the planted fault.
    check(torchrun(4, tmp_path, "load:safetensors", "load swapped:safetensors", "load:theirs"))
