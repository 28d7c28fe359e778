"""Optimizers of DTensors: refused, with the name of the function that takes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtree as st


@pytest.fixture
def parameter() -> Iterator[torch.nn.Parameter]:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        yield torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False))
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_that_are_dtensors_are_refused(parameter: torch.nn.Parameter) -> None:
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))}
    with pytest.raises(st.errors.TreeError, match=r"(?s)parameters that are DTensors.*from_dtensors"):
        st.optim.get_param_id_to_sharded_param_map(tree, [parameter])


def test_moments_that_are_dtensors_are_refused(parameter: torch.nn.Parameter) -> None:
    params = {0: st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 0, 2))}
    moments = {"state": {0: {"exp_avg": parameter.detach()}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(st.errors.TreeError, match=r"(?s)'exp_avg'.*a DTensor; use `from_dtensors`"):
        st.optim.optim_state_to_sharding_state(moments, params)
    with pytest.raises(st.errors.TreeError, match=r"(?s)DTensor.*from_dtensors"):
        st.optim.make_sharded_optimizer_tensor(params[0], parameter.detach(), "optimizer.state.exp_avg")
