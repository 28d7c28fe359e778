"""Train stages under FSDP2, save, resume: `torchrun --nproc-per-node=4 train_pipeline.py RUN STEPS STAGES`."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors

LAYERS, WIDTH, BATCH = 4, 8, 12
FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)  # keys by name: of no stage alone

dist.init_process_group("gloo")
stages = int(sys.argv[3])
mesh = init_device_mesh("cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp"))
stage, part, parts = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.size(1)


class Stage(torch.nn.Module):
    """The layers of this rank's stage, under the names that they have in the whole model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        every = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]  # the same on every rank
        own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.layers = torch.nn.ModuleDict({str(number): fully_shard(every[number], mesh=mesh["dp"]) for number in own})

    def forward(self, x):
        """Return what the next stage takes."""
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


model = fully_shard(Stage(), mesh=mesh["dp"])
groups = [{"params": layer.parameters(), "lr": 0.01 * (int(n) + 1)} for n, layer in model.layers.items()]
optimizer = torch.optim.AdamW(groups, foreach=False)


def neighbour(offset):
    return int(mesh.mesh[stage + offset, part])


def train_step(step):
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(parts)[part].contiguous()
    if stage > 0:
        dist.recv(x, neighbour(-1))
        x.requires_grad_()
    y = model(x)
    optimizer.zero_grad()
    loss = y.square().mean()
    if stage < stages - 1:
        dist.send(y.detach(), neighbour(1))
        gradient = torch.empty_like(y)
        dist.recv(gradient, neighbour(1))
        y.backward(gradient)
    else:
        loss.backward()
    if stage > 0:
        dist.send(x.grad, neighbour(-1))
    optimizer.step()
    total = loss.detach() / parts
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return float(total)


def state():
    optim = states.get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"model": states.get_model_state_dict(model), "optim": optim}


series = st.CheckpointSeries(sys.argv[1])
latest, first = series.latest(), 1
if latest:
    target = state()
    loaded = to_dtensors(series.load(from_dtensors(target, within=mesh["dp"]), latest), like=target)
    states.set_model_state_dict(model, loaded["model"])
    states.set_optimizer_state_dict(model, optimizer, loaded["optim"], options=FLAT)
    first = latest.number + 1

for step in range(first, int(sys.argv[2]) + 1):
    loss = train_step(step)
    if stage == stages - 1 and part == 0:
        print(f"step {step} loss {loss!r}", flush=True)
    if step % 4 == 0:
        union = st.SaveOptions(common="union")  # the stages' optimizers have keys of their own
        series.save(from_dtensors(state(), within=mesh["dp"]), step, options=union)
dist.destroy_process_group()
