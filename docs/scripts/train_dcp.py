"""The same with torch.distributed.checkpoint: `torchrun --nproc-per-node=4 train_dcp.py RUN STEPS`."""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import batches, build, train_step
from torch.distributed.checkpoint import state_dict as states

dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer, scheduler = build()
run, first = Path(sys.argv[1]), 1
background = dist.new_group(backend="gloo")  # of its own: the saving thread communicates too


def state():
    return {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "rng": {str(rank): torch.get_rng_state()},  # of equal keys, one rank's value is saved
    }


def finished_steps():
    return sorted(path.parent for path in run.glob("step_*/.metadata"))


if finished_steps():
    latest = finished_steps()[-1]
    loaded = state()
    dcp.load(loaded, checkpoint_id=latest)
    states.set_model_state_dict(model, loaded["model"])
    states.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(loaded["rng"][str(rank)])
    first = int(latest.name.removeprefix("step_")) + 1

pending = None
for step, batch in batches(first, int(sys.argv[2])):
    loss = train_step(model, optimizer, scheduler, batch)
    if rank == 0:
        print(f"step {step} loss {loss!r}", flush=True)
    if step % 4 == 0:
        if pending is not None:
            pending.result()
        folder = run / f"step_{step:08d}"
        pending = dcp.async_save(state(), checkpoint_id=folder, process_group=background)
    if pending is not None and pending.done():
        pending.result()
        pending = None
        if rank == 0:
            for old in finished_steps()[:-2]:
                shutil.rmtree(old)
if pending is not None:
    pending.result()
dist.destroy_process_group()
