"""A GPT under Megatron-FSDP, on CPUs: trained, saved as `fsdp_dtensor`, and each rank's own tensors beside that.

    python megatron_fsdp.py FOLDER RANKS

It is made to run without CUDA, Transformer Engine and einops; what it saves is cut and named by Megatron-Core alone.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import megatron_optimizer as job
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what isn't installed
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

SHAPE = job.LAYOUT | job.MODEL | {"bf16": False, "lr": 0.01, "layers": 2, "gated": False}


class Idle(nullcontext[None]):
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def nothing(self, *_: Any) -> Idle:
        return self

    wait = wait_stream = wait_event = record = record_event = synchronize = nothing

    def query(self) -> bool:
        return True


def stream(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


torch.cuda.Stream = torch.cuda.Event = Idle  # type: ignore[assignment,misc]
torch.cuda.stream = stream  # type: ignore[assignment]
torch.cuda.current_stream = torch.cuda.default_stream = Idle  # type: ignore[assignment]
torch.Tensor.record_stream = lambda *_: None
dist._make_nccl_premul_sum = lambda _: dist.ReduceOp.SUM  # gloo lacks the other, and any gradient will do here
mcore_fsdp_adapter._get_dp_tp_mesh = lambda ranks, *_, **__: torch.arange(ranks.size())[:, None]

_from_group = DeviceMesh.from_group
DeviceMesh.from_group = lambda groups, device_type, **options: _from_group(groups, "cpu", **options)  # type: ignore[method-assign]


class OnCPU(job.OnCPU):
    """As for the optimizer; devices are named in more places."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function("cpu")
        args = tuple("cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in args)
        return super().__torch_function__(function, types, args, kwargs)


def wrapped(config: Any, _: Any, chunk: Any) -> Any:
    how = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    return mcore_fsdp_adapter.FullyShardedDataParallel(config, how, chunk)


job.DistributedDataParallel = wrapped


def start(optimizer: Any) -> None:
    """Give each parameter its states, as Transformer Engine's Adam does: torch's leaves out those without elements."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


def one_rank(rank: int, folder: str, ranks: int) -> None:
    group = f"file://{folder}/group-{os.getppid()}"
    dist.init_process_group("gloo", init_method=group, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(1, 1)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    with OnCPU():
        (model,), optimizer = job.job(SHAPE | {"dp": ranks})
        start(optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer)
        job.learn(Path(folder) / "losses-0", [model], optimizer)
        weights = model.state_dict_for_save_checkpoint()  # first: it puts the parts in the parameters' place
        states = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
        tree = {"model": weights, "optimizer": states, "iteration": 3}
        own = {f"model.{key}": value for key, value in weights.items()}
        own |= {
            f"optimizer.state.{key}.{name}": one
            for key, all_of in states["state"].items()
            for name, one in all_of.items()
        }
        tensors = {key: getattr(one, "_local_tensor", one) for key, one in own.items() if isinstance(one, torch.Tensor)}
        torch.save({key: one.detach().clone() for key, one in tensors.items()}, f"{folder}/own-{rank}")
        preprocess_state_dict_for_uneven_dtensor(tree)
        dcp.save(tree, storage_writer=dcp.FileSystemWriter(f"{folder}/saved"))
    dist.destroy_process_group()


def main(folder: str, ranks: str) -> None:
    job.run_ranks(one_rank, [(rank, folder, int(ranks)) for rank in range(int(ranks))], folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
