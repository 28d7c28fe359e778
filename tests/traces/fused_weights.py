"""A trace with a move of each kind, and a checkpoint that it is of; another process imports this and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import shardtree as st
from shardtree.storage import MemoryStorage

Tensors = Mapping[str, torch.Tensor]
WEIGHTS = {name: torch.arange(48.0).view(8, 6) + 100 * place for place, name in enumerate(("q", "k", "v", "o"))}


def fused(given: Tensors, order: str = "qkv", factor: float = 0.125, bias: float = 1.0) -> dict[str, torch.Tensor]:
    """Return what has a move of each kind: of a source, through a function, of a constant, of several tensors."""
    o = given["o"]
    return {
        "qkv": torch.cat([given[name] for name in order]),
        "o": torch.stack([o * factor, torch.full_like(o, bias)]),
        "sum": (o.to(torch.bfloat16) + given["q"]).t(),
    }


def traced(**changes: Any) -> st.Trace:
    return st.trace(lambda given: fused(given, **changes), WEIGHTS)


def saved() -> MemoryStorage:
    folder = MemoryStorage()
    st.save({name: st.ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in WEIGHTS.items()}, folder)
    return folder


SOURCE = saved()


def identity(found: st.Trace) -> str:
    """Return what a conversion through a trace is known by, as text."""
    opened = st.open_checkpoint(SOURCE, transform=found)
    return str([opened[name].data.source.made_of[:2] for name in found.outputs])
