"""DCP's load and save over our checkpoints on several processes: FSDP2, other meshes, failures on one rank."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import shardtree as st
from shardtree.interop.dcp import CheckpointReader, CheckpointWriter
from shardtree.interop.dtensor import from_dtensors, to_dtensors
from shardtree.live import run_processes
from shardtree.world import World
from tests.interop.test_dtensor_fsdp2 import check_same, states, trained, whole

pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]

Tensors = dict[str, torch.Tensor]

QUICK = st.SaveOptions(durable=False)


def state_of(model: Any, optimizer: Any, world: World, step: int) -> dict[str, Any]:
    own = {f"of rank {world.rank}": [step, world.rank]}
    return {**states(model, optimizer), "step": step, "mixed": [torch.ones(1), step], "loader": own}


def saves(world: World, folder: str) -> Tensors:
    """Save by DCP's own writer, by ours in two formats, and by ours in the background; return what was saved."""
    model, optimizer, _ = trained(1, {"dp": world.size}, steps=2)
    state = state_of(model, optimizer, world, 3)
    dcp.save(state, checkpoint_id=f"{folder}/theirs")
    for backend in ("safetensors", "dcp"):
        dcp.save(state, storage_writer=CheckpointWriter(f"{folder}/{backend}", backend=backend, options=QUICK))
    group = dist.new_group(backend="gloo")
    writer = CheckpointWriter(f"{folder}/later", process_group=group, options=QUICK)
    future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
    for parameter in model.parameters():
        parameter.data.zero_()
    future.result()
    dcp.load(state, storage_reader=CheckpointReader(f"{folder}/later"))
    return whole(state)


def loads(world: World, folder: str) -> list[tuple[Tensors, Any]]:
    """Return what each folder fills another model with, on this number of ranks."""
    results = []
    for name in ("theirs", "safetensors", "dcp", "later"):
        model, optimizer, _ = trained(2, {"dp": world.size}, steps=1)
        state = state_of(model, optimizer, world, 0)
        del state["loader"]  # its keys are those of other ranks
        dcp.load(state, storage_reader=CheckpointReader(f"{folder}/{name}"))
        results.append((whole(state), (state["step"], state["mixed"][1])))
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    results.append((whole(state), (state["step"], state["mixed"][1])))
    return results


def test_what_2_processes_save_3_load(tmp_path: Path) -> None:
    saved = run_processes(2, partial(saves, folder=str(tmp_path)))
    expected = saved[0]
    for ranks in (3, 2):
        for results in run_processes(ranks, partial(loads, folder=str(tmp_path))):
            for found, plain in results:
                check_same(found, expected)
                assert plain == (3, 3)
    for name in ("safetensors", "dcp", "later"):
        assert st.verify(tmp_path / name) == ()
        common = st.load_common_state_dict(tmp_path / name)
        assert common["loader"] == {"of rank 0": [3, 0], "of rank 1": [3, 1]}
    with pytest.raises(AssertionError, match="step"):  # the planted fault
        check_same({**expected, "optim.state.head.bias.step": torch.tensor(1.0)}, expected)


def reads(world: World, folder: str) -> tuple[int, int]:
    """Return how many bytes a rank has, and how many it read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    state = {"w": distribute_tensor(torch.zeros(64, 4096), mesh, [Shard(0)])}
    reports: list[Any] = []
    reader = CheckpointReader(folder, options=st.LoadOptions(report=reports.append))
    dcp.load(state, storage_reader=reader)
    (report,) = reports
    assert (state["w"].to_local() == 1).all()
    return state["w"].to_local().nbytes, report.bytes_read


def test_each_rank_reads_its_own_boxes(tmp_path: Path) -> None:
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(64, 4096))}, tmp_path, options=QUICK)
    for held, read in run_processes(2, partial(reads, folder=str(tmp_path))):
        assert held <= read < 1.5 * held


class Failing(dcp.DefaultSavePlanner):
    """A planner that can't resolve one rank's tensor."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory left")
        return super().resolve_data(write_item)


def fails(world: World, folder: str) -> list[str]:
    """Return the errors of this rank: of a rank that fails, of another process group, of FSDP2 on uneven rows."""
    model, optimizer, _ = trained(1, {"dp": world.size}, steps=1)
    state = state_of(model, optimizer, world, 3)
    writer = CheckpointWriter(folder, overwrite=True, options=QUICK)
    dcp.save(state, storage_writer=writer)
    errors = []
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    calls: list[dict[str, Any]] = [{"planner": Failing()}, {"storage_writer": CheckpointWriter(process_group=alone)}]
    for changed in calls:
        with pytest.raises(CheckpointException) as caught:
            dcp.save({**state, "step": 4}, **{"storage_writer": writer, **changed})
        errors += [f"{type(error).__name__}: {error}" for error, _ in caught.value.failures.values()]
    dcp.load(state, storage_reader=CheckpointReader(folder))
    return [*errors, str(state["step"])]


def test_a_rank_that_fails_is_an_error_of_all_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    first, second = run_processes(2, partial(fails, folder=str(tmp_path)))
    assert first == second and first[-1] == "3"
    assert any("rank 1: RuntimeError: no memory left" in error for error in first), first
    assert any(error.startswith("WorldError: dcp.save: the writer has another process group") for error in first), first
    assert st.verify(tmp_path) == ()


def strided(world: World, folder: str) -> tuple[list[str], bool]:
    """Return how calls of DCP fail for FSDP2 over tensor parallelism on 13 rows, and whether ours give them back."""
    model, optimizer, _ = trained(1, {"dp": 3, "tp": 2}, steps=1)
    state = states(model, optimizer)
    st.save(from_dtensors(state, strided="fsdp2"), f"{folder}/ours", options=QUICK)
    calls = (
        partial(dcp.save, state, checkpoint_id=f"{folder}/dcp"),
        partial(dcp.save, state, storage_writer=CheckpointWriter(f"{folder}/plug")),
        partial(dcp.load, {"model": state["model"]}, storage_reader=CheckpointReader(f"{folder}/ours")),
    )
    errors = []
    for call in calls:
        with pytest.raises(CheckpointException) as caught:
            call()
        (first, *_) = [error for error, _ in caught.value.failures.values()]
        errors.append(f"{type(first).__name__}: {first}")
    again = states(*trained(2, {"dp": 3, "tp": 2}, steps=1)[:2])
    found = to_dtensors(st.load(from_dtensors(again, strided="fsdp2"), f"{folder}/ours"), like=again)
    local = {key: tensor.to_local() for key, tensor in found["model"].items() if isinstance(tensor, DTensor)}
    return errors, all(torch.equal(local[key], state["model"][key].to_local()) for key in local)


def test_uneven_rows_of_fsdp2_over_tensor_parallelism_have_no_place_in_dcps_plan(tmp_path: Path) -> None:
    for (theirs, saved, loaded), same in run_processes(6, partial(strided, folder=str(tmp_path))):
        assert "model.head.weight has overlapping chunks" in theirs and saved == theirs
        assert loaded.startswith("UnsupportedValue: dcp.load: DCP assumes wrong offsets or shapes"), loaded
        assert "model.head.weight: a DTensor of shape (13, 6)" in loaded
        assert same


def alone(world: World, folder: str) -> bool:
    """Return whether a rank that saves by itself, beside the others, gets its own state back."""
    own, state = f"{folder}/{world.rank}", {"w": torch.full((2,), float(world.rank)), "rank": world.rank}
    dcp.save(state, storage_writer=CheckpointWriter(own, options=QUICK), no_dist=True)
    found = {"w": torch.zeros(2) - 1, "rank": -1}
    dcp.load(found, storage_reader=CheckpointReader(own), no_dist=True)
    return torch.equal(found["w"], state["w"]) and found["rank"] == world.rank


def test_ranks_may_save_alone(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs in one process
        assert run_processes(2, partial(alone, folder=str(tmp_path))) == [True, True]
