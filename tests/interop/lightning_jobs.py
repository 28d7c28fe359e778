"""Jobs of Lightning's that ranks of `run_processes` run: a model under FSDP2, with or without tensor parallelism."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardtree as st
from shardtree.interop.lightning import ShardtreeFabricStrategy, ShardtreeIO, ShardtreeStrategy

BATCH, QUICK = 12, st.SaveOptions(durable=False)


def parallelized(model: Any, mesh: Any) -> Any:
    """Return a module after its first and last layer were made parallel, then sharded."""
    if mesh["tensor_parallel"].size() > 1:
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        parallelize_module(model, mesh["tensor_parallel"], plan)
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 30), torch.nn.Linear(30, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x).relu())


class Regression(LightningModule):
    """A model of two layers with a buffer, hyperparameters, and ordered dicts in its checkpoints."""

    def __init__(self, lr: float = 0.01, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["extra"])
        self.net, self.extra = Layers(), extra
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("rank", torch.zeros(()))  # differs between ranks, as running statistics do
        self.losses = dict[int, float]()

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            parallelized(self.net, self.device_mesh)

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.steps += 1
        self.rank.fill_(self.global_rank)
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        self.losses[self.trainer.global_step + 1] = float(total)
        self.log("loss", total)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(dataset(), BATCH // (self.trainer.world_size // tensor_parallel(self)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ordered"] = OrderedDict(b=1, a=(2, {"x": torch.ones(2)}))
        if self.extra is not None:
            checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not isinstance(checkpoint["ordered"], OrderedDict) or list(checkpoint["ordered"]) != ["b", "a"]:
            raise AssertionError(checkpoint["ordered"])


def tensor_parallel(module: LightningModule) -> int:
    return 1 if module.device_mesh is None else int(module.device_mesh["tensor_parallel"].size())


def dataset() -> torch.utils.data.TensorDataset:
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.TensorDataset(x, x[:, :1] * x[:, 1:2])


@dataclass(frozen=True)
class Fit:
    """A call of `Trainer.fit`.

    Attributes:
        folder: The folder where the checkpoints go.
        epochs: Number of epochs, of two steps each.
        resume: The checkpoint to resume, or None.
        strategy: "theirs", "ours", or the name of a strategy under which rank 0 saves.
        tensor_parallel: Number of ranks of tensor parallelism.
        extra: A value that the module puts into its checkpoints.
        backend: The format to save in.
        weights_only: As of `Trainer.fit`.
        link: Whether the last checkpoint is a link.
        io: "ours", "theirs" or "async", where rank 0 saves.
    """

    folder: Path
    epochs: int
    resume: Path | None = None
    strategy: str = "ours"
    tensor_parallel: int = 1
    extra: Any = None
    backend: str | None = None
    weights_only: bool | None = None
    link: bool = False
    io: str = "ours"


def fit(job: Fit, world: Any = None) -> dict[int, float]:
    """Return a job's losses by step."""
    ranks = 1 if world is None else world.size
    os.environ["LOCAL_RANK"] = str(0 if world is None else world.rank)
    model = Regression(extra=job.extra)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=job.epochs,
        strategy=_strategy(job, ranks),
        plugins=[] if job.strategy in ("ours", "theirs") else _plugins(job),
        callbacks=[
            ModelCheckpoint(job.folder, "{epoch}", "loss", save_top_k=2, save_last="link" if job.link else True)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=job.resume, weights_only=job.weights_only)
    assert float(model.steps) == job.epochs * 2
    return model.losses


def _plugins(job: Fit) -> list[Any]:
    ours = ShardtreeIO(job.backend, save_options=QUICK)
    return {"ours": [ours], "async": [AsyncCheckpointIO(ours)], "theirs": []}[job.io]


def _strategy(job: Fit, ranks: int) -> Any:
    sizes = ranks // job.tensor_parallel, job.tensor_parallel
    if job.strategy == "ours":
        return ShardtreeStrategy(*sizes, backend=job.backend, save_options=QUICK)
    return ModelParallelStrategy(*sizes) if job.strategy == "theirs" else job.strategy


def fits(jobs: list[Fit], world: Any) -> list[dict[int, float]]:
    """Return the losses of several jobs, run one after another in the same processes."""
    return [fit(job, world) for job in jobs]


@dataclass(frozen=True)
class Loop:
    """A loop of Fabric's.

    Attributes:
        folder: The folder that it saves its state to, at its end.
        resume: The checkpoint that it loads first, or None.
        theirs: Whether the strategy is Lightning's own.
        steps: Number of steps.
    """

    folder: Path
    resume: Path | None = None
    theirs: bool = False
    steps: int = 3


def loops(jobs: list[Loop], world: Any) -> list[list[float]]:
    """Return the losses of several loops, run one after another in the same processes."""
    os.environ["LOCAL_RANK"] = str(world.rank)
    return [_loop(job, world) for job in jobs]


def _loop(job: Loop, world: Any) -> list[float]:
    strategy = (
        FabricStrategy(parallelized, world.size, 1)
        if job.theirs
        else ShardtreeFabricStrategy(parallelized, world.size, 1, save_options=QUICK)
    )
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=world.size)
    fabric.launch()
    model = fabric.setup_module(Layers())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if job.resume is not None:
        assert fabric.load(job.resume, state) == {}
        # Lightning puts what it has stored of an object in the object's place.
        schedule.load_state_dict(state["schedule"] if job.theirs else schedule.state_dict())
    x, y = dataset()[world.rank :: world.size]
    losses = []
    for _ in range(job.steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(float(fabric.all_reduce(loss.detach())))
    fabric.save(job.folder, state | {"schedule": schedule, "step": state["step"] + job.steps})
    return losses
