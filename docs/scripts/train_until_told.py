"""Train until told to stop, save once, go on later: `torchrun --nproc-per-node=4 train_until_told.py RUN STEPS`."""

import signal
import sys

import torch
import torch.distributed as dist

import shardtree as st

told = False


def note(*_):
    global told
    told = True  # and no more: it may be called at any moment, and on each rank at another one


signal.signal(signal.SIGTERM, note)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
series = st.CheckpointSeries(sys.argv[1])
weight, first = torch.zeros(4, 8), 1


def tree():
    return {"weight": st.ShardedTensor.from_rank_offsets("weight", weight, (0, rank, ranks))}


if latest := series.latest():
    weight, first = series.load(tree(), latest)["weight"], latest.number + 1

for step in range(first, int(sys.argv[2]) + 1):
    weight += 1  # a training step
    print(f"rank {rank} step {step}", flush=True)
    stop = torch.tensor(int(told))
    dist.all_reduce(stop, dist.ReduceOp.MAX)  # if one rank was told, all stop after this step
    if stop:
        series.save(tree(), step)
        break
dist.destroy_process_group()
