"""What several processes save through torch.distributed.checkpoint; each of them imports this and no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def rows(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count * torch.Size(shape).numel()) % 120).reshape(count, *shape).to(dtype)


def save_dtensors(world: Any, folder: str) -> None:
    """Save DTensors of several placements, replicas, and values, from each of four processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    state = {
        "rows": distribute_tensor(rows(8, 6), line, [Shard(0)]),
        "uneven": distribute_tensor(rows(7, 5), line, [Shard(0)]),
        "columns": distribute_tensor(rows(8, 6).bfloat16(), square, [Replicate(), Shard(1)]),
        "blocks": distribute_tensor(rows(8, 6), square, [Shard(0), Shard(1)]),
        "few": distribute_tensor(rows(2, 3), line, [Shard(0)]),
        "copies": rows(3),
        "nested": {"list": [distribute_tensor(rows(4, 2), line, [Shard(0)]), {"step": 5}], "seed": 3},
    }
    dcp.save(state, checkpoint_id=folder)


def save_what_differs(world: Any, folder: str) -> None:
    dcp.save({"a": rows(5) + world.rank, f"of rank {world.rank}": world.rank}, checkpoint_id=folder)
