"""Real processes, started by torchrun, with gloo between them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtree.errors import WorldError
from shardtree.world import distributed

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


def torchrun(processes: int, script: str, *arguments: str) -> str:
    """Run a script on several processes, warnings being errors, and return what it printed."""
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(SCRIPTS / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torchrun
def test_collectives_between_processes() -> None:
    # "fake" can't do a collective: the world has to make a gloo group beside it, as beside nccl.
    torchrun(4, "collectives.py", "gloo", "fake")


@pytest.mark.slow
@pytest.mark.torchrun
def test_lost_peer_is_a_world_error_after_the_timeout() -> None:
    assert "saw both" in torchrun(2, "lost_peers.py")


def test_no_process_group_is_a_world_error() -> None:
    with pytest.raises(WorldError, match="no default process group"):
        distributed()


def test_a_group_that_cannot_be_made_is_a_world_error() -> None:
    # gloo of torch 2.15 ends the process where the store keeps nothing, as this one does.
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(WorldError, match="couldn't make a gloo group"):
            distributed()
    finally:
        torch.distributed.destroy_process_group()
