"""Train, save in the background, resume: `torchrun --nproc-per-node=4 train_shardtree.py RUN STEPS`."""

import sys

import torch
import torch.distributed as dist
from job import batches, build, train_step
from torch.distributed.checkpoint import state_dict as states

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model, optimizer, scheduler = build()


def state():
    return {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "rng": st.ShardedObject("rng", torch.get_rng_state(), (ranks,), (rank,)),
    }


queue = st.AsyncCallsQueue()
series = st.CheckpointSeries(sys.argv[1], keep=st.retention.keep_last(2), queue=queue)
latest, first = series.latest(), 1
if latest:
    by_rule = st.LoadOptions(object_rules={"rng": st.objects.drop_objects})
    loaded = to_dtensors(series.load(from_dtensors(state()), options=by_rule), like=state())
    states.set_model_state_dict(model, loaded["model"])
    states.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"])
    first = latest.number + 1

for step, batch in batches(first, int(sys.argv[2])):
    loss = train_step(model, optimizer, scheduler, batch)
    if rank == 0:
        print(f"step {step} loss {loss!r}", flush=True)
    if step % 4 == 0:
        series.save(from_dtensors(state()), step)  # written in the background
    queue.maybe_finalize_async_calls()  # commits what every rank has written
queue.close()
dist.destroy_process_group()
