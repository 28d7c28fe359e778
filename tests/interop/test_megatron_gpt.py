"""A GPT of Megatron-Core's goes through shardtree unchanged: saved on 2 processes, loaded on 1 and 4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardtree

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "gpt.py"


def run(folder: Path, *jobs: str) -> None:
    """Run jobs of the script: a number of processes, and the steps ``what:backend`` that all of them take."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), str(folder), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_a_gpt_saved_on_2_processes_is_loaded_on_1_2_and_4(tmp_path: Path) -> None:
    """In our format, in Megatron-Core's by ours and by its own code."""
    saves = "2,save:safetensors,save:torch_dist,load theirs:torch_dist,save theirs:theirs"
    alone = "1,load:safetensors,load:torch_dist,load theirs:torch_dist"
    # The step with swapped halves is the planted fault.
    on_four = "4,load:safetensors,load swapped:safetensors,load:theirs"
    run(tmp_path, saves, alone, on_four)
    keys = shardtree.load_plain_tensors(tmp_path / "safetensors")
    assert keys["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)
    assert keys["optimizer.exp_avg.decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)
