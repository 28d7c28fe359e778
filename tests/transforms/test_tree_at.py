"""Places of trees: what is named is changed, what isn't is shared, and what isn't there is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import ShapeError, TreeError
from shardtree.trees import diff, flatten_with_paths, leaves_with_paths
from tests.core.trees.samples import Pair, assert_caught, at, frozen, outline, trees

CHANGED = object()
At = Callable[[Any, Any, Any], Any]


def replaces_what_is_named(tree_at: At, tree: Any, number: int) -> None:
    """The law: by a path and by a function, one leaf is another, every other one is as it was, and so is the tree."""
    pairs, rebuild = flatten_with_paths(tree)
    assume(pairs)
    place = number % len(pairs)
    path, before = pairs[place][0], frozen(tree)
    expected = rebuild([CHANGED if n == place else leaf for n, (_, leaf) in enumerate(pairs)])
    for where in (path, lambda tree: at(tree, path), lambda tree: [at(tree, path)]):
        replaced = tree_at(tree, where, [CHANGED] if callable(where) and isinstance(where(tree), list) else CHANGED)
        assert outline(replaced) == outline(expected)
        assert frozen(tree) == before
        for depth in range(len(path)):
            above, inside = at(tree, path[:depth]), at(replaced, path[:depth])
            others = [entry for entry in keys(above) if entry != path[depth]]
            assert all(above[entry] is inside[entry] for entry in others)
    assert outline(tree_at(tree, path, lambda leaf: (leaf,))) == outline(
        rebuild([(leaf,) if n == place else leaf for n, (_, leaf) in enumerate(pairs)])
    )


def keys(node: Any) -> Any:
    return node.keys() if isinstance(node, dict) else range(len(node))


@given(trees(), some.integers(0, 9))
def test_what_is_named_is_replaced_and_the_rest_is_shared(tree: Any, number: int) -> None:
    replaces_what_is_named(st.tree_at, tree, number)


def test_what_is_named_is_replaced_catches_leaves_that_are_found_by_value() -> None:
    def by_value(tree: Any, where: Any, replace: Any) -> Any:
        wanted = where(tree) if callable(where) else at(tree, where)
        values = replace if isinstance(wanted, list) else [replace]
        wanted = wanted[0] if isinstance(wanted, list) else wanted
        pairs, rebuild = flatten_with_paths(tree)
        value = replace(wanted) if callable(replace) else values[0]
        return rebuild([value if leaf is wanted else leaf for _, leaf in pairs])

    assert_caught(replaces_what_is_named, by_value, trees(), some.integers(0, 9))


@given(trees(), some.sampled_from(["**", "**.a", "*", "b.**"]))
def test_a_pattern_names_the_leaves_that_partition_takes(tree: Any, pattern: str) -> None:
    try:
        expected = st.partition(tree, pattern)[1]
    except TreeError:  # a shell reads it otherwise
        assume(False)
    named = [path for path, leaf in leaves_with_paths(expected) if leaf is st.trees.HOLE]
    old = [path for path, leaf in leaves_with_paths(tree) if leaf is st.trees.HOLE]
    assume(named and not old)
    assert outline(st.tree_at(tree, pattern, lambda leaf: st.trees.HOLE)) == outline(expected)
    with pytest.raises(TreeError, match="`where` does not fit"):
        st.tree_at({}, pattern, 1)


def holder() -> dict[str, Any]:
    return {"model": {"w": shard("w"), "b": [shard("b0"), shard("b1")]}, "opt": Pair(3, (4, 4)), "empty": {}}


def shard(key: str) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, torch.ones(2), (0, 1, 2))


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("b*", [("model", "b", 0), ("model", "b", 1)]),
        ("opt.second.**", [("opt", 1, 0), ("opt", 1, 1)]),
        (re.compile(r"model\.w"), [("model", "w")]),
        (("opt",), [("opt",)]),
        ((), [()]),
        (lambda tree: tree["opt"].second[1], [("opt", 1, 1)]),
        (lambda tree: tree["model"], [("model",)]),
        (lambda tree: tree["empty"], [("empty",)]),
        (lambda tree: tree, [()]),
        ({"model": {"w": False, "b": True}, "opt": False, "empty": {}}, [("model", "b", 0), ("model", "b", 1)]),
    ],
)
def test_places_of_every_form(where: Any, paths: list[Any]) -> None:
    found = st.tree_at(holder(), where, lambda node: CHANGED)
    assert [path for path, leaf in leaves_with_paths(found) if leaf is CHANGED] == paths


def test_several_nodes_take_as_many_values() -> None:
    both = st.tree_at(holder(), lambda tree: (tree["opt"].first, tree["model"]["b"]), [5, None])
    assert both["opt"] == Pair(5, (4, 4)) and both["model"]["b"] is None
    assert st.tree_at([1, 2, 3], lambda tree: tree[:2], lambda leaf: -leaf) == [-1, -2, 3]
    for values in (7, [7], [7, 8, 9]):
        with pytest.raises(TreeError, match="expected a list of 2"):
            st.tree_at([1, 2, 3], lambda tree: tree[:2], values)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("model.bias", r"not in the tree: 'model.bias'"),
        ("model.ww", r"not in the tree: 'model.ww' \(did you mean 'model.w'\?\)"),
        (re.compile("x+"), r"not in the tree: \"re.compile\('x\+'\)\""),
        (("model", "bias"), r"not in the tree: tree\['model'\]\['bias'\]\n  found 'w', 'b' in tree\['model'\]"),
        (("opt", 0, "x"), r"not in the tree: tree\['opt'\]\[0\]\['x'\]\n  found a int"),
        (lambda tree: tree["x"], r"the node that the function looks up \(KeyError: 'x'\)"),
        (lambda tree: tree["model"]["w"].data, r"AttributeError: a leaf has no attribute 'data'"),
        (lambda tree: 3, r"the function's result: a int, which is no node of the tree"),
        (lambda tree: [], r"the function's result: no node at all"),
    ],
)
def test_what_is_not_there_is_told(where: Any, message: str) -> None:
    for function in (st.tree_at, st.data_at):
        with pytest.raises(TreeError, match=message) as caught:
            function(holder(), where, lambda leaf: leaf)
        assert str(caught.value).startswith(f"{function.__name__}: `where` does not fit")


def test_a_place_in_another_one_is_refused() -> None:
    with pytest.raises(TreeError, match=r"chosen nodes lie in other chosen nodes\n  tree\['model'\]\['w'\]"):
        st.tree_at(holder(), lambda tree: [tree["model"], tree["model"]["w"]], [1, 2])


def test_what_a_function_raises_says_where() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        st.tree_at({"a": [0]}, "a.0", lambda leaf: 1 // leaf)
    assert caught.value.__notes__ == ["at tree['a'][0]"]


def data_at_is_map_data_there(data_at: At, tree: Any, number: int) -> None:
    """The law: a function of data does to the shards in a subtree what `map_data` does, and to plain tensors too."""
    paths = [path[:depth] for path, _ in leaves_with_paths(tree) for depth in range(len(path) + 1)]
    assume(paths)
    place = paths[number % len(paths)]

    def expected(path: tuple[Any, ...], leaf: Any) -> Any:
        if path[: len(place)] != place:
            return leaf
        if isinstance(leaf, st.ShardedTensor | st.ShardedTensorFactory):
            return st.map_data(torch.neg, leaf)
        return -leaf if isinstance(leaf, torch.Tensor) else leaf

    new = st.trees.map_with_path(expected, tree)
    assume(diff(new, tree))
    assert not diff(data_at(tree, place, torch.neg), new)


@given(trees(), some.integers(0, 30))
def test_tensors_at_a_place_are_mapped(tree: Any, number: int) -> None:
    data_at_is_map_data_there(st.data_at, tree, number)


def test_tensors_at_a_place_are_mapped_catches_plain_ones_that_are_passed_over() -> None:
    def shards_alone(tree: Any, where: Any, data: Any) -> Any:
        pairs, rebuild = flatten_with_paths(tree)
        boxed = (st.ShardedTensor, st.ShardedTensorFactory)
        return rebuild(
            [
                st.map_data(data, leaf) if isinstance(leaf, boxed) and path[: len(where)] == where else leaf
                for path, leaf in pairs
            ]
        )

    assert_caught(data_at_is_map_data_there, shards_alone, trees(), some.integers(0, 30))


def test_a_shard_takes_a_tensor_and_keeps_its_metadata() -> None:
    data = torch.tensor([5.0, 6.0])
    for tree in (holder(), st.without_data(holder())):
        new = st.data_at(tree, ("model", "w"), data)["model"]["w"]
        assert new.data is data and new.global_offset == (2,)
    assert st.data_at(st.without_data(holder()), "w", torch.neg)["model"]["w"].data is None
    assert st.data_at({"w": torch.ones(2), "n": 1}, "w", data) == {"w": data, "n": 1}
    for other in (torch.ones(3), lambda tensor: tensor.repeat(3)):
        with pytest.raises(ShapeError, match=r"^data_at: the dtype or shape of 'w' would change"):
            st.data_at(holder(), "w", other)
    with pytest.raises(TreeError, match=r"data_at: no tensor at these paths\n  tree\['opt'\]"):
        st.data_at(holder(), ("opt",), torch.neg)
