"""unshard of trees that `shard` didn't make: any layout, flat ranges, factories, objects, copies that differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as strategies

import shardtree as st
from shardtree.errors import CheckpointingException, IntegrityError
from shardtree.layouts import Mesh, PartitionSpec, shard, unshard
from shardtree.objects import concatenate_objects, drop_objects
from shardtree.testing import (
    PRINTABLE_DTYPES,
    Layout,
    cut,
    first_difference,
    glu,
    layouts,
    random_bits,
    shapes,
)
from shardtree.testing._law_factory import stacked
from tests.core.trees.samples import assert_caught

LAYOUTS = shapes(max_axes=3).flatmap(lambda shape: layouts(shape, 4))
DTYPES = strategies.sampled_from(PRINTABLE_DTYPES)


def check_whole(join: Callable[[Any], Any], layout: Layout, dtype: torch.dtype) -> None:
    whole = random_bits(layout.global_shape, dtype, seed=1)
    shards = [cut(layout, "w", whole, rank) for rank in range(layout.ranks)]
    found = join([{"w": dict(enumerate(own))} if own else {} for own in shards])["w"]
    assert all(first_difference(tensor, whole) is None for tensor in found.values())


@given(LAYOUTS, DTYPES)
def test_any_layout_is_put_together(layout: Layout, dtype: torch.dtype) -> None:
    check_whole(unshard, layout, dtype)


def without_ranges(trees: Any) -> Any:
    """Take a flat range for the beginning of its box."""

    def begun(leaf: Any) -> Any:
        flat = leaf.flattened_range
        return replace(leaf, flattened_range=slice(0, flat.stop - flat.start)) if flat else leaf

    return unshard(
        [{name: {place: begun(leaf) for place, leaf in own.items()} for name, own in tree.items()} for tree in trees]
    )


def test_the_law_catches() -> None:
    assert_caught(check_whole, without_ranges, LAYOUTS, strategies.just(torch.int32))


def test_where_copies_differ_the_main_one_counts() -> None:
    trees = shard({"w": torch.arange(4)}, Mesh(dp=3), PartitionSpec())
    trees[1]["w"] = replace(trees[1]["w"], data=torch.full((4,), 7))
    assert unshard(trees)["w"].tolist() == [0, 1, 2, 3]
    assert unshard({rank: trees[rank] for rank in (2, 1)})["w"].tolist() == [7] * 4, "the lowest rank's, without a main"


def test_a_tensor_that_one_shard_holds_is_not_copied() -> None:
    whole = torch.arange(4)
    found = unshard(shard({"w": whole}, Mesh(dp=2), PartitionSpec()))["w"]
    assert found.data_ptr() == whole.data_ptr()


def test_a_factory_gives_what_a_checkpoint_would_hold() -> None:
    whole = torch.arange(24.0).view(8, 3)
    gate, up = whole.chunk(2)
    halves = [torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]) for rank in range(2)]
    assert torch.equal(unshard([{"w": glu("w", half, rank, 2)} for rank, half in enumerate(halves)])["w"], whole)
    layers = [{"w": stacked("w", whole[:6] + first, first=first, layers=12)} for first in (0, 6)]
    assert torch.equal(unshard(layers)["w"], torch.cat([whole[:6], whole[:6] + 6]))


def test_a_factory_of_several_keys_gives_all_of_them() -> None:
    def build(key: str, data: Any, *_: Any) -> dict[str, Any]:
        return {name: st.ShardedTensor.from_rank_offsets(f"{key}.{name}", data) for name in "qk"}

    factory = st.ShardedTensorFactory("w", torch.arange(2), build, dict)
    assert {name: tensor.tolist() for name, tensor in unshard([{"w": factory}])["w"].items()} == {
        "q": [0, 1],
        "k": [0, 1],
    }


def test_stages_join_and_objects_go_by_rules() -> None:
    trees = [
        {
            f"stage{rank}": st.ShardedTensor.from_rank_offsets(f"s{rank}", torch.full((2,), rank)),
            "seen": st.ShardedObject("seen", [rank], (2,), (rank,)),
            "lr": 0.1,
        }
        for rank in range(2)
    ]
    whole = unshard(trees, rules={"seen": concatenate_objects})
    assert whole["stage0"].tolist() == [0, 0] and whole["stage1"].tolist() == [1, 1]
    assert (whole["seen"], whole["lr"]) == ([0, 1], 0.1)
    refused(IntegrityError, "'seen'", trees)
    assert list(unshard(trees, rules={"seen": drop_objects})) == ["stage0", "lr", "stage1"]


def test_a_rank_may_have_an_empty_container_where_another_has_shards() -> None:
    """As `from_dtensors` leaves them on a pipeline's other stages, and as `save` takes them."""
    left, right = (st.ShardedTensor.from_rank_offsets(key, torch.arange(2)) for key in "vw")
    trees = [{"first": {"v": left}, "last": {}}, {"first": {}, "last": {"w": right}, "none": {}}]
    whole = unshard(trees)
    assert whole["first"]["v"].tolist() == whole["last"]["w"].tolist() == [0, 1] and whole["none"] == {}


def refused(error: type[CheckpointingException], words: str, trees: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        unshard(trees)
