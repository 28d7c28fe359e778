"""A model under FSDP2 and tensor parallelism, saved by 4 processes and loaded by 2 on other meshes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardtree as st
from shardtree.core.layouts import tensor_shards
from shardtree.interop.dtensor import dtensor_layout, from_dtensors, to_dtensors
from shardtree.live import run_processes
from shardtree.world import World
from tests.interop.test_dtensor import rows

pytestmark = [pytest.mark.peers, pytest.mark.torchrun]

WIDTH, HIDDEN, VOCABULARY = 6, 10, 13  # 10 rows on 2 x 2 ranks are uneven, and so are 13


class Block(nn.Module):
    """Something like a transformer's layer, with a parameter that most ranks hold nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.scale * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


TOKENS = torch.arange(12).view(3, 4) % VOCABULARY


def trained(seed: int, sizes: dict[str, int], steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model on a mesh of these axes, cut as real ones are, after some steps of AdamW."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    world = init_device_mesh("cpu", (prod(sizes.values()),), mesh_dim_names=("world",))
    if hasattr(world, "_unflatten"):  # as torchtitan's: the root mesh has one axis
        mesh = world._unflatten(0, tuple(sizes.values()), tuple(sizes))
    else:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = Model()
    if "tp" in sizes:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
    if "dp" in sizes:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    train(model, optimizer, steps)
    return model, optimizer, mesh


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def whole(tree: Any) -> dict[str, torch.Tensor]:
    """Return every tensor whole, by path."""
    leaves = ((".".join(map(str, path)), leaf) for path, leaf in st.trees.leaves_with_paths(tree))
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {path: getattr(leaf, "full_tensor", leaf.clone)().clone() for path, leaf in tensors.items()}


def save_it(world: World, folder: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, bool]:
    model, optimizer, _ = trained(1, {"dp": 2, "tp": 2}, steps=2)
    tree = states(model, optimizer)
    shards, layout = from_dtensors(tree, strided="fsdp2"), dtensor_layout(tree, strided="fsdp2")
    st.save(shards, folder, layout=layout, world=world)
    held = st.layouts.join_columns(world.all_gather(st.layouts.shard_columns(tensor_shards(shards), world.rank)))
    alike = rows(held) == rows(layout)
    return whole(tree), model(TOKENS).detach(), alike


Loaded = tuple[dict[str, torch.Tensor], torch.Tensor]


def load_it(world: World, folder: str, sizes: dict[str, int]) -> Loaded:
    """Return what another model on another mesh holds and computes, once it has loaded the state."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    model, optimizer, mesh = trained(2, sizes, steps=1)
    target = states(model, optimizer)
    # Tensor parallelism alone leaves some parameters plain: those are shards in the checkpoint all the same.
    stored = st.load_tensors_metadata(folder)
    options: Any = {"strided": "fsdp2", "within": mesh, "replicated": lambda key, _: key in stored}
    asked, layout = from_dtensors(target, **options), dtensor_layout(target, **options)
    loaded = to_dtensors(st.load(asked, folder, layout=layout, world=world, strict="raise_all"), like=target)
    set_model_state_dict(model, loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optim"])
    return whole(states(model, optimizer)), model(TOKENS).detach()


MESHES = ({"dp": 2}, {"tp": 2}, {"dp": 1, "tp": 2})


def load_on_each(world: World, folder: str) -> list[Loaded]:
    return [load_it(world, folder, sizes) for sizes in MESHES]


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert found[path].shape == tensor.shape, path
        assert torch.equal(found[path], tensor), path


@pytest.mark.slow
def test_4_processes_save_fsdp2_with_tp_and_2_load_it_on_other_meshes(tmp_path: Path) -> None:
    saved: Sequence[Any] = run_processes(4, partial(save_it, folder=str(tmp_path)))
    expected, output, _ = saved[0]
    assert all(alike for _, _, alike in saved), "each rank computed what all ranks hold"
    stored = st.load_plain_tensors(tmp_path)
    check_same(stored, {path: tensor for path, tensor in expected.items() if path in stored})
    for on_rank in run_processes(2, partial(load_on_each, folder=str(tmp_path))):
        for found, again in on_rank:
            check_same(found, expected)
            torch.testing.assert_close(again, output)
    alone = Model()
    own = {key.removeprefix("model."): each for key, each in stored.items() if key.startswith("model.")}
    assert alone.load_state_dict(own, strict=False).unexpected_keys == []
    torch.testing.assert_close(alone(TOKENS), output)
    with pytest.raises(AssertionError, match=r"model\.embed\.weight"):  # the planted fault
        check_same({**expected, "model.embed.weight": expected["model.embed.weight"].flip(0)}, expected)
