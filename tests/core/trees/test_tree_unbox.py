"""unbox and rebox: a sharded tree without its boxes, and data put back into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

from shardtree.core.lazy import stored
from shardtree.errors import TreeError
from shardtree.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from shardtree.trees import leaves_with_paths, map_shards, partition, rebox, unbox, without_data
from tests.core.trees.samples import Pair, assert_caught, flat_shard, halves, join_halves, outline, trees

W = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 2))
RNG = ShardedObject("rng", 1, (1,), (0,))
LOCAL = LocalNonpersistentObject([1])
FACTORY = ShardedTensorFactory("f", torch.arange(4.0), halves, join_halves)

Put = Callable[[Any, Any], Any]


def is_boxed(leaf: Any) -> bool:
    return isinstance(leaf, (ShardedBase, LocalNonpersistentObject))


def puts_back(put: Put, tree: Any) -> None:
    assert outline(put(tree, unbox(tree))) == outline(tree)
    assert not any(is_boxed(leaf) for _, leaf in leaves_with_paths(unbox(tree)))


@given(trees())
def test_rebox_undoes_unbox(tree: Any) -> None:
    puts_back(rebox, tree)


def test_rebox_undoes_unbox_catches_local_objects_that_stay_unwrapped() -> None:
    def of_shards_alone(tree: Any, data: Any) -> Any:
        boxes = map_shards(lambda leaf: leaf if isinstance(leaf, ShardedBase) else None, tree)
        return rebox(boxes, data)

    assert_caught(puts_back, of_shards_alone, trees())


def loaded_for(tree: Any) -> Any:
    """Return what a load could give: other tensors, and values in each dict of which the tree says nothing."""
    if isinstance(tree, dict):
        return type(tree)() | {entry: loaded_for(child) for entry, child in tree.items()} | {"extra": [1, {}]}
    if isinstance(tree, list):
        return [loaded_for(child) for child in tree]
    held = unbox(tree)
    return held.clone() if isinstance(held, torch.Tensor) else held


def holds_the_data(put: Put, tree: Any) -> None:
    data = loaded_for(tree)
    boxed = put(tree, data)
    assert outline(unbox(boxed)) == outline(data)
    found = {path: leaf for path, leaf in leaves_with_paths(boxed) if is_boxed(leaf)}
    boxes = {path: leaf for path, leaf in leaves_with_paths(tree) if is_boxed(leaf)}
    assert found.keys() == boxes.keys()
    assert without_data(found) == without_data(boxes) | {
        path: leaf for path, leaf in found.items() if isinstance(leaf, LocalNonpersistentObject)
    }


@given(trees())
def test_unbox_undoes_rebox(tree: Any) -> None:
    holds_the_data(rebox, tree)


def test_unbox_undoes_rebox_catches_the_tree_s_own_plain_values() -> None:
    def with_own_values(tree: Any, data: Any) -> Any:
        return map_shards(lambda leaf, new: new if is_boxed(leaf) else leaf, tree, rebox(tree, data))

    assert_caught(holds_the_data, with_own_values, trees())


def test_a_box_takes_a_whole_container() -> None:
    new = rebox({"rng": RNG, "local": LOCAL}, {"rng": {"seed": [1]}, "local": [2, [3]]})
    assert new["rng"].data == {"seed": [1]} and new["local"].unwrap() == [2, [3]]


def test_containers_order_and_plain_values_are_the_data_s() -> None:
    data = {"step": 3, "p": (torch.zeros(2), [5]), "extra": 1}
    new = rebox({"p": Pair(W, [4]), "step": 2, "gone": None}, data)
    assert list(new) == ["step", "p", "extra"] and type(new["p"]) is tuple
    assert new["p"][0].key == "w" and new["p"][1] is data["p"][1]  # type: ignore[index]


def test_flat_ranges_factories_and_lazy_tensors_are_boxed() -> None:
    lazy = stored(lambda box: torch.ones(2), (2,), torch.float32, name="w")
    tree = {"w": W, "flat": flat_shard("v", torch.zeros(3)), "f": FACTORY, "free": FACTORY.without_data()}
    new = rebox(tree, {"w": lazy, "flat": torch.ones(3), "f": torch.zeros(4), "free": (1, 2)})
    assert new["w"].data is lazy and new["f"].data.tolist() == [0] * 4 and new["free"].data == (1, 2)


def test_all_that_does_not_fit_is_named_at_once() -> None:
    tree = {"a": [W, W], "b": {"c": W, "rng": RNG}, "d": W, "e": FACTORY, "f": [W]}
    data = {"a": [torch.ones(3), torch.ones(2).double()], "b": {"c": 3}, "d": torch.ones(2), "f": {"x": 1}}
    with pytest.raises(TreeError) as caught:
        rebox(tree, data)
    for line in (
        "tree['a'][0]: found (3,) torch.float32, expected (2,) torch.float32",
        "tree['a'][1]: found (2,) torch.float64, expected (2,) torch.float32",
        "tree['b']['c']: found int, expected (2,) torch.float32",
        "tree['b']['rng']: missing",
        "tree['e']: missing",
        "tree['f'][0]: found dict with 1 key at tree['f'], expected a value in a list of length 1",
    ):
        assert line in str(caught.value)


def test_what_partition_took_out_stays_a_hole() -> None:
    sharded, _ = partition({"w": W, "step": 3}, is_boxed)
    assert rebox(sharded, unbox(sharded)) == sharded
