"""What several processes save through torch.distributed.checkpoint; each of them imports this and no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def rows(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count * torch.Size(shape).numel()) % 120).reshape(count, *shape).to(dtype)


def save_what_differs(world: Any, folder: str) -> None:
    dcp.save({"a": rows(5) + world.rank, f"of rank {world.rank}": world.rank}, checkpoint_id=folder)
