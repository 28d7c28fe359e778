"""Beside torch.distributed.checkpoint: it loads what ranks save here, as DTensors in other layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.live import run_processes
from shardtree.testing import first_difference, outline
from shardtree.world import World

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


def shards(world: World, axis: int) -> dict[str, Any]:
    """Return the same state as shardtree takes it; the odd one whole, or flat where the others are in rows."""
    tree: dict[str, Any] = {}
    for key, data in WHOLE.items():
        if key == "model.uneven" and axis == 0:
            taken = slice(*[0, 7, 15][world.rank : world.rank + 2])
            part = data.flatten()[taken].clone()
            tree[key] = st.ShardedTensor.from_rank_offsets_flat(key, part, tuple(data.shape), flattened_range=taken)
        elif key == "model.uneven" or key.removeprefix("model.") not in SHARDED:
            tree[key] = st.ShardedTensor.from_rank_offsets(key, data.clone(), replica_id=world.rank)
        else:
            part = data.chunk(world.size, axis)[world.rank].contiguous()
            tree[key] = st.ShardedTensor.from_rank_offsets(key, part, (axis, world.rank, world.size))
    return {"model": {key.removeprefix("model."): shard for key, shard in tree.items()}, **PLAIN}


def loaded_by_dcp(world: World, folder: str) -> list[str]:
    """Save rows, and columns; return what differs in what DCP loads of each in rows, in columns, and once damaged."""
    found = []
    for saved, name in enumerate(("rows", "columns")):
        st.save(shards(world, saved), f"{folder}/{name}", ("dcp", 1))
        found += [f"{name}: {line}" for axis in (0, 1) for line in loaded_there(f"{folder}/{name}", axis)]
    if world.rank == 0:
        damage(Path(folder) / "columns" / "__0_0.distcp")
    world.barrier()
    return found + [f"damaged: {line}" for line in loaded_there(f"{folder}/columns", 0)]


def damage(file: Path) -> None:
    """The planted fault: a bit of a tensor is flipped."""
    data = bytearray(file.read_bytes())
    data[data.index(WHOLE["model.weight"].chunk(2, 1)[0].contiguous().numpy().tobytes())] ^= 1
    file.write_bytes(data)


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


def test_dcp_loads_in_any_layout_what_ranks_save_here_and_the_comparison_catches_a_flipped_bit(tmp_path: Path) -> None:
    lines = [line for each in run_processes(2, partial(loaded_by_dcp, folder=str(tmp_path))) for line in each]
    assert [line for line in lines if not line.startswith("damaged")] == []
    assert any("weight" in line for line in lines)
