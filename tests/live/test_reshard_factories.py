"""Resharding between trees of factories: laws take lenses made anew on both sides, and see what changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree import lenses
from shardtree.lenses import as_factory
from shardtree.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from shardtree.testing import check_reshard, check_ways

WHOLE = torch.arange(1.0, 73.0).view(12, 6)
ToFactory = Callable[[ShardedTensor, int], ShardedTensorFactory]


def by_its_own_functions(shard: ShardedTensor, ranks: int) -> ShardedTensorFactory:
    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        return {"part": replace(shard, data=data), "local": LocalNonpersistentObject(lambda: ranks)}

    return ShardedTensorFactory(shard.key, shard.data, build, lambda tree: tree["part"])


QKV = {"heads": 2, "head_size": 2, "query_groups": 2}
FACTORIES: dict[str, ToFactory] = {
    "transposed": lambda shard, ranks: as_factory(shard, lenses.transposed()),
    "gate_and_up": lambda shard, ranks: as_factory(shard, lenses.gate_and_up(tensor_parallel=ranks)),
    "attention_qkv": lambda shard, ranks: as_factory(shard, lenses.attention_qkv(**QKV)),
    "padded_axis": lambda shard, ranks: as_factory(shard, lenses.padded_axis(12)),
    "from_function": lambda shard, ranks: as_factory(shard, lenses.from_function(lambda w: w.flip(0).T)),
    "closures": by_its_own_functions,
}


def trees(ranks: int, to_factory: ToFactory) -> list[Any]:
    """Return ranks' trees of one factory, each made by a call of its own."""
    cut = st.shard({"w": WHOLE, "step": 3}, st.Mesh(tp=ranks), st.PartitionSpec("tp"))
    return [{**tree, "w": to_factory(tree["w"], ranks), "rank": LocalNonpersistentObject([1])} for tree in cut]


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_on_both_sides_are_resharded_and_come_back(name: str) -> None:
    sources, targets = trees(2, FACTORIES[name]), trees(3, FACTORIES[name])
    check_reshard(sources, targets)
    check_reshard(sources, [st.without_data(tree) for tree in targets])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gate_and_up", "closures"])
def test_every_way_takes_them(name: str) -> None:
    check_ways(trees(2, FACTORIES[name]), trees(3, FACTORIES[name]))


# Planted faults in what comes back. A comparison that takes all functions for equal would overlook the first three.


def another_lens(tree: Any) -> Any:
    build: Any = tree["w"].build_fn
    return {**tree, "w": replace(tree["w"], build_fn=replace(build, lens=lenses.padded_axis(12, fill=1)))}


def another_merge(tree: Any) -> Any:
    return {**tree, "w": replace(tree["w"], merge_fn=lambda parts: tree["w"].merge_fn(parts))}


def another_local_value(tree: Any) -> Any:
    return {**tree, "rank": LocalNonpersistentObject([2])}


def another_element(tree: Any) -> Any:
    return {**tree, "w": replace(tree["w"], data=tree["w"].data * torch.eye(*tree["w"].data.shape))}


@pytest.mark.parametrize("fault", [another_lens, another_merge, another_local_value, another_element])
def test_the_law_catches_what_comes_back_changed(fault: Callable[[Any], Any]) -> None:
    def changing(sources: Any, targets: Any) -> Any:
        found = st.reshard(sources, targets)
        return found if isinstance(targets, list) else {rank: fault(tree) for rank, tree in found.items()}

    ends = [trees(ranks, FACTORIES["padded_axis"]) for ranks in (2, 3)]
    check_reshard(*ends)
    with pytest.raises(AssertionError, match=r"rank 0: there and back, tree\['(w|rank)'\].* differs"):
        check_reshard(*ends, reshard=changing)
