"""Run by torchrun on three ranks of a gloo group that gives up after 3 seconds: one is slow, and one stays away."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardtree.errors import WorldError
from shardtree.world import distributed


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    world = distributed(timeout=60.0)
    assert distributed(timeout=60.0).all_gather(1) == [1, 1, 1]
    if world.rank == 1:
        time.sleep(6)
    assert world.all_gather(world.rank) == [0, 1, 2], "it goes by the timeout of the group around it"
    impatient = distributed(timeout=2.0, purpose="impatient")
    if world.rank == 1:
        world.barrier()
    else:
        with pytest.raises(
            WorldError, match=r"all_gather: rank 1 of 3 did not take part; rank [02] of 3 cannot reach its peers"
        ):
            impatient.all_gather(1)
        world.barrier()
    paired = distributed(timeout=2.0, purpose="paired")
    if world.rank == 0:
        with pytest.raises(WorldError, match=r"recv\(source=1\): rank 1 of 3 did not take part; rank 0 of 3 cannot"):
            paired.recv(1)
    world.barrier()
    dist.destroy_process_group()
    print("waited")  # noqa: T201


if __name__ == "__main__":
    main()
