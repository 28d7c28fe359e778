"""Jobs under FSDP2, tensor parallelism and both, for `check_resume` over gloo, and what saves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardtree as st
from shardtree.interop.dtensor import dtensor_layout, from_dtensors, to_dtensors

WIDTH, HIDDEN, VOCABULARY = 6, 10, 13
TOKENS = torch.arange(24).view(4, 6) % VOCABULARY


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens)
        return self.norm(x + self.down(nn.functional.gelu(self.up(x)))) @ self.embed.weight.T


def make(world: Any, mesh: st.Mesh) -> dict[str, Any]:
    """Return a job on a mesh with the axes dp and tp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    sizes = mesh.shape
    devices = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = Model()
    if sizes["tp"] > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, devices["tp"], plan)
    fully_shard(model, mesh=devices["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return {"model": model, "optimizer": optimizer, "place": Where(devices.get_local_rank("dp"), sizes["dp"])}


class Where:
    """This rank's share of the data; no state."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __len__(self) -> int:
        return self.ranks


def step(job: dict[str, Any], number: int) -> list[int]:
    where = job["place"]
    samples = [(number + row) % len(TOKENS) for row in range(len(TOKENS))][where.rank :: where.ranks]
    job["optimizer"].zero_grad()
    logits = job["model"](TOKENS[samples])
    nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[samples].roll(number, 1).flatten()).backward()
    job["optimizer"].step()
    return [number * len(TOKENS) + sample for sample in samples]


def states(job: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model, optimizer = job["model"], job["optimizer"]
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def set_states(job: dict[str, Any], loaded: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    set_model_state_dict(job["model"], loaded["model"])
    set_optimizer_state_dict(job["model"], job["optimizer"], loaded["optim"])


# Two checkpointers.


def save_ours(job: dict[str, Any], place: str) -> None:
    tree = states(job)
    st.save(from_dtensors(tree, strided="fsdp2"), place, layout=dtensor_layout(tree, strided="fsdp2"))


def load_ours(job: dict[str, Any], place: str) -> None:
    target = states(job)
    shards, layout = from_dtensors(target, strided="fsdp2"), dtensor_layout(target, strided="fsdp2")
    set_states(job, to_dtensors(st.load(shards, place, layout=layout), like=target))


def save_dcp(job: dict[str, Any], place: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(states(job), checkpoint_id=place)


def load_dcp(job: dict[str, Any], place: str) -> None:
    import torch.distributed.checkpoint as dcp

    loaded = states(job)
    dcp.load(loaded, checkpoint_id=place)
    set_states(job, loaded)


# Faults.


def load_weights_alone(job: dict[str, Any], place: str) -> None:
    """Forget the optimizer, which isn't even made."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    loaded = {"model": get_model_state_dict(job["model"])}
    dcp.load(loaded, checkpoint_id=place)
    set_model_state_dict(job["model"], loaded["model"])


def loaded_states(job: dict[str, Any], place: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    loaded = states(job)
    dcp.load(loaded, checkpoint_id=place)
    return loaded


def load_with_faults(job: dict[str, Any], place: str) -> None:
    """Scale one moment by the data-parallel size, swap two others, and lose a buffer on rank 1."""
    loaded = loaded_states(job, place)
    moments = loaded["optim"]["state"]
    moments["up.weight"]["exp_avg"] *= len(job["place"])
    one, other = moments["norm.weight"], moments["norm.bias"]
    one["exp_avg_sq"], other["exp_avg_sq"] = other["exp_avg_sq"], one["exp_avg_sq"]
    set_states(job, loaded)
    if job["place"].rank == 1:
        job["model"].seen.zero_()
