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
from shardtree.world import agree, distributed


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=10))
    check_collectives(distributed())
    silent = distributed(purpose="silent", timeout=1.0)
    world = distributed(timeout=5.0)
    if world.rank == 1:
        time.sleep(4.0)
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(WorldError, match=r"all_gather: rank 0 of 2 can't reach its peers"):
        silent.all_gather(1)
    assert 0.9 < time.monotonic() - began < 3.5
    with pytest.raises(WorldError, match=r"all_gather: rank 0 of 2") as caught:
        agree(world, "write", lambda: None)
    with pytest.raises(WorldError, match=r"exchange: rank 0 of 2 can't reach its peers"):
        world.exchange({}, {1: torch.zeros(3, dtype=torch.uint8)})
    assert not isinstance(caught.value, RemoteError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert time.monotonic() - began < 9.0
    dist.destroy_process_group()
    assert time.monotonic() - began < 12.0
    print("saw both")  # noqa: T201


if __name__ == "__main__":
    main()
