"""Run by torchrun on two ranks of a group with no backend named: rank 1 is silent for a while, and then dies."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from collectives import check_collectives

from shardtree.errors import RemoteError, WorldError
from shardtree.shell.world import agree
from shardtree.world import distributed


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=100))
    store = dist.distributed_c10d._get_default_store()
    check_collectives(distributed())
    silent = distributed(purpose="silent", timeout=3.0)
    world = distributed(timeout=20.0)
    if world.rank == 1:
        store.wait(["saw silence"])
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(WorldError, match=r"all_gather: rank 1 of 2 did not take part"):
        silent.all_gather(1)
    assert 2.9 < time.monotonic() - began < 90.0, "it goes by the timeout of the group around it"
    store.set("saw silence", "1")
    with pytest.raises(WorldError, match=r"all_gather: .*rank 0 of 2 cannot reach its peers") as caught:
        agree(world, "write", lambda: None)
    with pytest.raises(WorldError, match=r"exchange: .*rank 0 of 2 cannot reach its peers"):
        world.exchange({}, {1: torch.zeros(3, dtype=torch.uint8)})
    assert not isinstance(caught.value, RemoteError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    dist.destroy_process_group()
    print("saw both")  # noqa: T201


if __name__ == "__main__":
    main()
