"""A GPT with Megatron-Core's Muon, and Adam for what isn't a matrix, on CPUs: trained, saved, loaded.

    python megatron_muon.py HOW FOLDER '{"tp": 2, "dp": 2}' train:a,megatron_saves:a '{"pp": 2}' shardtree_loads:a

HOW is `whole`, for an optimizer of all parameters on each rank; `layers`, for LayerWiseDistributedOptimizer, which
gives each rank some parameters; or, from 0.18 on, the format of the distributed Adam beside it, whose buffers hold
the rest.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import megatron_optimizer as job
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what isn't installed
    from megatron.core import optimizer as optimizers
    from megatron.core.optimizer import layer_wise_optimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

from tests.peers.megatron_versions import INSTALLED

# Gloo gathers no tensors of unequal sizes; Megatron-Core has the other as what it compares that with.
LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params

WRAPPED, CONFIG = job.DistributedDataParallel, job.OptimizerConfig


class Muon:
    """Makes what `megatron_optimizer.py` makes, with another optimizer."""

    def __init__(self, how: str) -> None:
        self.in_buffers = how.endswith("reshardable")
        self.by_layers = how != "whole"
        self.metadata = {"chained_optim_avoid_prefix": True}
        if self.in_buffers:
            self.metadata["distrib_optim_sharding_type"] = how

    def wrapped(self, config: Any, buffers: Any, chunk: Any) -> Any:
        buffers.use_distributed_optimizer = self.in_buffers
        if not self.in_buffers:
            return WRAPPED(config, buffers, chunk)
        layer_wise_optimizer.tag_params_for_buffer_routing([chunk])
        size = job.parallel_state.get_data_parallel_world_size()
        make = LayerWiseDistributedOptimizer.compute_full_param_layout
        layout = make([*chunk.parameters()], buffers.bucket_size, size, buffers)
        return WRAPPED(config, buffers, chunk, full_param_layout=layout)

    def configured(self, **options: Any) -> Any:
        options |= {"optimizer": "muon", "use_distributed_optimizer": False}
        if INSTALLED >= (0, 18):
            options["use_layer_wise_distributed_optimizer"] = self.by_layers
        return CONFIG(**options)

    def optimizer(self, config: Any, chunks: Any) -> Any:
        if INSTALLED >= (0, 18):
            return optimizers.get_megatron_optimizer(config, chunks)
        return get_megatron_muon_optimizer(config, chunks, layer_wise_distributed_optimizer=self.by_layers)


def train(chunks: Any, optimizer: Any) -> None:
    """As in the other script, but all optimizers step together: each rank's parameters are then sent to the others."""
    for step in range(3):
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                part = job.tp_rank() if job.is_cut(parameter) else 0
                seed = torch.Generator().manual_seed(job.hash_of(name, step) + part)
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=seed))
        optimizer.step()


def inner(optimizer: Any) -> Iterator[Any]:
    for one in getattr(optimizer, "chained_optimizers", ()):
        yield from inner(one)
    if not hasattr(optimizer, "chained_optimizers"):
        yield optimizer.optimizer


def local(optimizer: Any) -> Iterator[torch.Tensor]:
    """All that a process holds of masters and moments."""
    for one in inner(optimizer):
        for group in one.param_groups:
            for parameter in group["params"]:
                yield parameter.detach()
                states = sorted(one.state[parameter].items())
                yield from (value for name, value in states if name != "step")


def main(how: str, *arguments: str) -> None:
    muon = Muon(how)
    job.DistributedDataParallel, job.OptimizerConfig = muon.wrapped, muon.configured
    job.get_megatron_optimizer, job.train, job.local = muon.optimizer, train, local
    job.PAGE["sharded_state"].__globals__["METADATA"] = muon.metadata
    job.main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
