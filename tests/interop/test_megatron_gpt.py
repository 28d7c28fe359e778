"""A GPT of Megatron-Core's goes through shardtree unchanged: saved on 2 processes, loaded on 1 and 4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardtree
from shardtree.strategies import StrategyAction, default_strategies

pytest.importorskip("megatron.core.dist_checkpointing.mapping")
pytestmark = [pytest.mark.peers, pytest.mark.torchrun]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "gpt.py"
TORCH_DIST = (StrategyAction.SAVE_SHARDED, "torch_dist", 1) in default_strategies


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
def test_a_gpt_saved_on_2_processes_is_loaded_on_1_and_4(tmp_path: Path) -> None:
    check(torchrun(2, tmp_path, "save:safetensors"))
    keys = shardtree.load_plain_tensors(tmp_path / "safetensors")
    assert keys["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)
    assert keys["optimizer.exp_avg.decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)
    check(torchrun(1, tmp_path, "load:safetensors"))
    check(torchrun(4, tmp_path, "load:safetensors", "load swapped:safetensors"))  # the latter is the planted fault


@pytest.mark.slow
@pytest.mark.skipif(not TORCH_DIST, reason="torch_dist can't be saved")
def test_a_gpt_that_we_save_as_torch_dist_is_loaded_by_both(tmp_path: Path) -> None:
    check(torchrun(2, tmp_path, "save:torch_dist", "load theirs:torch_dist"))
    check(torchrun(1, tmp_path, "load:torch_dist", "load theirs:torch_dist"))


@pytest.mark.slow
@pytest.mark.skipif(not TORCH_DIST, reason="torch_dist can't be loaded")
def test_a_gpt_that_megatron_saves_is_loaded_by_us(tmp_path: Path) -> None:
    check(torchrun(2, tmp_path, "save theirs:theirs"))
    check(torchrun(4, tmp_path, "load:theirs"))
