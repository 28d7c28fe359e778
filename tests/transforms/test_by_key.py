"""Maps with paths, and functions of tensors by pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import MetadataError, ShapeError, TreeError
from shardtree.trees import diff, leaves_with_paths, map_with_path
from tests.core.trees.samples import Pair, assert_caught, at, containers, outline, shards, trees

Map = Callable[..., Any]


def a_path_reaches_its_leaf(mapped: Map, tree: Any) -> None:
    def check(path: tuple[Any, ...], leaf: Any, other: Any) -> Any:
        assert at(tree, path) is leaf
        assert other == (id(leaf),)
        return leaf

    assert outline(mapped(check, tree, st.map_shards(lambda leaf: (id(leaf),), tree))) == outline(tree)


@given(trees())
def test_a_path_reaches_its_leaf(tree: Any) -> None:
    a_path_reaches_its_leaf(map_with_path, tree)


def test_a_path_reaches_its_leaf_catches_paths_in_the_order_of_insertion() -> None:
    def in_order(f: Any, tree: Any, *rest: Any) -> Any:
        def walk(path: Any, node: Any) -> Any:
            children = node.items() if isinstance(node, dict) else None
            return [path] if children is None else [p for key, child in children for p in walk((*path, key), child)]

        paths = iter(walk((), tree))
        return st.map_shards(lambda leaf, *others: f(next(paths), leaf, *others), tree, *rest)

    assert_caught(a_path_reaches_its_leaf, in_order, trees())


def test_names_of_fields_and_errors() -> None:
    names = map_with_path(lambda path, _: ".".join(map(str, path)), {"opt": Pair(1, [2])})
    assert names == {"opt": Pair("opt.first", ["opt.second.0"])}
    with pytest.raises(MetadataError, match="map_with_path"):
        map_with_path({}, {})  # type: ignore[arg-type]
    with pytest.raises(TreeError, match="tree 2 does not have the structure"):
        map_with_path(lambda path, *leaves: leaves, {"a": 1}, {"b": 1})
    with pytest.raises(ZeroDivisionError) as caught:
        map_with_path(lambda path, leaf: 1 // leaf, {"a": 0})
    assert caught.value.__notes__ == ["at tree['a']"]


# Functions by pattern

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "**.a": torch.neg,
    "a.**": lambda tensor: tensor + 1,
    "b*": lambda tensor: tensor * 2,
    "**": lambda tensor: tensor - 5,
}
PATTERNS = some.permutations([*FUNCTIONS]).flatmap(lambda keys: some.integers(1, 4).map(lambda n: keys[:n]))


def tensor_trees() -> some.SearchStrategy[Any]:
    plain = some.lists(some.integers(-3, 3), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.float32))
    return some.sampled_from([shards(), plain]).flatmap(
        lambda leaf: some.recursive(leaf, containers, max_leaves=6).map(lambda tree: {"a": tree, "n": 3})
    )


def has_leaves(part: Any) -> bool:
    return any(leaf is not st.trees.HOLE for _, leaf in leaves_with_paths(part))


def functions_by_key(map_by_pattern: Map, tree: Any, patterns: list[str]) -> None:
    """The law: partitioned by the patterns, mapped part by part, and combined, a tree is what one call makes of it."""
    firsts = st.partition(tree, lambda leaf: isinstance(leaf, int), *patterns)[1:-1]
    # A pattern that is no tensor's first one is an error, which another test has.
    patterns = [pattern for pattern, part in zip(patterns, firsts, strict=True) if has_leaves(part)]
    parts = st.partition(tree, lambda leaf: isinstance(leaf, int), *patterns)

    def mapped(f: Callable[[torch.Tensor], torch.Tensor], part: Any) -> Any:
        def on_leaf(leaf: Any) -> Any:
            return f(leaf) if isinstance(leaf, torch.Tensor) else st.map_data(f, leaf)

        return st.map_shards(on_leaf, part)

    expected = [mapped(FUNCTIONS[pattern], part) for pattern, part in zip(patterns, parts[1:-1], strict=True)]
    found = map_by_pattern({pattern: FUNCTIONS[pattern] for pattern in patterns})(tree)
    assert not diff(found, st.combine(parts[0], *expected, parts[-1]))


@given(tensor_trees(), PATTERNS)
def test_functions_are_applied_by_key(tree: Any, patterns: list[str]) -> None:
    functions_by_key(st.map_by_pattern, tree, patterns)


def test_functions_are_applied_by_key_catches_the_last_pattern_that_fits() -> None:
    def last_counts(functions: dict[str, Any]) -> Any:
        return st.map_by_pattern(dict(reversed(functions.items())))

    assert_caught(functions_by_key, last_counts, tensor_trees(), PATTERNS)


def test_plain_tensors_beside_shards_are_values() -> None:
    shard = st.ShardedTensor.from_rank_offsets("m.w", torch.ones(2))
    tree = {"w": shard, "rng": torch.ones(2), "step": 3}
    new = st.map_by_pattern({"**": torch.neg})(tree)
    assert new["w"].data.tolist() == [-1, -1] and new["rng"] is tree["rng"] and new["step"] == 3
    for pattern in ("m.w", "w", "m.*"):
        assert st.map_by_pattern({pattern: torch.neg})(tree)["w"].data.tolist() == [-1, -1]


def test_further_trees_and_pipelines() -> None:
    gradients = {"w": torch.full((2,), 0.5), "bias": torch.full((2,), 0.5)}
    params = {"w": torch.ones(2), "bias": torch.ones(2)}
    decayed = st.map_by_pattern({"w": lambda step, weight: step + 0.1 * weight})(gradients, params)
    assert torch.equal(decayed["w"], torch.full((2,), 0.6)) and decayed["bias"] is gradients["bias"]
    halved = st.compose(
        st.map_by_pattern({"bias": torch.zeros_like}), st.map_by_pattern({"w": lambda tensor: tensor / 2})
    )
    assert {name: data.tolist() for name, data in halved(params).items()} == {"w": [0.5, 0.5], "bias": [0, 0]}


def test_mistakes() -> None:
    tree = {"w": torch.ones(2)}
    with pytest.raises(TreeError, match=r"map_by_pattern: patterns are unused\n  'bias' fits no key"):
        st.map_by_pattern({"bias": torch.neg})(tree)
    with pytest.raises(TreeError, match="comes first"):
        st.map_by_pattern({"**": torch.neg, "w": torch.abs})(tree)
    for functions in ([torch.neg], {"w": 3}):
        with pytest.raises(MetadataError, match="map_by_pattern"):
            st.map_by_pattern(functions)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="'w'"):
        st.map_by_pattern({"w": lambda data: data[:1]})({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))})
