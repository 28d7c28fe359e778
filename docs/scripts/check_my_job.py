"""Does this job resume? `python check_my_job.py` trains it under FSDP2 and tensor parallelism, saves, and resumes."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardtree as st
from shardtree.interop.dtensor import dtensor_layout, from_dtensors, to_dtensors
from shardtree.live import run_processes
from shardtree.testing import resume_problems


def make(world, mesh):
    torch.manual_seed(0)
    devices = init_device_mesh("cpu", tuple(mesh.shape.values()), mesh_dim_names=tuple(mesh.shape))
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    parallelize_module(model, devices["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=devices["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "data": {"position": 0}, "devices": devices}


def step(job, number):
    first, job["data"]["position"] = job["data"]["position"], job["data"]["position"] + 8
    rank, ranks = job["devices"].get_local_rank("dp"), job["devices"]["dp"].size()
    samples = list(range(first, first + 8))[rank::ranks]
    inputs = torch.tensor(samples)[:, None] * torch.linspace(0.1, 1, 6)
    job["model"].zero_grad()
    (job["model"](inputs.sin()) - inputs.cos()).square().mean().backward()
    job["optimizer"].step()
    return samples


def tree(job):
    model, optimizer = job["model"], job["optimizer"]
    optim = states.get_optimizer_state_dict(model, optimizer)
    return {"model": states.get_model_state_dict(model), "optim": optim, "data": dict(job["data"])}


def save(job, place):
    mine = tree(job)
    st.save(from_dtensors(mine, strided="fsdp2"), place, layout=dtensor_layout(mine, strided="fsdp2"))


def load(job, place):
    mine = tree(job)
    shards, layout = from_dtensors(mine, strided="fsdp2"), dtensor_layout(mine, strided="fsdp2")
    loaded = to_dtensors(st.load(shards, place, layout=layout), like=mine)
    states.set_model_state_dict(job["model"], loaded["model"])
    states.set_optimizer_state_dict(job["model"], job["optimizer"], loaded["optim"])
    job["data"].update(loaded["data"])


if __name__ == "__main__":
    layouts = [st.Mesh(dp=2, tp=1), st.Mesh(dp=2, tp=2)]
    with TemporaryDirectory() as folder:
        problems = resume_problems(make, step, save, load, layouts=layouts, folder=folder, run=run_processes)
    for problem in problems:
        print(problem.layouts, problem)
    print(f"{len(problems)} problems in {len(layouts) ** 2} resumptions")
