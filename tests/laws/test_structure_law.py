"""The law of structure: every container of a target stands in the result, on every rank, whatever rank held what."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardtree
from shardtree.core.trees import common_with_holes
from shardtree.mapping import ShardedTensor
from shardtree.storage import MemoryStorage
from tests.core.trees.samples import assert_caught
from tests.shell.checkpoint.parts import FORMATS

EXAMPLES = settings.default.max_examples if settings.default else 100
RANKS = 2


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(children, min_size=1, max_size=3)
    named = st.dictionaries(st.text("xyz", min_size=1, max_size=2), children, min_size=1, max_size=3)
    return many | many.map(tuple) | named | named.map(OrderedDict)


BUNDLES = st.recursive(st.just("shard"), containers, max_leaves=4).filter(lambda bundle: bundle != "shard")
# A bundle is a container of shards alone, which one rank holds and the others have empty.
LEAVES = st.just("shard") | st.integers(0, 3) | st.none()
TREES = st.recursive(LEAVES | BUNDLES.map(lambda bundle: ("bundle", bundle)), containers, max_leaves=6)
ROOTS = st.dictionaries(st.sampled_from("abc"), TREES, min_size=1, max_size=3)
HOLDERS = st.lists(st.integers(0, RANKS - 1), min_size=12, max_size=12)


def rank_tree(plan: Any, holders: list[int], rank: int) -> Any:
    """Return what a rank holds of a tree: its own bundles, empty containers for the others', and a copy of all else."""
    keys, bundles = iter(range(100)), iter(holders)

    def made(node: Any, replica_id: int) -> Any:
        if node == "shard":
            number = next(keys)
            return ShardedTensor.from_rank_offsets(f"s{number}", torch.tensor([float(number)]), replica_id=replica_id)
        if isinstance(node, tuple) and node[:1] == ("bundle",):
            whole = made(node[1], 0)
            return whole if next(bundles) == rank else type(whole)()
        if isinstance(node, dict):
            return type(node)((name, made(child, replica_id)) for name, child in node.items())
        return type(node)(made(child, replica_id) for child in node) if isinstance(node, (list, tuple)) else node

    return made(plan, rank)


def assert_stands(result: Any, target: Any) -> None:
    if isinstance(target, ShardedTensor):
        assert isinstance(result, torch.Tensor) and torch.equal(result, target.data)
    elif isinstance(target, dict):
        assert type(result) is type(target) and target.keys() <= result.keys()
        for name, child in target.items():
            assert_stands(result[name], child)
    elif isinstance(target, (list, tuple)):
        assert type(result) is type(target) and len(result) == len(target)
        for mine, child in zip(result, target, strict=True):
            assert_stands(mine, child)
    else:
        assert result == target


def data_of(tree: Any) -> Any:
    return shardtree.map_shards(lambda leaf: leaf.data if isinstance(leaf, ShardedTensor) else leaf, tree)


def trees_of(plan: Any, holders: list[int]) -> list[Any]:
    return [rank_tree(plan, holders, rank) for rank in range(RANKS)]


def by_disk(backend: tuple[str, int], sources: list[Any], targets: list[Any]) -> list[Any]:
    folder = MemoryStorage()
    shardtree.simulate(RANKS, lambda world: shardtree.save(sources[world.rank], folder, backend, world=world))
    return shardtree.simulate(RANKS, lambda world: shardtree.load(targets[world.rank], folder, world=world))


def in_memory(sources: list[Any], targets: list[Any]) -> list[Any]:
    new = shardtree.reshard(dict(enumerate(sources)), dict(enumerate(targets)))
    return [data_of(new[rank]) for rank in range(RANKS)]


def live(sources: list[Any], targets: list[Any]) -> list[Any]:
    return shardtree.simulate(
        RANKS,
        lambda world: data_of(shardtree.redistribute(sources[world.rank], targets[world.rank], world=world)),
    )


def stands(move: Callable[[list[Any], list[Any]], list[Any]], plan: Any, held: list[int], wanted: list[int]) -> None:
    targets = trees_of(plan, wanted)
    for result, target in zip(move(trees_of(plan, held), targets), targets, strict=True):
        assert_stands(result, target)


@pytest.mark.slow
@pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: backend[0])
@settings(max_examples=EXAMPLES // 4)
@given(plan=ROOTS, held=HOLDERS, wanted=HOLDERS)
def test_every_container_stands_after_a_load(
    backend: tuple[str, int], plan: Any, held: list[int], wanted: list[int]
) -> None:
    stands(lambda *ends: by_disk(backend, *ends), plan, held, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("move", [in_memory, live])
@settings(max_examples=EXAMPLES // 2)
@given(plan=ROOTS, held=HOLDERS, wanted=HOLDERS)
def test_every_container_stands_after_a_reshard(move: Any, plan: Any, held: list[int], wanted: list[int]) -> None:
    stands(move, plan, held, wanted)


def test_the_law_of_structure_catches_containers_that_depend_on_who_saved() -> None:
    def faulty(sources: list[Any], targets: list[Any]) -> list[Any]:
        stored = common_with_holes(sources[0])
        found = in_memory(sources, targets)
        return [{key: child for key, child in new.items() if child or stored.get(key)} for new in found]

    assert_caught(stands, faulty, ROOTS, HOLDERS, HOLDERS)
