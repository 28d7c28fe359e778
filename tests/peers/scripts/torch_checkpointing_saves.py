"""Saves states by torch_checkpointing: FOLDER, under torchrun; `truth.pt` there has the whole tensors."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.barriers import DefaultStoreBarrier as StoreBarrier
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def gathered(manager: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Gather by gloo: the package's own function needs a GPU for it."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


DefaultMetadataManager._all_gather_pickled_data = gathered


def killed_at_the_barrier() -> None:
    """Have the last rank die where it has written its files, and the others wait for it."""
    wait = StoreBarrier.execute_barrier

    def execute(barrier: Any, *arguments: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(2)  # until the others have written theirs
            os.kill(os.getpid(), signal.SIGKILL)
        return wait(barrier, *arguments)

    StoreBarrier.execute_barrier = execute


def in_two_ways(grid: Any) -> dict[str, Any]:
    """Return the state of a layer that FSDP2 cuts after tensor parallelism has."""
    torch.manual_seed(1)
    layer = parallelize_module(torch.nn.Linear(4, 8), grid["tp"], ColwiseParallel())
    fully_shard(layer, mesh=grid["dp"])
    return layer.state_dict()


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
        "layer": in_two_ways(grid),
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
    if sys.argv[2:] == ["killed"]:
        killed_at_the_barrier()
    main(sys.argv[1])
