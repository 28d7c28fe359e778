"""DCP's calls, shardtree's checkpoints: `torchrun --nproc-per-node=4 train_dcp_plug.py RUN STEPS`."""

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import batches, build, train_step
from torch.distributed.checkpoint import state_dict as states

from shardtree.interop.dcp import CheckpointReader, CheckpointWriter

dist.init_process_group("gloo")
model, optimizer, scheduler = build()
run, first = Path(sys.argv[1]), 1


def state():
    return {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
    }


finished = sorted(path.parent for path in run.glob("step_*/metadata.json"))
if finished:
    loaded = state()
    dcp.load(loaded, checkpoint_id=finished[-1], storage_reader=CheckpointReader())
    states.set_model_state_dict(model, loaded["model"])
    states.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    first = int(finished[-1].name.removeprefix("step_")) + 1

for step, batch in batches(first, int(sys.argv[2])):
    loss = train_step(model, optimizer, scheduler, batch)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss!r}", flush=True)
    if step % 4 == 0:
        dcp.save(state(), checkpoint_id=run / f"step_{step:08d}", storage_writer=CheckpointWriter())
dist.destroy_process_group()
