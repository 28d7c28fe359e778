"""Trees taken apart and put together: partition, combine, merge, extract and select."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.trees import Hole, path_key
from shardtree.errors import MetadataError, TreeError
from shardtree.mapping import ShardedTensor
from shardtree.trees import HOLE, combine, diff, leaves_with_paths, map_shards, merge, partition, select
from tests.core.trees.samples import Config, Pair, assert_caught, at, outline, trees

W = ShardedTensor.from_rank_offsets("decoder.w", torch.arange(4.0))
PREDICATES = st.sampled_from([lambda leaf: leaf is None, lambda leaf: isinstance(leaf, ShardedTensor), callable])

Parts = Callable[[Any, Callable[[Any], Any]], tuple[Any, Any]]


def splits(parts: Parts, tree: Any, predicate: Callable[[Any], bool]) -> None:
    matching, rest = parts(tree, predicate)
    assert outline(combine(matching, rest)) == outline(combine(rest, matching)) == outline(tree)
    assert all(leaf is HOLE or predicate(leaf) for _, leaf in leaves_with_paths(matching))
    assert not any(predicate(leaf) for _, leaf in leaves_with_paths(rest) if leaf is not HOLE)


@given(trees(), PREDICATES)
def test_partition_then_combine_is_identity(tree: Any, predicate: Callable[[Any], bool]) -> None:
    splits(partition, tree, predicate)


def test_partition_then_combine_catches_none_for_holes() -> None:
    def with_none(tree: Any, predicate: Callable[[Any], bool]) -> tuple[Any, Any]:
        matching, rest = partition(tree, predicate)
        return map_shards(lambda leaf: None if leaf is HOLE else leaf, matching), rest

    assert_caught(splits, with_none, trees(), PREDICATES)


# -- conditions of every form


Partition = Callable[..., tuple[Any, ...]]
CONDITIONS = st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=3)


def conditions(tree: Any, kinds: list[int]) -> tuple[list[Any], list[Callable[[tuple[Any, ...], Any], bool]]]:
    """Return conditions of every form, and what each of them says of a path and a leaf."""
    is_number = lambda leaf: isinstance(leaf, int)  # noqa: E731
    forms: list[tuple[Any, Any]] = [
        (is_number, lambda path, leaf: is_number(leaf)),
        ("**.a.**", lambda path, leaf: "a" in [*map(str, path)] or "a" in getattr(leaf, "key", "").split(".")),
        (map_shards(lambda leaf: leaf is None, tree), lambda path, leaf: leaf is None),
        (re.compile("b"), lambda path, leaf: "b" in path_key(path) or "b" in getattr(leaf, "key", "")),
    ]
    return [forms[kind][0] for kind in kinds], [forms[kind][1] for kind in kinds]


def the_first_condition_counts(parts: Partition, tree: Any, kinds: list[int]) -> None:
    wanted, says = conditions(tree, kinds)
    split = parts(tree, *wanted)
    assert len(split) == len(wanted) + 1
    assert outline(combine(*split)) == outline(tree)
    for path, leaf in leaves_with_paths(tree):
        number = next((number for number, says_so in enumerate(says) if says_so(path, leaf)), len(says))
        here = [number for number, part in enumerate(split) if dict(leaves_with_paths(part))[path] is not HOLE]
        assert here == [number]


@given(trees(), CONDITIONS)
def test_a_leaf_is_in_the_part_of_the_first_condition(tree: Any, kinds: list[int]) -> None:
    the_first_condition_counts(partition, tree, kinds)


def test_a_leaf_is_in_the_part_of_the_first_condition_catches_the_last_one() -> None:
    def last_counts(tree: Any, *wanted: Any) -> tuple[Any, ...]:
        *parts, rest = partition(tree, *wanted[::-1])
        return (*parts[::-1], rest)

    assert_caught(the_first_condition_counts, last_counts, trees(), CONDITIONS)


def test_a_condition_is_not_asked_of_holes_nor_of_what_an_earlier_one_took() -> None:
    asked: list[Any] = []
    parts = partition([HOLE, 1, 2], lambda leaf: leaf == 1, lambda leaf: asked.append(leaf))
    assert parts == ([HOLE, 1, HOLE], [HOLE] * 3, [HOLE, HOLE, 2]) and asked == [2]


def test_booleans_may_be_a_prefix() -> None:
    tree = {"model": {"w": 1, "b": [2, 3]}, "step": 4}
    chosen, rest = partition(tree, {"model": {"w": False, "b": True}, "step": False})
    assert chosen == {"model": {"w": HOLE, "b": [2, 3]}, "step": HOLE}
    assert select(tree, {"model": {"w": False, "b": True}, "step": False}) == {"model": {"b": [2, 3]}}
    assert partition(tree, True) == (tree, {"model": {"w": HOLE, "b": [HOLE, HOLE]}, "step": HOLE})
    assert combine(chosen, rest) == tree


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ({"a": True}, TreeError, r"tree\['b'\]: without a value"),
        ({"a": True, "b": 1}, TreeError, r"partition: not a tree of booleans\n  tree\['b'\]: int"),
        (["a", "b"], TreeError, "not a prefix"),
        ("*.w", TreeError, "partition: ambiguous pattern"),
        (3, MetadataError, "partition"),
    ],
)
def test_other_conditions_are_refused(wanted: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        partition({"a": W, "b": 2} | ({"m": {"n": {"w": 1}}} if wanted == "*.w" else {}), wanted)


def test_what_is_missing_is_never_broadcast() -> None:
    """A value for a whole subtree is a condition's right, never data's."""
    for function in (combine, merge):
        with pytest.raises(TreeError):
            function({"a": 1}, {"a": {"b": 2, "c": 3}})
    assert diff({"a": 1}, {"a": {"b": 1, "c": 1}}).mismatch == (("a",),)


def test_combine_of_three_parts_and_none() -> None:
    assert combine({"a": HOLE, "b": 1, "c": HOLE}, {"a": 2, "b": HOLE, "c": HOLE}, {"a": HOLE, "b": HOLE, "c": 3}) == {
        "a": 2,
        "b": 1,
        "c": 3,
    }
    assert combine({"a": HOLE}, {"a": HOLE}) == {"a": HOLE}
    assert combine() is HOLE
    assert combine([HOLE, 1], [[W, W], HOLE]) == [[W, W], 1]


def test_a_hole_is_one_object() -> None:
    assert copy.copy(HOLE) is copy.deepcopy([HOLE])[0] is pickle.loads(pickle.dumps(HOLE)) is HOLE
    assert isinstance(HOLE, Hole)
    assert repr([HOLE]) == "[HOLE]"


# -- merge


def cut(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return a tree of dicts without one entry."""
    rest = {key: child for key, child in tree.items() if key != path[0]}
    return rest if len(path) == 1 else {**rest, path[0]: cut(tree[path[0]], path[1:])}


def only(tree: Any, path: tuple[Any, ...]) -> Any:
    return tree if not path else {path[0]: only(tree[path[0]], path[1:])}


def dicts() -> st.SearchStrategy[Any]:
    keys = st.text("ab", min_size=1, max_size=2)
    return st.dictionaries(
        keys, st.recursive(st.integers(), lambda of: st.dictionaries(keys, of, max_size=3)), min_size=1
    )


@given(dicts())
def test_merge_gives_back_what_was_cut_out(tree: Any) -> None:
    for path, _ in leaves_with_paths(tree):
        assert merge(cut(tree, path), only(tree, path)) == tree == merge(only(tree, path), cut(tree, path))


def test_merge_keeps_kind_order_and_shares_the_rest() -> None:
    left, right = OrderedDict(b={"x": 1}, a=[{"p": 1}, HOLE]), {"c": {"y": 2}, "a": deque([{"q": 2}, 5])}
    merged = merge(left, right)
    assert merged == OrderedDict(b={"x": 1}, a=[{"p": 1, "q": 2}, 5], c={"y": 2})
    assert list(merged) == ["b", "a", "c"]
    assert merged["b"] is left["b"]
    assert merged["c"] is right["c"]
    assert type(merge(Pair({}, 1), (HOLE, HOLE))) is Pair
    assert type(merge(Config(a=1), {"b": 2})) is dict


# -- select


TREE = {"model": {"w": W, "b": [1, 2]}, "opt": (3, 4), "empty": {}}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("decoder.*", {"model": {"w": W}}),
        ("model.w", {"model": {"w": W}}),
        ("**.1", {"model": {"b": [HOLE, 2]}, "opt": (HOLE, 4)}),
        (re.compile(r"^opt"), {"opt": (3, 4)}),
        (lambda path, leaf: leaf == 3, {"opt": (3, HOLE)}),
        ("nothing", {}),
    ],
)
def test_select_keeps_what_is_wanted(wanted: Any, expected: Any) -> None:
    assert select(TREE, wanted) == expected


@pytest.mark.parametrize("pattern", ["*.1", "model.[wb]", "model.?"])
def test_select_refuses_a_pattern_that_a_shell_reads_otherwise(pattern: str) -> None:
    with pytest.raises(TreeError, match="ambiguous pattern") as caught:
        select(TREE, pattern)
    assert repr(pattern) in str(caught.value)


@given(trees().filter(lambda tree: isinstance(tree, (dict, list))), PREDICATES)
def test_select_keeps_each_wanted_leaf_at_its_path(tree: Any, predicate: Callable[[Any], bool]) -> None:
    kept = dict(leaves_with_paths(select(tree, lambda path, leaf: predicate(leaf))))
    wanted = [path for path, leaf in leaves_with_paths(tree) if predicate(leaf)]
    assert [path for path, leaf in kept.items() if leaf is not HOLE] == wanted
    assert all(kept[path] is at(tree, path) for path in wanted)
