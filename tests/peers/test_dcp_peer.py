"""Beside torch.distributed.checkpoint: DTensors saved by one library are loaded by the other, in other layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.testing import first_difference, outline
from shardtree.world import World, run_processes

pytestmark = [pytest.mark.peers, pytest.mark.torchrun, pytest.mark.slow]

WHOLE = {
    "model.weight": torch.arange(48.0).view(8, 6),
    "model.half": torch.arange(24).view(4, 6).bfloat16(),
    "model.uneven": torch.arange(15.0).view(5, 3),
    "model.norm": torch.arange(3, dtype=torch.float64),
    "model.count": torch.tensor(5),
}
SHARDED = ("weight", "half", "uneven")
PLAIN = {"step": 7, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2}], "name": None}


def state(axis: int, *, empty: bool) -> dict[str, Any]:
    """Return a nested state as DCP takes it: DTensors in shards along an axis, plain tensors and plain values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model: dict[str, Any] = {}
    for key, tensor in WHOLE.items():
        name, data = key.removeprefix("model."), torch.zeros_like(tensor) if empty else tensor.clone()
        model[name] = distribute_tensor(data, mesh, [Shard(axis)]) if name in SHARDED else data
    plain = {"step": 0, "groups": [{"lr": 0.0, "betas": ()}, {"lr": 0.0}], "name": ""} if empty else PLAIN
    return {"model": model, **plain}


def shards(world: World, axis: int, *, empty: bool = False) -> dict[str, Any]:
    """Return the same state as shardtree takes it; the odd one in pieces of 3 and 2 rows, or flat where it is cut."""
    tree: dict[str, Any] = {}
    for key, tensor in WHOLE.items():
        name, data = key.removeprefix("model."), torch.zeros_like(tensor) if empty else tensor
        if name not in SHARDED:
            tree[name] = st.ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=world.rank)
            continue
        flat = [0, 7, 15][world.rank : world.rank + 2] if name == "uneven" and world.size == 2 else None
        if flat is not None and axis == 0:
            taken = slice(*flat)
            part = data.flatten()[taken].clone()
            tree[name] = st.ShardedTensor.from_rank_offsets_flat(key, part, tuple(data.shape), flattened_range=taken)
        elif flat is not None or name == "uneven":
            tree[name] = st.ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=world.rank)
        else:
            part = data.chunk(world.size, axis)[world.rank].contiguous()
            tree[name] = st.ShardedTensor.from_rank_offsets(key, part, (axis, world.rank, world.size))
    return {"model": tree, **({} if empty else PLAIN)}


def theirs(folder: str, world: World) -> list[str]:
    """Save with DCP and load with shardtree; then the other way round; return what differs."""
    import torch.distributed.checkpoint as dcp

    dcp.save(state(0, empty=False), checkpoint_id=f"{folder}/theirs")
    found = [f"theirs: {line}" for axis in (0, 1) for line in loaded_here(f"{folder}/theirs", axis, world)]
    st.save(shards(world, 0), f"{folder}/ours", ("dcp", 1))
    found += [f"ours: {line}" for axis in (0, 1) for line in loaded_there(f"{folder}/ours", axis)]
    st.save(shards(world, 1), f"{folder}/columns", ("dcp", 1))
    found += [f"columns: {line}" for axis in (0, 1) for line in loaded_there(f"{folder}/columns", axis)]
    found += [f"here: {line}" for axis in (0, 1) for line in loaded_here(f"{folder}/columns", axis, world)]
    if world.rank == 0:
        damage(Path(folder) / "columns" / "__0_0.distcp")
    world.barrier()
    return found + [f"damaged: {line}" for line in loaded_there(f"{folder}/columns", 0)]


def damage(file: Path) -> None:
    """The planted fault: a bit of a tensor is flipped."""
    data = bytearray(file.read_bytes())
    data[data.index(WHOLE["model.weight"].chunk(2, 1)[0].contiguous().numpy().tobytes())] ^= 1
    file.write_bytes(data)


def loaded_here(folder: str, axis: int, world: World) -> list[str]:
    loaded = st.load(shards(world, axis, empty=True), folder, world=world)
    expected = shards(world, axis)["model"]
    model = loaded.pop("model")
    found = {name: first_difference(model[name], expected[name].data) for name in expected}
    lines = [f"rows and columns {axis}: {name}: {difference}" for name, difference in found.items() if difference]
    return lines + ([] if outline(loaded) == outline(PLAIN) else [f"common state: {loaded}"])


def loaded_there(folder: str, axis: int) -> list[str]:
    import torch.distributed.checkpoint as dcp

    target, expected = state(axis, empty=True), state(axis, empty=False)
    dcp.load(target, checkpoint_id=folder)
    model = target.pop("model")
    lines = []
    for name, tensor in expected.pop("model").items():
        one, other = (item.to_local() if name in SHARDED else item for item in (model[name], tensor))
        difference = first_difference(one, other)
        lines += [f"axis {axis}: {name}: {difference}"] if difference else []
    return lines + ([] if outline(target) == outline(PLAIN) else [f"common state: {target}"])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_processes(2, partial(theirs, str(folder)))


@pytest.mark.slow
def test_each_loads_what_the_other_saved_in_its_own_layout(results: tuple[Path, list[list[str]]]) -> None:
    assert [line for lines in results[1] for line in lines if not line.startswith("damaged")] == []


@pytest.mark.slow
def test_the_comparison_catches_a_flipped_bit(results: tuple[Path, list[list[str]]]) -> None:
    damaged = [line for lines in results[1] for line in lines if line.startswith("damaged")]
    assert any("weight" in line for line in damaged)


@pytest.mark.parametrize("name", ["theirs", "ours"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_is_loaded_on_another_number_of_ranks(
    results: tuple[Path, list[list[str]]], name: str, ranks: int
) -> None:
    def one_rank(world: World) -> None:
        make = st.ShardedTensor.from_rank_offsets
        whole = {key: make(key, torch.zeros_like(tensor), replica_id=world.rank) for key, tensor in WHOLE.items()}
        loaded = st.load(whole, results[0] / name, world=world)
        assert {key: first_difference(loaded[key], tensor) for key, tensor in WHOLE.items()} == dict.fromkeys(WHOLE)

    st.simulate(ranks, one_rank)
    assert outline(st.load_common_state_dict(results[0] / name)) == outline(PLAIN)
