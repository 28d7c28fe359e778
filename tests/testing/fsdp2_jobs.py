"""Jobs under FSDP2, tensor parallelism and both, for `check_resume` over gloo, and what saves them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardtree as st
from shardtree.interop.dtensor import dtensor_layout, from_dtensors, to_dtensors

WIDTH, HIDDEN, VOCABULARY = 6, 10, 13
TOKENS = torch.arange(24).view(4, 6) % VOCABULARY


@dataclass(frozen=True)
class Kind:
    """What kind of job it is.

    Attributes:
        optimizer: "adamw", "sgd", "muon", "muon of parts" or "schedule-free"; torch's Adafactor refuses DTensors.
        groups: Number of parameter groups, with learning rates of their own.
        frozen: Whether the norm isn't trained.
        tied: Whether the head is the embedding.
    """

    optimizer: str = "adamw"
    groups: int = 1
    frozen: bool = False
    tied: bool = False


ADAMW = Kind()


class Model(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(not kind.frozen)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if kind.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mean.add_(torch.linspace(1, 2, WIDTH) / self.seen)
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))


def gathered_muon(inner: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Muon with updates of whole matrices; torch's own, on DTensors, adds up bfloat16 sums over ranks."""
    from torch.distributed.tensor import distribute_tensor

    class Gathered(torch.optim.Muon):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
                for p in group["params"]:
                    moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    whole = nn.Parameter(p.full_tensor())
                    whole.grad = p.grad.full_tensor()
                    optimizer = torch.optim.Muon([whole], **settings)
                    optimizer.state[whole]["momentum_buffer"] = buffer = moment.full_tensor()
                    optimizer.step()
                    for tensor, new in ((p, whole), (moment, buffer)):
                        tensor.copy_(distribute_tensor(new, p.device_mesh, p.placements, src_data_rank=None))

    return Gathered(inner, lr=0.02)


def optimizers_of(model: nn.Module, kind: Kind) -> tuple[torch.optim.Optimizer, ...]:
    trained = [p for p in model.parameters() if p.requires_grad]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        parts = [parameters[number :: kind.groups] for number in range(kind.groups)]
        return [{"params": part, "lr": 0.01 * (number + 1)} for number, part in enumerate(parts)]

    if kind.optimizer.startswith("muon"):
        inner = [model.up.weight, model.down.weight]
        rest = [p for p in trained if not any(p is other for other in inner)]
        muon = gathered_muon(inner) if kind.optimizer == "muon" else torch.optim.Muon(inner, lr=0.02)
        return muon, torch.optim.AdamW(groups(rest), foreach=False)
    if kind.optimizer == "sgd":
        return (torch.optim.SGD(groups(trained), momentum=0.9, foreach=False),)
    if kind.optimizer == "schedule-free":
        from schedulefree import AdamWScheduleFree

        return (AdamWScheduleFree(groups(trained), foreach=False),)
    return (torch.optim.AdamW(groups(trained), foreach=False),)


def make(world: Any, mesh: st.Mesh, kind: Kind = ADAMW) -> dict[str, Any]:
    """Return a job on a mesh with the axes dp and tp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    sizes = mesh.shape
    devices = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = Model(kind)
    if sizes["tp"] > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, devices["tp"], plan)
    # Muon needs matrices whole, and torch can't cut a whole into strided parts again, as those of "up" would be.
    columns = model.up.weight if kind.optimizer == "muon" else None
    fully_shard(model, mesh=devices["dp"], shard_placement_fn=lambda p: Shard(1) if p is columns else None)
    optimizers = {f"optimizer{number}": each for number, each in enumerate(optimizers_of(model, kind))}
    place = Where(devices.get_local_rank("dp"), mesh)
    return {
        "model": model,
        **optimizers,
        "noise": torch.Generator().manual_seed(5),
        "data": {"position": 0},
        "place": place,
    }


def optimizers(job: dict[str, Any]) -> list[torch.optim.Optimizer]:
    return [member for member in job.values() if isinstance(member, torch.optim.Optimizer)]


class Where:
    """This rank's share of the data; no state."""

    def __init__(self, rank: int, mesh: st.Mesh) -> None:
        self.rank, self.ranks, self.mesh = rank, mesh.shape["dp"], mesh
        self.kept: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return self.ranks


def step(job: dict[str, Any], number: int) -> list[int]:
    where, data = job["place"], job["data"]
    first, data["position"] = data["position"], data["position"] + len(TOKENS)
    rows = list(range(len(TOKENS)))[where.rank :: where.ranks]
    weights = torch.rand(len(TOKENS), generator=job["noise"])[rows]
    inputs, targets = TOKENS[rows].roll(first, 0), TOKENS[rows].roll(first + 1, 1)
    job["model"].zero_grad()
    for optimizer in optimizers(job):
        getattr(optimizer, "train", int)()
    losses = nn.functional.cross_entropy(job["model"](inputs).transpose(1, 2), targets, reduction="none")
    (losses.mean(1) * weights).mean().backward()
    for optimizer in optimizers(job):
        optimizer.step()
        getattr(optimizer, "eval", int)()
    return [first + row for row in rows]


def states(job: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model = job["model"]
    for optimizer in optimizers(job):
        if not optimizer.state and hasattr(optimizer, "train"):
            # torch makes states by a step if there are none; the mode that this needs leaves empty ones.
            optimizer.train()
            optimizer.state.clear()
    rest = {"noise": job["noise"].get_state(), "position": torch.tensor(job["data"]["position"])}
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizers(job)),
        **rest,
    }


def set_states(job: dict[str, Any], loaded: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    set_model_state_dict(job["model"], loaded["model"])
    set_optimizer_state_dict(job["model"], optimizers(job), loaded["optim"])
    job["noise"].set_state(loaded["noise"])
    job["data"]["position"] = int(loaded["position"])


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
    """Restore with one fault for each parameter, buffer and member, and those of a rank on rank 1."""
    loaded = loaded_states(job, place)
    moments, groups = loaded["optim"]["state"], loaded["optim"]["param_groups"]
    moments["up.weight"]["exp_avg"] *= len(job["place"])
    one, other = moments["norm.weight"], moments["norm.bias"]
    one["exp_avg_sq"], other["exp_avg_sq"] = other["exp_avg_sq"], one["exp_avg_sq"]
    moments["down.bias"]["step"] = torch.zeros_like(moments["down.bias"]["step"])
    groups[0]["lr"], groups[1]["lr"] = groups[1]["lr"], groups[0]["lr"]
    rows = loaded["model"]["down.weight"].to_local()
    rows.copy_(rows.flip(0))
    masters = loaded["model"]["head.weight"].to_local()
    masters.copy_(masters.bfloat16())
    loaded["noise"] = job["noise"].get_state()
    loaded["position"] += len(TOKENS)
    loaded["model"]["seen"] = torch.zeros_like(loaded["model"]["seen"])
    set_states(job, loaded)
    if job["place"].rank == 1:
        job["model"].mean.zero_()


def load_repeating(job: dict[str, Any], place: str) -> None:
    """Go on with data that the last step has used."""
    load_dcp(job, place)
    job["data"]["position"] -= len(TOKENS)


def load_untied(job: dict[str, Any], place: str) -> dict[str, Any]:
    """Restore a job that is built without its tie."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    loaded = loaded_states(job, place)
    other = make(None, job["place"].mesh, Kind())
    set_model_state_dict(other["model"], loaded["model"], options=StateDictOptions(strict=False))
    return {**other, "noise": job["noise"], "data": job["data"]}


def load_muon_with_faults(job: dict[str, Any], place: str) -> None:
    """Give Muon the learning rate of AdamW, and forget its momentum of one matrix."""
    loaded = loaded_states(job, place)
    rates = {group["lr"] for group in loaded["optim"]["param_groups"]}
    muons = [group for group in loaded["optim"]["param_groups"] if "ns_steps" in group]
    for group in muons:
        [group["lr"]] = rates - {group["lr"]}
    buffer = loaded["optim"]["state"]["up.weight"]["momentum_buffer"]
    loaded["optim"]["state"]["up.weight"]["momentum_buffer"] = torch.zeros_like(buffer)
    set_states(job, loaded)


def load_in_train_mode(job: dict[str, Any], place: str) -> None:
    """Put a schedule-free optimizer into its mode of training first, as its documentation asks for.

    That leaves an empty state for each parameter; torch believes that states are made, and loads none.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    model, [optimizer] = job["model"], optimizers(job)
    optimizer.train()
    loaded = {
        "model": state_dict.get_model_state_dict(model),
        "optim": state_dict.get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(loaded, checkpoint_id=place)
    state_dict.set_model_state_dict(model, loaded["model"])
    state_dict.set_optimizer_state_dict(model, optimizer, loaded["optim"])


def step_and_keep(job: dict[str, Any], number: int) -> list[int]:
    samples = step(job, number)
    job["place"].kept.append(deepcopy(states(job)))
    return samples


def save_an_older_step(job: dict[str, Any], place: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(job["place"].kept[-2], checkpoint_id=place)
