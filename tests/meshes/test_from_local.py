"""Tensors that a rank holds, described by mesh and spec: the same leaves as those cut from the whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

import shardtree as st
from shardtree.core.lazy import stored
from shardtree.errors import CheckpointingException
from shardtree.layouts import AxisSplit, Mesh, PartitionSpec, from_local, shard_at
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.storage import MemoryStorage
from shardtree.testing import MeshCase as Case
from shardtree.testing import mesh_cases, outline
from shardtree.trees import apply_factories, leaves_with_paths, map_shards
from shardtree.world import World, simulate
from tests.core.trees.samples import assert_caught

ROWS = PartitionSpec("tp")
TP = Mesh(tp=2)


def held(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) else leaf


def described(tree: Any) -> list[Any]:
    """Return what shards say of themselves but how regular their grid is, which equal parts alone tell."""
    return [
        (path, leaf.key, leaf.dtype, leaf.local_shape, leaf.global_shape, leaf.global_offset, leaf.replica_id)
        for path, leaf in leaves_with_paths(apply_factories(tree))
        if isinstance(leaf, ShardedTensor)
    ]


def check_same_as_cut(describe: Callable[..., Any], case: Case) -> None:
    shapes = {key: tuple(whole.shape) for key, whole in case.whole.items()}
    for rank in case.mesh.ranks:
        cut = shard_at(dict(case.whole), case.mesh, dict(case.specs), rank)
        local = map_shards(held, cut)
        specs = {key: case.specs[key] for key in local}
        tree = describe(local, case.mesh, specs, rank, global_shapes=shapes)
        assert described(tree) == described(cut)
        assert outline(map_shards(held, tree)) == outline(local)


@given(mesh_cases())
def test_it_is_what_is_cut_from_the_whole_tensors(case: Case) -> None:
    check_same_as_cut(from_local, case)


def test_the_law_catches_ranks_that_are_taken_for_the_first() -> None:
    def first(tree: Any, mesh: Mesh, specs: Any, rank: int, **options: Any) -> Any:
        return from_local(tree, mesh, specs, mesh.ranks[0])

    assert_caught(check_same_as_cut, first, mesh_cases())


def test_equal_parts_need_no_global_shape() -> None:
    mesh = Mesh(dp=2, tp=2)
    whole = {"up": torch.arange(24).reshape(8, 3), "norm": torch.ones(3), "both": torch.arange(8), "step": 3}
    specs = {"up": ROWS, "norm": PartitionSpec(), "both": PartitionSpec(("dp", "tp"))}
    for rank in mesh.ranks:
        cut = shard_at(whole, mesh, specs, rank)
        tree = from_local(map_shards(held, cut), mesh, specs, rank)
        assert described(tree) == described(cut) and tree["step"] == 3
        assert tree["up"].axis_fragmentations == cut["up"].axis_fragmentations == (2, 1)


def test_its_data_are_the_very_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert from_local({"w": parameter}, TP, ROWS, 1)["w"].data is parameter


def test_several_boxes_are_a_factory() -> None:
    spec = PartitionSpec((AxisSplit("tp", split_factor=2),))
    leaf = from_local({"w": torch.arange(4)}, TP, spec, 1)["w"]
    assert [(part.global_offset, part.data.tolist()) for part in leaf.build()] == [((2,), [0, 1]), ((6,), [2, 3])]


def test_a_tensor_that_is_there_twice_has_one_main_copy() -> None:
    tied = torch.zeros(2)
    tree = from_local({"in": tied, "out": tied}, TP, ROWS, 1, key=lambda path: "embedding")
    assert [tree[name].replica_id for name in ("in", "out")] == [0, 2]


def test_a_tied_parameter_of_a_state_dict_has_one_main_copy() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("input", "output")})
    model["output"].weight = model["input"].weight
    tree = from_local(model.state_dict(), TP, ROWS, 1, key=lambda path: "embedding")  # views, a new one for each name
    assert [leaf.replica_id for leaf in tree.values()] == [0, 2]


def test_lazy_tensors_are_described_and_not_read() -> None:
    lazy = stored(lambda offset, shape: pytest.fail("read"), (2, 3), torch.float16, name="w")
    leaf = from_local({"w": lazy}, TP, ROWS, 1)["w"]
    assert (leaf.data, leaf.dtype, leaf.global_offset) == (lazy, torch.float16, (2, 0))


def test_parts_that_are_not_equal_are_told_of_by_save() -> None:
    storage = MemoryStorage()

    def save(world: World) -> None:
        tree = from_local({"w": torch.zeros(3 - world.rank)}, TP, ROWS, world.rank)
        st.save(tree, storage, world=world)

    with pytest.raises(CheckpointingException, match=r"'w'[\s\S]*pass global_shapes="):
        simulate(2, save)
