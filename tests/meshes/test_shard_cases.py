"""Trees cut for a mesh: specs in each form, keys, pipelines, loads into abstract trees, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.layouts import tree_columns
from shardtree.errors import CheckpointingException, IntegrityError
from shardtree.layouts import (
    AxisSplit,
    Mesh,
    PartitionSpec,
    abstract,
    layout_of,
    shard,
    shard_at,
    sharding_problems,
    specs_by_pattern,
    unshard,
)
from shardtree.trees import HOLE, diff

TWO = Mesh(tp=2)
ROWS, COLUMNS, WHOLE = PartitionSpec("tp"), PartitionSpec(None, "tp"), PartitionSpec()
FSDP_OVER_TP = PartitionSpec((AxisSplit("dp", split_factor=2), AxisSplit("tp")))


def matrix(rows: int = 4, columns: int = 6) -> torch.Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns)


TREE = {"layers": [{"w": matrix(), "b": torch.arange(4.0)}, {"w": matrix(6, 2), "b": torch.arange(6.0)}], "step": 3}


def offsets(tree: Any, *path: Any) -> tuple[int, ...]:
    for entry in path:
        tree = tree[entry]
    return tree.global_offset


@pytest.mark.parametrize(
    "specs",
    [
        {"layers": [{"w": COLUMNS, "b": ROWS}, ROWS]},
        {"layers": [{"w": COLUMNS, "b": ROWS}, {"w": ROWS, "b": ROWS}], "step": None},
        lambda key, leaf: COLUMNS if key == "layers.0.w" else ROWS,
        lambda key, leaf: COLUMNS if tuple(leaf.shape) == (4, 6) else ROWS,
        specs_by_pattern({"layers.0.w": COLUMNS, "layers.**": ROWS}),
        specs_by_pattern({"**.0.w": COLUMNS}, default=ROWS),
    ],
)
def test_specs_are_a_tree_a_prefix_of_one_a_function_or_patterns(specs: Any) -> None:
    tree = shard_at(TREE, TWO, specs, 1)
    assert offsets(tree, "layers", 0, "w") == (0, 3)
    assert offsets(tree, "layers", 0, "b") == (2,)
    assert offsets(tree, "layers", 1, "w") == (3, 0)
    assert tree["layers"][0]["w"].key == "layers.0.w"
    assert tree["step"] == 3


def test_a_rank_lacks_what_other_stages_hold() -> None:
    stages = Mesh(pp=2, tp=2)
    specs = {"layers": [PartitionSpec("tp", at={"pp": 0}), PartitionSpec("tp", at={"pp": 1})], "embed": PartitionSpec()}
    tree = {**TREE, "embed": {"w": matrix()}, "head": {}}
    trees = shard(tree, stages, specs)
    assert trees[0]["layers"][1] is HOLE and trees[3]["layers"][0] is HOLE
    assert trees[3]["head"] == {} and trees[3]["step"] == 3
    assert shard_at([matrix()], stages, PartitionSpec(at={"pp": 0}), 3) == [HOLE]
    by_name = {"layers": dict(enumerate(TREE["layers"])), "step": 3}
    named = shard(by_name, stages, {"layers": dict(enumerate(specs["layers"]))})
    assert list(named[0]["layers"]) == [0] and list(named[2]["layers"]) == [1]
    assert sharding_problems([tree_columns(trees)]) == ()
    assert not diff(unshard(trees), tree) and not diff(unshard(named), by_name)


def test_keys_are_paths_or_what_a_function_says() -> None:
    tree = shard_at(TREE, TWO, ROWS, 0, key=lambda path: "/".join(map(str, path)))
    assert tree["layers"][0]["b"].key == "layers/0/b"


def test_a_whole_shard_keeps_its_key_and_its_padding() -> None:
    given = replace(st.ShardedTensor.from_rank_offsets("my.key", matrix()), allow_shape_mismatch=True)
    found = shard_at({"w": given}, TWO, ROWS, 1)["w"]
    assert (found.key, found.global_offset, found.allow_shape_mismatch) == ("my.key", (2, 0), True)


def test_one_tensor_under_one_key_twice_has_one_main_replica() -> None:
    embed = matrix()
    tied = {"embed": embed, "head": embed, "b": torch.zeros(2)}
    key = {"embed": "word", "head": "word", "b": "b"}
    mesh = Mesh(pp=2, tp=2)
    specs = {"embed": PartitionSpec("tp", at={"pp": 0}), "head": PartitionSpec("tp", at={"pp": 1}), "b": WHOLE}
    trees = shard(tied, mesh, specs, key=lambda path: key[path[0]])
    columns = tree_columns(trees)
    assert columns.keys == ("b", "word") and sharding_problems([columns]) == ()
    told = layout_of(tied, mesh, specs, key=lambda path: key[path[0]])
    assert sharding_problems([told]) == () and sorted(told.main.tolist()) == sorted(columns.main.tolist())
    whole = unshard(trees)
    assert torch.equal(whole["head"], embed) and whole["head"] is whole["embed"]


def test_objects_are_replicas_and_other_values_stay() -> None:
    tree = {"rng": st.ShardedObject("rng", [1], (1,), (0,)), "local": st.LocalNonpersistentObject(5), "none": None}
    trees = shard(tree, TWO, ROWS)
    assert [own["rng"].replica_id for own in trees] == [0, 1]
    assert trees[1]["local"] == tree["local"] and trees[1]["none"] is None
    assert abstract(tree, TWO, ROWS)[0]["rng"].data is None
    assert unshard(trees) == {"rng": [1], "local": tree["local"], "none": None}


def test_lazy_tensors_are_cut_without_a_read(tmp_path: Any) -> None:
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", matrix())}, tmp_path / "c")
    trees = shard(st.open_checkpoint(tmp_path / "c"), Mesh(dp=2, tp=1), FSDP_OVER_TP)
    assert [part.data.read().tolist() for part in trees[1]["w"].build()] == [
        [list(range(6, 12))],
        [list(range(18, 24))],
    ]
    assert torch.equal(unshard(trees)["w"], matrix())


def refused(error: type[CheckpointingException], words: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call(*args, **options)


def test_what_is_not_read_is_one_tensor_only_where_it_is_the_same() -> None:
    stores = st.storage.MemoryStorage(), st.storage.MemoryStorage()
    for store, value in zip(stores, (0.0, 1.0), strict=True):
        st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}, store)
    left, right = (st.open_checkpoint(store)["w"] for store in stores)
    refused(IntegrityError, "different tensors", shard, {"left": left, "right": right}, TWO, ROWS)
    by_key: Any = {"key": lambda path: "w"}
    mixed = {"left": left.data, "right": left.data.read()}
    refused(IntegrityError, "different tensors", shard, mixed, TWO, ROWS, **by_key)
    refused(IntegrityError, "lazy", shard, {"left": left.data, "right": right.data}, TWO, ROWS, **by_key)
    tied = unshard(shard({"embed": right.data, "head": right.data}, TWO, ROWS, **by_key))
    assert tied["head"] is tied["embed"] and tied["embed"].tolist() == [1.0] * 4
