"""Prefixes of trees: each leaf gets the value at or above it, and what doesn't fit is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import TreeError
from shardtree.trees import broadcast_prefix, flatten_with_paths, leaves_with_paths, map_shards
from tests.core.trees.samples import Config, Pair, assert_caught, outline, trees

Broadcast = Callable[[Any, Any], Any]


def shortened(tree: Any, depths: list[int]) -> tuple[Any, dict[Any, int]]:
    """Return a prefix of a tree, with another number at each of its places, and the numbers by place."""
    numbers: dict[Any, int] = {}

    def at(path: tuple[Any, ...], node: Any) -> Any:
        children = {} if len(path) == depths[len(numbers) % len(depths)] else inner(node)
        if not children:
            return numbers.setdefault(path, len(numbers))
        return {entry: at((*path, entry), child) for entry, child in children.items()}

    return at((), tree), numbers


def inner(node: Any) -> dict[Any, Any]:
    if isinstance(node, dict):
        return dict(node)
    return dict(enumerate(node)) if isinstance(node, list | Pair) else {}


def each_leaf_has_the_value_above(broadcast: Broadcast, tree: Any, depths: list[int]) -> None:
    prefix, numbers = shortened(tree, depths)
    values = dict(leaves_with_paths(broadcast(prefix, tree)))
    assert values.keys() == dict(leaves_with_paths(tree)).keys()
    for path, value in values.items():
        assert value == next(numbers[path[:depth]] for depth in range(len(path) + 1) if path[:depth] in numbers)


DEPTHS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(trees(), DEPTHS)
def test_each_leaf_has_the_value_above(tree: Any, depths: list[int]) -> None:
    each_leaf_has_the_value_above(broadcast_prefix, tree, depths)


def test_each_leaf_has_the_value_above_catches_values_in_the_order_of_leaves() -> None:
    def in_order(prefix: Any, tree: Any) -> Any:
        values = [value for _, value in leaves_with_paths(prefix)]
        pairs, rebuild = flatten_with_paths(tree)
        return rebuild([values[min(at, len(values) - 1)] for at in range(len(pairs))])

    assert_caught(each_leaf_has_the_value_above, in_order, trees(), DEPTHS)


@given(trees())
def test_a_tree_is_a_prefix_of_itself_and_a_value_of_every_tree(tree: Any) -> None:
    numbered = map_shards(lambda leaf: id(leaf), tree)
    assert outline(broadcast_prefix(numbered, tree)) == outline(numbered)
    assert outline(broadcast_prefix("x", tree)) == outline(map_shards(lambda leaf: "x", tree))


def test_containers_may_be_of_other_classes() -> None:
    assert broadcast_prefix({"first": 1, "second": 2}, Pair([3], 4)) == Pair([1], 2)
    assert broadcast_prefix([1, None], Pair([3], [4, 5])) == Pair([1], [None, None])
    assert broadcast_prefix(Config(a=1), {"a": [2, 3]}) == {"a": [1, 1]}


@pytest.mark.parametrize(
    ("prefix", "lines"),
    [
        ({"a": 1}, ["tree['b'][0]: without a value", "tree['b'][1]: without a value"]),
        ({"a": 1, "b": [1]}, ["tree['b'][1]: without a value"]),
        ({"a": 1, "b": 1, "c": 1}, ["prefix['c']: not in the tree"]),
        ({"a": {"x": 1}, "b": 1}, ["prefix['a']['x']: not in the tree", "tree['a']: without a value"]),
    ],
)
def test_what_is_no_prefix_is_named(prefix: Any, lines: list[str]) -> None:
    with pytest.raises(TreeError, match="not a prefix of the tree") as caught:
        broadcast_prefix(prefix, {"a": 1, "b": [2, 3]})
    assert str(caught.value).split("\n  ")[1:-1] == lines
