"""Saves states by torch_checkpointing: FOLDER, under torchrun; `truth.pt` there has the whole tensors."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def gathered(manager: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Gather by gloo: the package's own function needs a GPU for it."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


DefaultMetadataManager._all_gather_pickled_data = gathered


class Boxes(torch.Tensor):
    """A rank's rows of a tensor that is no DTensor, as the package's protocol has them."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


def trained(mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5))  # rows that no 2 or 4 ranks share evenly
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(member) for key, member in value.items()}
    return [whole(member) for member in value] if isinstance(value, (list, tuple)) else value


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model, optimizer = trained(mesh)
    matrix, half = torch.arange(63.0).reshape(9, 7), torch.arange(6).bfloat16()
    grid = init_device_mesh("cpu", (1, ranks) if ranks < 4 else (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": {
            "both": distribute_tensor(matrix, grid, [Shard(0), Shard(1)]),
            "copies": [distribute_tensor(half, mesh, [Replicate()]), {"lr": 0.5}],
            "plain": torch.arange(3),
        },
        "step": 7,
        "loader": {"rank": rank},
    }
    for name, resharder in (("plain", None), ("described", DefaultResharder())):
        config = CheckpointManager.Config.with_sync_save()
        config.default = ItemSpec(resharder=resharder)
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        manager = config.build()
        manager.save(f"{folder}/{name}", state)
        manager.close()
    truth = whole(state)
    if rank == 0:
        torch.save(truth, f"{folder}/truth.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
