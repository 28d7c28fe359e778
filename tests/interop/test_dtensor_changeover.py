"""A job under FSDP2 that torch.distributed.checkpoint saved goes on with our load, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import shardtree as st
from shardtree.interop.dtensor import from_dtensors, to_dtensors
from shardtree.live import run_processes
from shardtree.world import World
from tests.interop.test_dtensor_fsdp2 import check_same, states, train, trained, whole

pytestmark = [pytest.mark.peers, pytest.mark.torchrun]

Tensors = dict[str, torch.Tensor]


def never_stops(world: World, folder: str) -> tuple[Tensors, Tensors]:
    """Return what was saved after three steps, by DCP itself, and what is there after one more."""
    import torch.distributed.checkpoint as dcp

    model, optimizer, _ = trained(1, {"dp": world.size}, steps=3)
    state = {**states(model, optimizer), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    saved = whole(state)
    train(model, optimizer, 1)
    return saved, whole(states(model, optimizer))


def changes_over(world: World, folder: str) -> tuple[Tensors, Tensors, tuple[str, ...]]:
    """Return what another job loads with our functions, what is there after one more step, and what wasn't filled."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    model, optimizer, _ = trained(2, {"dp": world.size}, steps=1)
    state = {**states(model, optimizer), "step": 0}
    explained = st.explain(from_dtensors(state), folder)
    loaded = to_dtensors(st.load(from_dtensors(state), folder, world=world), like=state)
    set_model_state_dict(model, loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optim"])
    resumed = whole(states(model, optimizer))
    train(model, optimizer, 1)
    return resumed, whole(states(model, optimizer)), explained.unfilled


@pytest.mark.slow
def test_a_job_that_dcp_saved_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    folder = str(tmp_path / "dcp")
    saved, expected = run_processes(2, partial(never_stops, folder=folder))[0]
    steps = [path for path in saved if path.endswith(".step")]
    assert len(steps) > 6 and {"model.blocks.0.seen", "model.embed.weight"} <= saved.keys()
    assert all(saved[path] == 3 and expected[path] == 4 for path in steps)
    for ranks in (2, 3):
        for resumed, found, unfilled in run_processes(ranks, partial(changes_over, folder=folder)):
            check_same(resumed, saved)
            if ranks == 2:
                check_same(found, expected)
            else:  # the mean of three equal gradients is rounded
                torch.testing.assert_close(found, expected)
            assert unfilled == ()
    lost = {**expected, "model.blocks.0.seen": torch.tensor(3)}  # the planted fault
    with pytest.raises(AssertionError, match=r"model\.blocks\.0\.seen"):
        check_same(expected, lost)
