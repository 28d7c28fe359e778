"""A job under FSDP2 that torch.distributed.checkpoint saved goes on with our load, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors
from shardtree.world import World, run_processes
from tests.interop.test_dtensor_fsdp2 import check_same, states, whole

pytestmark = [pytest.mark.peers, pytest.mark.torchrun]

BATCH = torch.linspace(-1, 1, 24).view(6, 4)  # the same on every rank, so that running statistics are too


class Job:
    """A model with running statistics under FSDP2, and Adam."""

    def __init__(self, seed: int) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, foreach=False)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(BATCH).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {**states(self.model, self.optimizer), "step": 3}


Tensors = dict[str, torch.Tensor]


def never_stops(world: World, folder: str) -> tuple[Tensors, Tensors]:
    """Return what was saved after three steps, by DCP itself, and what is there after one more."""
    import torch.distributed.checkpoint as dcp

    job = Job(seed=1)
    job.train(3)
    state = job.state()
    dcp.save(state, checkpoint_id=folder)
    saved = {path: tensor.clone() for path, tensor in whole(state).items()}
    job.train(1)
    return saved, whole(job.state())


def changes_over(world: World, folder: str) -> tuple[Tensors, Tensors, tuple[str, ...]]:
    """Return what another job loads with our functions, what is there after one more step, and what wasn't filled."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    job = Job(seed=2)
    job.train(1)
    state = job.state()
    explained = st.explain(from_dtensors(state), folder)
    loaded = to_dtensors(st.load(from_dtensors(state), folder, world=world), like=state)
    set_model_state_dict(job.model, loaded["model"])
    set_optimizer_state_dict(job.model, job.optimizer, loaded["optim"])
    resumed = {path: tensor.clone() for path, tensor in whole(job.state()).items()}
    job.train(1)
    return resumed, whole(job.state()), explained.unfilled


@pytest.mark.slow
def test_a_job_that_dcp_saved_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    folder = str(tmp_path / "dcp")
    saved, expected = run_processes(2, partial(never_stops, folder=folder))[0]
    steps = [path for path in saved if path.endswith(".step")]
    assert len(steps) == 6 and {"model.1.running_mean", "model.1.num_batches_tracked"} <= saved.keys()
    assert all(saved[path] == 3 and expected[path] == 4 for path in steps)
    for ranks in (2, 3):
        for resumed, found, unfilled in run_processes(ranks, partial(changes_over, folder=folder)):
            check_same(resumed, saved)
            if ranks == 2:
                check_same(found, expected)
            else:  # the mean of three equal gradients is rounded
                torch.testing.assert_close(found, expected)
            assert unfilled == ()
    lost = {**expected, "model.1.running_mean": torch.zeros(6)}  # the planted fault
    with pytest.raises(AssertionError, match=r"model\.1\.running_mean"):
        check_same(expected, lost)
