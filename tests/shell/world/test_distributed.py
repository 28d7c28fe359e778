"""Real processes, started by torchrun, with gloo between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtree.errors import WorldError
from shardtree.world import distributed
from tests.quick_python.command import torchrun

SCRIPTS = Path(__file__).parent / "scripts"


def printed(processes: int, script: str, *arguments: str) -> str:
    """Run a script on several processes, and return what it printed."""
    done = torchrun(processes, SCRIPTS / script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torchrun
def test_collectives_between_processes() -> None:
    # "fake" can't do a collective: the world has to make a gloo group beside it, as beside nccl.
    printed(4, "collectives.py", "gloo", "fake")


@pytest.mark.slow
@pytest.mark.torchrun
def test_lost_peer_is_a_world_error_after_the_timeout() -> None:
    assert "saw both" in printed(2, "lost_peers.py")


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_slow_rank_is_waited_for_as_long_as_asked_whatever_the_group_does_and_an_absent_one_is_named() -> None:
    assert printed(3, "slow_peer.py").count("waited") == 3


def test_no_process_group_is_a_world_error() -> None:
    with pytest.raises(WorldError, match="no default process group"):
        distributed()


def test_a_world_goes_on_beside_one_with_another_timeout() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        worlds = [distributed(timeout=seconds) for seconds in (20.0, 600.0, 5.0)]
        assert [world.all_gather(1) for world in worlds] == [[1]] * 3
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_that_cannot_be_made_is_a_world_error() -> None:
    # gloo of torch 2.15 ends the process where the store keeps nothing, as this one does.
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(WorldError, match="could not make a gloo group"):
            distributed()
    finally:
        torch.distributed.destroy_process_group()
