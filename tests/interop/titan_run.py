"""A small run of torchtitan's parts under FSDP2: its optimizers, schedulers, data loader and a checkpoint manager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as TheirManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from shardtree.interop.torchtitan import CheckpointManager
from shardtree.world import World

__all__ = ["Adapter", "CheckpointManager", "Counter", "Run", "TheirManager", "whole"]

WIDTH = 6


class Block(nn.Module):
    """Uneven rows on 2 and 3 ranks, and a buffer, which FSDP2 leaves plain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.down(torch.tanh(self.up(x)))


class Numbers(IterableDataset[torch.Tensor], Stateful):
    """Samples by number, of which each rank draws its own."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.next, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.next += self.ranks
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(self.next))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


class Counter(Stateful):
    """A data loader's state that can be resharded: ranks have keys of their own, and take what others had."""

    def __init__(self, rank: int) -> None:
        self.rank, self.loaded = rank, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        return {f"rank {self.rank}": [self.rank, 1.5], "total": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Adapter(StateDictAdapter):
    """Other names, and one weight in another shape."""

    def __init__(self, assets: str | None = None) -> None:
        super().__init__(None, assets)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        renamed = {f"model.{key}": value for key, value in state_dict.items() if not key.endswith("seen")}
        return {key: value.view(*value.shape, 1) if "down.bias" in key else value for key, value in renamed.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        pairs = ((key.removeprefix("model."), value) for key, value in hf_state_dict.items())
        return {key: value.squeeze(-1) if "down.bias" in key else value for key, value in pairs}


class Run(Stateful):
    """A trainer: its step is its own state. Options are the manager's."""

    def __init__(
        self,
        world: World,
        folder: str,
        manager: type[BaseCheckpointManager] = CheckpointManager,
        *,
        seed: int = 0,
        adapter: Adapter | None = None,
        counter: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("world",))
        self.model = nn.Sequential(Block(), Block())
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh)
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=[self.model]
        )
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        numbers = Numbers(world.rank, world.size)
        self.loader = Counter(world.rank) if counter else ParallelAwareDataloader(numbers, world.rank, world.size)
        self.step = 0
        config: dict[str, Any] = {"enable": True, "folder": "steps", "interval": 2, **options}
        self.checkpointer: Any = manager.Config(**config).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=adapter,
            base_folder=folder,
        )

    def train(self, steps: int, last: int = -1) -> Run:
        """Train up to a step, as torchtitan's loop does; return this."""
        batches = iter(self.loader) if isinstance(self.loader, ParallelAwareDataloader) else None
        while self.step < steps:
            self.step += 1
            x = torch.ones(2, WIDTH) if batches is None else next(batches)
            self.optimizers.zero_grad()
            self.model(x).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == last)
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def state(self) -> dict[str, Any]:
        """Return all that a step has: tensors whole, and plain values."""
        state = {**self.model.state_dict(), **self.optimizers.state_dict(), **self.schedulers.state_dict()}
        return whole(state) | {"step": self.step}


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with tensors whole, as this instant's copies."""
    return {
        key: getattr(value, "full_tensor", value.clone)().detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }
