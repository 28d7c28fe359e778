"""Small training jobs on simulated ranks, and a checkpointer of theirs into which faults are planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardtree as st
from shardtree.world import World

WIDTH, HIDDEN, VOCABULARY, BATCH = 4, 12, 10, 12
CUT = {"up": 0, "down": 1}
"""Axis of the hidden layer, by parameter."""


@dataclass(frozen=True)
class Kind:
    """What kind of job it is.

    Attributes:
        optimizer: "adamw", "sgd", "adafactor", "muon", "schedule-free" or "masters".
        groups: number of parameter groups, with learning rates of their own.
        frozen: whether the norm isn't trained.
        tied: whether the head is the embedding.
        parallel: "dp", where ranks share the batch, or "tp", where they share the hidden layer.
        schedule: whether learning rates change from step to step.
        dtype: of the weights.
    """

    optimizer: str = "adamw"
    groups: int = 1
    frozen: bool = False
    tied: bool = False
    parallel: str = "dp"
    schedule: bool = False
    dtype: torch.dtype = torch.float32


class SumForward(torch.autograd.Function):
    """The sum over ranks, whose gradient each rank has whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        return sum(world.all_gather(x.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class SumBackward(torch.autograd.Function):
    """What each rank has whole, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return sum(ctx.world.all_gather(gradient.detach())), None


class Model(nn.Module):
    def __init__(self, kind: Kind, world: World) -> None:
        super().__init__()
        self.cuts, self.rank = (world.size, world.rank) if kind.parallel == "tp" else (1, 0)
        part = HIDDEN // self.cuts
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(kind.dtype))

        self.embed = parameter(VOCABULARY, WIDTH)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).to(kind.dtype), requires_grad=not kind.frozen)
        up, down = parameter(HIDDEN, WIDTH), parameter(WIDTH, HIDDEN)
        self.up = nn.Parameter(up.detach()[self.rank * part : (self.rank + 1) * part].clone())
        self.down = nn.Parameter(down.detach()[:, self.rank * part : (self.rank + 1) * part].clone())
        self.head = self.embed if kind.tied else parameter(VOCABULARY, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rope", torch.linspace(0.1, 1, WIDTH).to(kind.dtype), persistent=False)

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor, world: World) -> torch.Tensor:
        self.seen += 1
        x = self.embed[tokens] * self.norm + self.rope + noise.to(self.embed.dtype)
        inner = SumBackward.apply(x, world) if self.cuts > 1 else x
        out = nn.functional.gelu(inner @ self.up.T) @ self.down.T
        return (x + (SumForward.apply(out, world) if self.cuts > 1 else out)) @ self.head.T


class Data:
    """The position in a stream of tokens."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def next(self) -> list[int]:
        first, self.position = self.position, self.position + BATCH
        return list(range(first, self.position))


class Masters(torch.optim.AdamW):
    """AdamW with float32 masters among its states, as mixed-precision optimizers have them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in parameters:
            state = self.state[p]
            if not state:
                state.update(master=p.float().clone(), exp_avg=torch.zeros_like(p, dtype=torch.float32))
            state["exp_avg"].lerp_(p.grad.float(), 0.1)
            state["master"].add_(state["exp_avg"], alpha=-1e-2)
            p.copy_(state["master"])


def muon_of(world: World, cuts: int, axes: Mapping[nn.Parameter, int]) -> type[torch.optim.Optimizer]:
    """Return Muon's class for matrices of which ranks may have parts: an update is that of the whole matrix."""

    class Gathered(torch.optim.Muon):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                settings = {name: value for name, value in group.items() if name != "params"}
                for p in group["params"]:
                    self.step_whole(p, axes[p], settings)

        def step_whole(self, p: nn.Parameter, axis: int, settings: Mapping[str, Any]) -> None:
            state = self.state[p]
            state.setdefault("momentum_buffer", torch.zeros_like(p))
            whole, gradient, moment = (
                torch.cat(world.all_gather(each.detach().clone()), dim=axis)
                for each in (p, p.grad, state["momentum_buffer"])
            )
            stand_in = nn.Parameter(whole)
            stand_in.grad = gradient
            optimizer = torch.optim.Muon([stand_in], **settings)
            optimizer.state[stand_in]["momentum_buffer"] = moment
            optimizer.step()
            p.copy_(stand_in.chunk(cuts, dim=axis)[world.rank])
            state["momentum_buffer"].copy_(moment.chunk(cuts, dim=axis)[world.rank])

    return Gathered if cuts > 1 else torch.optim.Muon


def schedule_free(groups: Any) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(groups, warmup_steps=2, foreach=False)


@dataclass
class Job:
    world: World
    kind: Kind
    model: Model
    optimizer: torch.optim.Optimizer
    second: torch.optim.Optimizer | None = None
    data: Data = field(default_factory=Data)
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))
    rate: float = 1.0


def groups_of(trained: list[tuple[str, nn.Parameter]], count: int) -> list[dict[str, Any]]:
    parts = [[p for _, p in trained[number::count]] for number in range(count)]
    return [{"params": part, "lr": 0.01 * (number + 1)} for number, part in enumerate(parts) if part]


def make(kind: Kind, world: World) -> Job:
    model = Model(kind, world)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if kind.optimizer == "muon":
        # As its users do: Muon for matrices between layers, AdamW for what is left.
        inner = groups_of([(name, p) for name, p in trained if name in CUT], kind.groups)
        muon = muon_of(world, model.cuts, {model.up: 0, model.down: 1})(inner)
        rest = groups_of([(name, p) for name, p in trained if name not in CUT], kind.groups)
        return Job(world, kind, model, muon, torch.optim.AdamW(rest, foreach=False))
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda groups: torch.optim.AdamW(groups, foreach=False),
        "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, foreach=False),
        "adafactor": lambda groups: torch.optim.Adafactor(groups, foreach=False),
        "schedule-free": schedule_free,
        "masters": Masters,
    }
    return Job(world, kind, model, optimizers[kind.optimizer](groups_of(trained, kind.groups)))


def optimizers_of(job: Job) -> list[torch.optim.Optimizer]:
    return [job.optimizer] if job.second is None else [job.optimizer, job.second]


def groups_in(job: Job) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers_of(job) for group in optimizer.param_groups]


def step(job: Job, number: int) -> list[int]:
    world, samples = job.world, job.data.next()
    noise = torch.randn(BATCH, WIDTH, generator=job.noise) / 8
    mine = slice(world.rank, None, world.size) if job.kind.parallel == "dp" else slice(None)
    tokens = torch.tensor([sample * 7 % VOCABULARY for sample in samples])[mine]
    targets = torch.tensor([sample * 3 % VOCABULARY for sample in samples])[mine]
    job.model.zero_grad()
    if job.kind.optimizer == "schedule-free":
        job.optimizer.train()  # type: ignore[attr-defined]
    logits = job.model(tokens, noise[mine], world)
    (nn.functional.cross_entropy(logits.float(), targets, reduction="sum") / BATCH).backward()
    for parameter in job.model.parameters() if job.kind.parallel == "dp" else ():
        if parameter.grad is not None:
            parameter.grad = sum(world.all_gather(parameter.grad))
    if job.kind.schedule:
        job.rate *= 0.9
        for group in groups_in(job):
            group["lr"] = group["lr"] * 0.9
    for optimizer in optimizers_of(job):
        optimizer.step()
    if job.kind.optimizer == "schedule-free":
        job.optimizer.eval()  # type: ignore[attr-defined]  # so that averaged weights are those that are saved
    return samples[mine]


def shards(job: Job) -> dict[str, st.ShardedTensor]:
    """Describe what ranks have parts of."""
    rank, cuts = job.model.rank, job.model.cuts
    return {
        name: st.ShardedTensor.from_rank_offsets(name, getattr(job.model, name).detach(), (axis, rank, cuts))
        for name, axis in CUT.items()
    }


# A checkpointer that stores whole tensors.


def named_states(job: Job) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    for name, parameter in job.model.named_parameters():
        own = [optimizer.state[parameter] for optimizer in optimizers_of(job) if parameter in optimizer.state]
        yield name, parameter, own[0] if own else {}


def settings_of(job: Job, parameter: nn.Parameter) -> dict[str, Any]:
    """Return what is set for a parameter's group, and what an optimizer counts there."""
    group: dict[str, Any] = next((g for g in groups_in(job) if any(p is parameter for p in g["params"])), {})
    return {name: value for name, value in group.items() if name != "params"}


def whole(job: Job, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name not in CUT or not tensor.ndim or job.model.cuts == 1:
        return tensor.detach().clone()
    return torch.cat(job.world.all_gather(tensor.detach().clone()), dim=CUT[name])


def part(job: Job, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name not in CUT or not tensor.ndim or job.model.cuts == 1:
        return tensor
    return tensor.chunk(job.model.cuts, dim=CUT[name])[job.model.rank].clone()


def state_of(job: Job) -> dict[str, Any]:
    """Return everything that must be stored, whole, by name."""
    return {
        "weights": {name: whole(job, name, p) for name, p, _ in named_states(job)},
        "states": {
            name: {key: whole(job, name, v) if isinstance(v, torch.Tensor) else v for key, v in states.items()}
            for name, _, states in named_states(job)
        },
        "settings": {name: settings_of(job, p) for name, p, _ in named_states(job)},
        "seen": job.model.seen.clone(),
        "rope": job.model.rope.clone(),
        "data": job.data.position,
        "noise": job.noise.get_state(),
        "rate": job.rate,
    }


def save(job: Job, place: Any) -> None:
    st.save(state_of(job), place, world=job.world)


def restore(job: Job, state: dict[str, Any]) -> None:
    for name, parameter, _ in named_states(job):
        with torch.no_grad():
            parameter.copy_(part(job, name, state["weights"][name]))
        states = state["states"].get(name, {})
        values = {key: part(job, name, v) if isinstance(v, torch.Tensor) else v for key, v in states.items()}
        for optimizer in optimizers_of(job):
            for group in optimizer.param_groups:
                if any(p is parameter for p in group["params"]):
                    optimizer.state[parameter] = values
                    group.update(state["settings"][name])
    job.model.seen.copy_(state["seen"])
    job.model.rope.copy_(state["rope"])
    job.data.position, job.rate = state["data"], state["rate"]
    job.noise.set_state(state["noise"])


def load(job: Job, place: Any) -> None:
    restore(job, st.load({}, place, world=job.world))
