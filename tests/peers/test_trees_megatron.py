"""Factories, merges and differences beside Megatron-Core's, whose functions change their arguments: they get copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.mapping import ShardedTensorFactory
from shardtree.trees import apply_factories, apply_factory_merges, diff, leaves_with_paths, merge
from tests.core.trees.samples import assert_caught

mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
dict_utils = pytest.importorskip("megatron.core.dist_checkpointing.dict_utils")

pytestmark = pytest.mark.peers

KEYS = st.text("ab", min_size=1, max_size=2)
REFUSED = object()

Trees = st.recursive(
    st.integers(0, 2),
    lambda of: st.dictionaries(KEYS, of, max_size=3) | st.lists(of, max_size=3),
    max_leaves=6,
)
ROOTS = st.dictionaries(KEYS, Trees, max_size=3)


def or_refused(f: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's value for copies of its arguments, or that it refused them."""
    try:
        return f(*copy.deepcopy(arguments))
    except (ValueError, AssertionError):
        return REFUSED


# -- merge


def merges_alike(ours: Callable[[Any, Any], Any], left: Any, right: Any) -> None:
    assert or_refused(ours, left, right) == or_refused(dict_utils.merge, left, right)


@given(ROOTS, ROOTS)
def test_merge_is_megatrons(left: Any, right: Any) -> None:
    merges_alike(merge, left, right)


def test_merge_is_megatrons_catches_an_overwrite() -> None:
    assert_caught(merges_alike, lambda left, right: {**left, **right}, ROOTS, ROOTS)


# -- diff


def of_dicts(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return trees of dicts: Megatron-Core gives what only one list has without its path."""
    return st.dictionaries(KEYS, st.recursive(leaves, lambda of: st.dictionaries(KEYS, of, max_size=2), max_leaves=4))


VALUES = st.integers(0, 1) | st.lists(st.integers(0, 1), min_size=2, max_size=2) | st.integers(0, 2).map(torch.tensor)


def differ_alike(ours: Callable[[Any, Any], Any], left: Any, right: Any) -> None:
    found = ours(left, right)
    try:
        only_left, only_right, mismatch = dict_utils.diff(left, right)
    except AssertionError:  # a list beside something else
        assert found
    else:
        assert (set(found.only_left), set(found.only_right)) == (set(only_left), set(only_right))
        assert {entry[0] for entry in mismatch} <= set(found.mismatch)


@given(of_dicts(VALUES), of_dicts(VALUES))
def test_diff_finds_what_megatrons_finds(left: Any, right: Any) -> None:
    differ_alike(diff, left, right)


def test_diff_finds_what_megatrons_finds_catches_swapped_sides() -> None:
    assert_caught(differ_alike, lambda left, right: diff(right, left), of_dicts(VALUES), of_dicts(VALUES))


@given(of_dicts(st.integers(0, 2).map(torch.tensor)))
def test_diff_of_tensors_is_megatrons(tree: Any) -> None:
    changed = copy.deepcopy(tree)
    for path, leaf in leaves_with_paths(changed)[:1]:
        leaf.add_(1)
        assert [entry[0] for entry in dict_utils.diff(tree, changed)[2]] == [path] == list(diff(tree, changed).mismatch)


# -- factories


def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    return {"parts": [f"{key}.{index}:{value}" for index, value in enumerate(data.tolist())]}


def undo(built: Any) -> Any:
    return tuple(built["parts"])


def as_megatrons(tree: Any) -> Any:
    """Return the tree with Megatron-Core's factories; its functions see dicts and lists alone."""
    if isinstance(tree, dict):
        return {key: as_megatrons(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [as_megatrons(child) for child in tree]
    fields = ("key", "data", "build_fn", "merge_fn", "replica_id", "flattened_range")
    is_factory = isinstance(tree, ShardedTensorFactory)
    return mapping.ShardedTensorFactory(*(getattr(tree, name) for name in fields)) if is_factory else tree


FACTORIES = st.builds(
    lambda key, values: ShardedTensorFactory(key, torch.tensor(values), build, undo),
    KEYS,
    st.lists(st.integers(0, 9), max_size=3),
)
MIXED = st.dictionaries(
    KEYS,
    st.recursive(
        st.integers(0, 2) | FACTORIES,
        lambda of: st.dictionaries(KEYS, of, max_size=3) | st.lists(of, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


def factories_alone(tree: Any, lists_as_dicts: bool) -> Any:
    return dict_utils.extract_matching_values(
        tree, lambda leaf: isinstance(leaf, (ShardedTensorFactory, mapping.ShardedTensorFactory)), lists_as_dicts
    )[0]


def builds_alike(ours: Callable[[Any], Any], tree: Any) -> None:
    theirs = as_megatrons(tree)
    mapping.apply_factories(theirs)
    assert ours(tree) == theirs


@given(MIXED)
def test_apply_factories_is_megatrons(tree: Any) -> None:
    builds_alike(apply_factories, tree)


def test_apply_factories_is_megatrons_catches_factories_left() -> None:
    assert_caught(builds_alike, copy.copy, MIXED)


def merges_factories_alike(ours: Callable[[Any, Any], Any], tree: Any) -> None:
    loaded = apply_factories(tree)
    theirs = mapping.apply_factory_merges(copy.deepcopy(loaded), factories_alone(as_megatrons(tree), True))
    assert ours(loaded, tree) == ours(loaded, factories_alone(tree, True)) == theirs


@given(MIXED)
def test_apply_factory_merges_is_megatrons(tree: Any) -> None:
    merges_factories_alike(apply_factory_merges, tree)


def test_apply_factory_merges_is_megatrons_catches_nothing_merged() -> None:
    assert_caught(merges_factories_alike, lambda loaded, tree: loaded, MIXED)


PARTS = {"parts": ["a"]}
FACTORY = ShardedTensorFactory("f", torch.ones(1), build, undo)


@pytest.mark.parametrize(
    ("loaded", "tree"),
    [
        ({"a": 1}, {"b": FACTORY}),
        ([PARTS], [FACTORY, FACTORY]),
        ([PARTS], {"0": FACTORY}),
        ([PARTS], {1: FACTORY}),
        ({"a": 5}, {"a": {"b": FACTORY}}),
        ({"a": {0: PARTS}}, {"a": [FACTORY]}),
    ],
)
def test_what_megatron_refuses_to_merge_is_refused(loaded: Any, tree: Any) -> None:
    assert or_refused(mapping.apply_factory_merges, loaded, as_megatrons(tree)) is REFUSED
    assert or_refused(apply_factory_merges, loaded, tree) is REFUSED
