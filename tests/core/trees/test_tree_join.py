"""What is stored of a tree beside its shards, and its join with what a load's target got."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

from shardtree.core.trees import common_with_holes, join, left_out, without_holes
from shardtree.errors import TreeError
from shardtree.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensor
from shardtree.trees import HOLE, Record, leaves_with_paths, map_shards
from tests.core.trees.samples import KEYS, TENSORS, Pair, assert_caught, containers, outline, trees

W = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
LOCAL = LocalNonpersistentObject({"kept": 1})
ROOTS = containers(trees())


def loaded(tree: Any) -> Any:
    """Return a load's target after loading: data for shards, boxes for objects, holes for plain values."""
    return map_shards(load_leaf, tree)


def load_leaf(leaf: Any) -> Any:
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf
    return LocalNonpersistentObject(leaf.data) if isinstance(leaf, ShardedBase) else HOLE


def value(leaf: Any) -> Any:
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf.unwrap()
    return leaf.data if isinstance(leaf, ShardedBase) else leaf


@given(ROOTS)
def test_join_gives_back_what_was_stored(tree: Any) -> None:
    assert outline(join(common_with_holes(tree), loaded(tree))) == outline(map_shards(value, tree))


@given(ROOTS)
def test_common_holds_every_plain_value_at_its_path(tree: Any) -> None:
    stored = common_with_holes(tree)
    assert not any(isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) for _, leaf in leaves_with_paths(stored))
    plain = {
        path for path, leaf in leaves_with_paths(tree) if not isinstance(leaf, (ShardedBase, LocalNonpersistentObject))
    }
    assert {path for path, leaf in leaves_with_paths(stored) if leaf is not HOLE} == plain


def test_containers_of_holes_are_holes_and_empty_ones_stay() -> None:
    tree = {"layers": [W, {"deep": (W, [LOCAL])}], "empty": {}, "mixed": [W, 1], "step": None}
    assert common_with_holes(tree) == {"layers": HOLE, "empty": {}, "mixed": [HOLE, 1], "step": None}
    assert common_with_holes({"a": W}) == {"a": HOLE}
    assert common_with_holes(W) is HOLE
    assert without_holes(common_with_holes(tree)) == {"empty": {}, "mixed": [HOLE, 1], "step": None}


def test_order_is_the_stored_one_then_new_keys() -> None:
    joined = join({"b": 1, "w": HOLE, "a": 2}, {"z": "new", "a": HOLE, "w": "data", "y": HOLE})
    assert list(joined.items()) == [("b", 1), ("w", "data"), ("a", 2), ("z", "new")]


def test_plain_values_of_the_target_are_ignored() -> None:
    common = {"step": 3, "list": [1, 2], "dict": {"a": 1}}
    assert join(common, {"step": {"x": HOLE}, "list": [HOLE], "dict": [HOLE, {}], "new": [HOLE]}) == common
    assert join(common, {"step": [], "list": {}, "dict": (), "new": HOLE}) == common


def test_boxes_are_unwrapped_and_not_looked_into() -> None:
    held = {"hole": HOLE, "list": [HOLE]}
    joined = join({"a": HOLE}, {"a": LocalNonpersistentObject(held), "b": [LocalNonpersistentObject({})]})
    assert joined["a"] is held
    assert joined["b"] == [{}]


MIXED = Record("optim.State", {"mu": HOLE, "count": 3})


@pytest.mark.parametrize("kept", [[HOLE, 1], (1, HOLE), Pair(HOLE, 1), [1, [HOLE, 2]], MIXED, [MIXED, 1]])
def test_what_cannot_be_whole_is_left_out_unless_it_is_named(kept: Any) -> None:
    common = {"a": kept, "step": 3}
    assert join(common, {}) == {"step": 3} == join(common, {"a": HOLE})
    assert join(common, {"a": []}) == {"a": [], "step": 3}
    assert join(common, {"model": "w"}) == {"step": 3, "model": "w"}


def test_a_record_is_joined_with_fields_of_the_same_names() -> None:
    Later = namedtuple("Later", "count mu")
    assert join({"o": MIXED}, {"o": Later(HOLE, "w")}) == {"o": Later(3, "w")}
    with pytest.raises(TreeError, match=r"found Pair of length 2, expected a record of optim\.State"):
        join({"o": MIXED}, {"o": Pair("w", HOLE)})


def test_only_a_stored_value_takes_the_place_of_an_empty_container() -> None:
    empty: Any
    for empty in ([], {}, ()):
        assert join({"a": HOLE}, {"a": empty})["a"] is empty
        assert join({"a": [{}]}, {"a": empty}) == {"a": {} if empty == {} else empty}
        assert join({"a": [1, []]}, {"a": empty}) == {"a": [1, []]}
        assert join({"a": 3}, {"a": empty}) == {"a": 3}
        assert join({"a": [HOLE, 1]}, {"a": empty})["a"] is empty
    assert join({"a": {"w": HOLE, "b": 1}}, {"a": {}}) == {"a": {"b": 1}}


HOLLOW = trees(strategies.just(HOLE))
LOADED = trees(TENSORS | strategies.builds(LocalNonpersistentObject, strategies.integers()))


def stands(join_: Callable[[Any, Any], Any], stored: Any, target: Any) -> None:
    """The law of structure, where nothing but shards was saved and the target names or leaves open all that it has."""
    assert_stands(join_(stored, target), target)


def assert_stands(joined: Any, target: Any) -> None:
    if isinstance(target, dict):
        assert outline(type(target)()) == outline(type(joined)()) and target.keys() <= joined.keys()
        for key, child in target.items():
            assert_stands(joined[key], child)
    elif isinstance(target, (list, tuple, deque)):
        assert type(joined) is type(target) and len(joined) == len(target)
        for mine, child in zip(joined, target, strict=True):
            assert_stands(mine, child)
    else:
        assert joined is value(target)


@given(HOLLOW, LOADED)
def test_every_container_of_the_target_stands_whatever_rank_held_shards(stored: Any, target: Any) -> None:
    stands(join, stored, target)


def test_the_law_of_structure_catches_empty_containers_that_go() -> None:
    def forgetful(stored: Any, target: Any) -> Any:
        return join(stored, {key: child for key, child in target.items() if child} if type(target) is dict else target)

    assert_caught(stands, forgetful, HOLLOW, LOADED)


PLAIN = strategies.builds(object)
STORED = strategies.dictionaries(KEYS, trees(PLAIN | strategies.just(HOLE)), max_size=3)
TARGETS = strategies.dictionaries(KEYS, trees(TENSORS | strategies.just(HOLE)), max_size=3)


def accounts_for_all(left_out_: Callable[[Any, Any], Any], stored: Any, target: Any) -> None:
    """Each stored value is in the result, or listed at its path, and never both."""
    try:
        joined = join(stored, target)
    except TreeError:
        return
    kept = {id(leaf) for _, leaf in leaves_with_paths(joined)}
    lost = [path for path, leaf in leaves_with_paths(stored) if leaf is not HOLE and id(leaf) not in kept]
    assert sorted(left_out_(stored, joined), key=str) == sorted(lost, key=str)


@given(STORED, TARGETS)
def test_what_is_left_out_is_listed_by_path(stored: Any, target: Any) -> None:
    accounts_for_all(left_out, stored, target)


def test_the_law_of_what_is_left_out_catches_silence() -> None:
    assert_caught(accounts_for_all, lambda stored, joined: (), STORED, TARGETS)


def never_fails(join_: Callable[[Any, Any], Any], stored: Any, target: Any) -> None:
    joined = join_(stored, map_shards(lambda leaf: HOLE, target))
    assert not any(leaf is HOLE for _, leaf in leaves_with_paths(joined))


@given(STORED, TARGETS)
def test_what_a_target_says_nothing_about_never_fails_it(stored: Any, target: Any) -> None:
    never_fails(join, stored, target)


def test_the_law_of_partial_targets_catches_holes_that_leak() -> None:
    assert_caught(never_fails, lambda stored, target: {**stored, **join(stored, target)}, STORED, TARGETS)


def test_what_the_target_holds_unchanged_is_shared() -> None:
    target = {"model": {"w": torch.ones(1)}}
    assert join({"step": 1}, target)["model"] is target["model"]
