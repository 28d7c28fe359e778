"""Maps in both views of a tree, and what optree knows of our leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from hypothesis import given

from shardtree.core.lazy import stored
from shardtree.core.trees import NAMESPACE, shard_leaves
from shardtree.errors import ShapeError, TreeError
from shardtree.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import flatten_with_paths, leaves_with_paths, map_data, map_shards
from tests.core.trees.samples import assert_caught, halves, join_halves, outline, trees

W = ShardedTensor.from_rank_offsets("w", torch.arange(4.0), (0, 1, 2))
FACTORY = ShardedTensorFactory("f", torch.arange(4.0), halves, join_halves)

Map = Callable[[Callable[[Any], Any], Any], Any]


def name(leaf: Any) -> str:
    return type(leaf).__name__


def composes(map_: Map, tree: Any) -> None:
    assert outline(map_(lambda leaf: len(name(leaf)), tree)) == outline(map_(len, map_(name, tree)))


@given(trees())
def test_map_of_identity_is_identity(tree: Any) -> None:
    for map_ in (map_shards, map_data):
        assert outline(map_(lambda leaf: leaf, tree)) == outline(tree)


@given(trees())
def test_map_of_a_composition_is_the_composition_of_maps(tree: Any) -> None:
    composes(map_shards, tree)


def test_map_of_a_composition_catches_a_function_called_twice() -> None:
    assert_caught(composes, lambda f, tree: map_shards(lambda leaf: f(str(f(leaf))), tree), trees())


def test_metadata_of_an_ordered_dict_is_left_behind() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    assert hasattr(state, "_metadata")
    assert not hasattr(map_shards(lambda leaf: leaf, state), "_metadata")


def test_what_f_raises_says_where() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        map_shards(lambda x: 1 // x, {"a": [1, 0]})
    assert caught.value.__notes__ == ["at tree['a'][1]"]


def test_maps_of_two_trees() -> None:
    assert map_shards(lambda x, y: (x, y), {"a": 1, "b": 2}, {"b": [3], "a": 4}) == {"a": (1, 4), "b": (2, [3])}
    assert map_shards(lambda x, y: x.key == y, [W], ["w"]) == [True]
    with pytest.raises(TreeError, match="tree 2"):
        map_shards(lambda x, y: x, {"a": 1}, {"b": 1})


BOXED = (ShardedTensor, ShardedTensorFactory)


def takes_data_of_both(map_: Callable[..., Any], tree: Any) -> None:
    """f gets each tree's data at the same place, and the first tree keeps its metadata and all else."""
    other = map_shards(lambda leaf: replace(leaf, key="another's") if isinstance(leaf, BOXED) else leaf, tree)
    plain = map_shards(lambda leaf: leaf.data if isinstance(leaf, BOXED) else leaf, tree)
    pairs: list[tuple[Any, ...]] = []
    mapped = map_(lambda *data: pairs.append(data) or data[0], tree, other, plain)
    assert all(left is right is third for left, right, third in pairs)
    leaves = [leaf for _, leaf in leaves_with_paths(tree)]
    assert len(pairs) == sum(isinstance(leaf, BOXED) and leaf.data is not None for leaf in leaves)
    assert all(new is old for (_, new), old in zip(leaves_with_paths(mapped), leaves, strict=True))


@given(trees())
def test_map_data_takes_the_data_of_several_trees(tree: Any) -> None:
    takes_data_of_both(map_data, [W, tree])  # plain tensors alone are refused


def test_map_data_of_several_trees_catches_shards_that_are_passed_whole() -> None:
    def passes_shards(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
        new = lambda leaf, *others: f(leaf.data, *others) if isinstance(leaf, BOXED) else leaf  # noqa: E731
        return map_shards(new, tree, *rest)

    assert_caught(takes_data_of_both, passes_shards, trees())


def test_map_data_of_several_trees_adds_and_refuses_another_structure() -> None:
    moved = map_data(torch.add, {"w": W, "f": FACTORY, "n": 1}, {"w": W, "f": FACTORY.data, "n": 2})
    assert moved["w"].data.tolist() == [0, 2, 4, 6] and moved["f"].data.tolist() == [0, 2, 4, 6] and moved["n"] == 1
    with pytest.raises(TreeError, match="map_data: tree 2 does not have the structure"):
        map_data(torch.add, {"w": W}, {"v": W})


@pytest.mark.parametrize("leaf", [W, FACTORY])
@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, lambda data: data[:1], lambda data: data[None]])
def test_map_data_refuses_another_dtype_or_shape(leaf: Any, change: Callable[[Any], Any]) -> None:
    with pytest.raises(ShapeError, match=r"cast.*map_shards") as caught:
        map_data(change, {"a": [leaf]})
    assert caught.value.__notes__ == ["at tree['a'][0]"]


def test_map_data_may_take_data_away_and_put_it_back() -> None:
    shapes = map_data(lambda data: tuple(data.shape), [W, FACTORY])
    assert [leaf.data for leaf in shapes] == [(4,), (4,)]
    assert map_data(lambda shape: torch.zeros(shape), shapes)[0].data.tolist() == [0] * 4
    assert map_data(lambda data: None, [W])[0] == W.without_data()


def test_a_shard_is_a_node_in_our_namespace_and_a_leaf_elsewhere() -> None:
    leaves, spec = optree.tree_flatten([W, FACTORY], none_is_leaf=True, namespace=NAMESPACE)
    assert leaves == [W.data, FACTORY.data]
    assert spec.unflatten(leaves) == [W, FACTORY]
    assert spec.paths() == [(0, "data"), (1, "data")]
    assert spec.accessors()[0].codify("tree") == "tree[0].data"
    assert spec == optree.tree_structure([W, FACTORY], none_is_leaf=True, namespace=NAMESPACE)
    assert hash(spec) == hash(optree.tree_structure([W, FACTORY], none_is_leaf=True, namespace=NAMESPACE))
    assert optree.tree_leaves([W, FACTORY]) == [W, FACTORY]


def test_two_trees_of_shards_with_other_metadata_dont_map_through() -> None:
    other = replace(W, key="other")
    with pytest.raises(ValueError, match="other"):
        optree.tree_map(torch.add, [W], [other], namespace=NAMESPACE)


def test_a_rebuild_needs_as_many_leaves() -> None:
    pairs, rebuild = flatten_with_paths({"b": W, "a": (None, 1)})
    assert pairs == [(("a", 0), None), (("a", 1), 1), (("b",), W)]
    assert rebuild(range(3)) == {"b": 2, "a": (0, 1)}
    with pytest.raises(TreeError, match="found 2, expected 3"):
        rebuild([1, 2])


@given(trees())
def test_shard_leaves_are_the_leaves_that_are_shards(tree: Any) -> None:
    expected = [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedBase)]
    assert list(map(id, shard_leaves(tree))) == list(map(id, expected))
    assert shard_leaves({"b": W, "a": [None, 1]}) == [W]


@pytest.mark.parametrize(
    "tree",
    [{"w": torch.ones(2), "step": 3}, [None, (torch.ones(2),)], {"w": stored(lambda *_: W, (2,), W.dtype, name="w")}],
)
def test_map_data_of_plain_tensors_alone_is_refused(tree: Any) -> None:
    with pytest.raises(TreeError, match=r"map_data: a tree of plain tensors(.|\n)*`map_shards\(f, tree\)`"):
        map_data(torch.neg, tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"w": W, "step": torch.tensor(3)},
        {"f": FACTORY, "step": torch.tensor(3)},
        {"w": replace(W, data=None), "step": torch.tensor(3)},
        {"o": ShardedObject("o", 1, (1,), (0,)), "step": torch.tensor(3)},
        {"cache": LocalNonpersistentObject(1), "step": torch.tensor(3)},
    ],
)
def test_map_data_leaves_plain_tensors_beside_shards_alone(tree: Any) -> None:
    assert map_data(torch.neg, tree)["step"] is tree["step"]


@pytest.mark.parametrize("tree", [{}, [], {"step": 3}, {"a": None}, ()])
def test_map_data_of_a_tree_without_tensors_is_the_tree(tree: Any) -> None:
    assert map_data(torch.neg, tree) == tree
