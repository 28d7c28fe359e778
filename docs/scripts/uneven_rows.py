"""Rows that FSDP2 and tensor parallelism cut unevenly: `torchrun --nproc-per-node=6 uneven_rows.py FOLDER`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
whole = torch.nn.Linear(4, 13)
expected = whole.weight.detach().clone()
model = fully_shard(parallelize_module(whole, mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
state = model.state_dict()

lines = []
try:
    dcp.save(state, checkpoint_id=f"{sys.argv[1]}/dcp")
except CheckpointException as error:
    lines.append(f"dcp.save: {next(iter(error.failures.values()))[0]}"[:99])

st.save(from_dtensors(state, strided="fsdp2"), f"{sys.argv[1]}/ours")
stored = st.open_checkpoint(f"{sys.argv[1]}/ours")["weight"].data.read()
lines.append(f"st.save: the whole weight is stored: {torch.equal(stored, expected)}")

target = from_dtensors(state, strided="fsdp2")
loaded = to_dtensors(st.load(target, f"{sys.argv[1]}/ours"), like=state)
same = all(torch.equal(loaded[key].to_local(), state[key].to_local()) for key in state)
lines.append(f"st.load: rank {dist.get_rank()} has its rows again: {same}")
if dist.get_rank() == 0:
    print("\n".join(lines))
dist.destroy_process_group()
