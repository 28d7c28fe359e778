"""Run by torchrun: saves a tree, and one rank kills itself at a moment if it is told to.

dying_rank.py FOLDER VALUE [RANK:MOMENT]
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from dying import options

import shardtree as st
from shardtree.world import distributed
from tests.options import save_keywords

TIMEOUT = 200.0  # longer than the test waits: the others must end without it


def main(folder: str, value: float, death: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    world = distributed(timeout=TIMEOUT)
    who, _, moment = death.partition(":")
    place, more = options(moment if who == str(world.rank) else "never", folder)
    shard = st.ShardedTensor.from_rank_offsets("w", torch.full((2, 1000), value), (0, world.rank, world.size))
    began = time.monotonic()
    try:
        st.save({"w": shard, "step": value}, place, world=world, overwrite=True, **save_keywords(**more))
    except st.CheckpointingException as error:
        print(f"after {time.monotonic() - began:.1f} seconds: {type(error).__name__}: {error}", flush=True)  # noqa: T201
        raise
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
