"""Factories applied and merged: a lens on a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

from shardtree.core.trees import build_factories
from shardtree.mapping import ShardedTensor, ShardedTensorFactory
from shardtree.trees import apply_factories, apply_factory_merges, leaves_with_paths, map_shards, without_data
from tests.core.trees.samples import Pair, assert_caught, halves, join_halves, outline, trees

DATA = torch.arange(4.0)
FACTORY = ShardedTensorFactory("f", DATA, halves, join_halves)
W = ShardedTensor.from_rank_offsets("w", DATA)

Build = Callable[[Any], tuple[Any, Callable[[Any], Any]]]


def one_by_one(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    return apply_factories(tree), lambda loaded: apply_factory_merges(loaded, tree)


def data_of(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) else leaf


def undoes(build: Build, tree: Any) -> None:
    built, merge = build(tree)
    assert not any(isinstance(leaf, ShardedTensorFactory) for _, leaf in leaves_with_paths(built))
    merged = merge(map_shards(data_of, built))
    pairs = zip(leaves_with_paths(merged), leaves_with_paths(tree), strict=True)
    assert all(path == other and same(leaf, data_of(source)) for (path, leaf), (other, source) in pairs)


def same(left: Any, right: Any) -> bool:
    return left is right or (torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right))


@given(trees())
def test_merge_undoes_build(tree: Any) -> None:
    undoes(one_by_one, tree)
    undoes(build_factories, tree)


def test_merge_undoes_build_catches_factories_left_inside() -> None:
    def outer_alone(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
        built = map_shards(lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf, tree)
        return built, lambda loaded: apply_factory_merges(loaded, tree)

    assert_caught(undoes, outer_alone, trees())


def test_subtrees_without_factories_are_shared() -> None:
    tree = {"model": {"w": FACTORY, "b": [1]}, "opt": {"step": 1}}
    applied = apply_factories(tree)
    assert applied["model"]["b"] is tree["model"]["b"] and applied["opt"] is tree["opt"]
    loaded = {"model": {"w": {"parts": [DATA[:1], DATA[1:]]}, "b": [1]}, "opt": {"step": 1}}
    before = outline(loaded)
    merged = apply_factory_merges(loaded, {"model": {"w": FACTORY}})
    assert merged["model"]["w"].tolist() == DATA.tolist()
    assert outline(loaded) == before
    assert merged["opt"] is loaded["opt"]
    assert merged["model"]["b"] is loaded["model"]["b"]


PARTS = {"parts": [DATA[:1], DATA[1:]]}


@pytest.mark.parametrize(
    ("loaded", "tree"),
    [
        ([1, PARTS], [5, FACTORY]),
        ((1, PARTS), (5, FACTORY)),
        ([1, PARTS], {1: FACTORY}),
        ((1, PARTS), {1: FACTORY}),
        (Pair(1, PARTS), Pair(5, FACTORY)),
        ([1, PARTS], (W, without_data(FACTORY))),
    ],
)
def test_merge_at_a_position(loaded: Any, tree: Any) -> None:
    merged = apply_factory_merges(loaded, tree)
    assert type(merged) is type(loaded)
    assert merged[0] == 1
    assert torch.equal(merged[1], DATA)


def test_what_a_factory_raises_says_where() -> None:
    broken = ShardedTensorFactory("f", DATA, lambda *_: 1 // 0, lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        apply_factories({"a": [broken]})
    assert caught.value.__notes__ == ["at tree['a'][0]"]
    with pytest.raises(ZeroDivisionError) as caught:
        apply_factory_merges({"a": [1]}, {"a": [without_data(broken)]})
    assert caught.value.__notes__ == ["at tree['a'][0]"]


def test_building_once_is_enough() -> None:
    calls: list[str] = []

    def count(key: str, data: Any, *_: Any) -> Any:
        calls.append(key)
        return [ShardedTensor.from_rank_offsets(key, data)]

    built, merge = build_factories({"a": ShardedTensorFactory("a", DATA, count, lambda parts: parts[0])})
    assert merge(map_shards(data_of, built))["a"] is DATA
    assert calls == ["a"]
