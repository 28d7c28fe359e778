"""A training job under FSDP2: a model, AdamW, a scheduler and a data loader. Both scripts train it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

BATCH = 12  # samples in a global batch, however many ranks share it
DROPOUT = float(os.environ.get("DROPOUT", "0"))


def build() -> tuple[Any, Any, Any]:
    """Return the model, its optimizer and its scheduler, as before the first step."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(8, 30), torch.nn.Linear(30, 1)
    model = torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.Dropout(DROPOUT), last)
    for module in (first, last, model):
        fully_shard(module)
    torch.manual_seed(1 + dist.get_rank())  # from here on, each rank draws its own numbers
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def batches(first: int, last: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield this rank's part of the global batches from `first` to `last`, each with its number."""
    x = torch.randn(240, 8, generator=torch.Generator().manual_seed(7))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = [number % len(x) for number in range((first - 1) * BATCH, last * BATCH)]
    data = TensorDataset(x, x[:, :1] * x[:, 1:2])
    own = torch.Generator()  # a loader without one draws from the rank's random numbers when it starts
    loader = DataLoader(data, BATCH // ranks, sampler=numbers[rank::ranks], generator=own)
    return enumerate(loader, first)


def train_step(model: Any, optimizer: Any, scheduler: Any, batch: list[torch.Tensor]) -> float:
    """Take a step, and return the loss of the global batch."""
    x, y = batch
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    total = loss.detach() / dist.get_world_size()
    dist.all_reduce(total)
    return float(total)
