"""Shards in values that aren't nodes: every tree map refuses these, and registering a dataclass makes a node of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any

import optree
import pytest
import torch

import shardtree as st
from shardtree import transforms
from shardtree.core import trees
from shardtree.errors import CheckpointingException, MetadataError, UnsupportedValue
from shardtree.storage import MemoryStorage

WHOLE = st.ShardedTensor.from_rank_offsets


@dataclass
class Layer:
    w: Any


class Slots:
    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


class Endless:
    def __init__(self, w: Any) -> None:
        self.inner, self.itself = [w], self


HOSTS: dict[str, Callable[[Any], Any]] = {
    "a dataclass": Layer,
    "a list in a dataclass": lambda shard: Layer([{"x": shard}]),
    "slots": Slots,
    "an object that holds itself": Endless,
    "a set": lambda shard: {shard},
    "a namespace": lambda shard: Namespace(layer=Layer(shard)),
}
SHARDS: dict[str, Callable[[], Any]] = {
    "a shard": lambda: WHOLE("a.w", torch.ones(2)),
    "an object": lambda: st.ShardedObject("rng", 1, (1,), (0,)),
    "a local object": lambda: st.LocalNonpersistentObject(3),
}
MAPS: dict[str, Callable[[Any], Any]] = {
    "map_shards": lambda tree: trees.map_shards(lambda leaf: leaf, tree),
    "map_data": lambda tree: trees.map_data(torch.neg, tree),
    "partition": lambda tree: trees.partition(tree, lambda leaf: True),
    "extract_sharded": trees.extract_sharded,
    "extract_nonpersistent": trees.extract_nonpersistent,
    "extract_metadata": trees.extract_metadata,
    "select": lambda tree: trees.select(tree, "a.*"),
    "select by a function": lambda tree: trees.select(tree, lambda path, leaf: False),
    "cast": lambda tree: trees.cast(tree, torch.bfloat16),
    "cast by keys": lambda tree: trees.cast(tree, torch.bfloat16, ["b"]),
    "prefix": lambda tree: trees.prefix(tree, "model."),
    "rename": lambda tree: trees.rename(tree, {"b": "c"}),
    "narrow": lambda tree: trees.narrow(tree, 0, 0, 1),
    "without_data": trees.without_data,
    "without_data as meta": lambda tree: trees.without_data(tree, meta=True),
    "apply_factories": trees.apply_factories,
    "unbox": transforms.unbox,
    "unwrap": trees.unwrap,
    "rebox": lambda tree: transforms.rebox(tree, trees.leaves_with_paths(tree)),
    "partition by booleans": lambda tree: trees.partition(tree, True),
    "tree_at": lambda tree: st.tree_at(tree, ("b",), 1),
    "data_at": lambda tree: st.data_at(tree, lambda tree: tree["b"], torch.neg),
    "map_with_path": lambda tree: st.trees.map_with_path(lambda path, leaf: leaf, tree),
    "map_by_pattern": lambda tree: st.map_by_pattern({"b": torch.neg})(tree),
    "map_params": lambda tree: st.trees.map_params(lambda state, parameter: state, tree, tree),
    "reduce_elements": lambda tree: st.trees.reduce_elements(torch.sum, tree),
    "tree_sum": st.trees.tree_sum,
    "tree_norm": st.trees.tree_norm,
}
OTHERS = {
    *("combine", "merge", "restrict"),  # which give back the values that they are given
    *("apply_factory_merges", "diff", "nested", "register_dataclass"),
    *("flatten_with_paths", "leaves_with_paths"),  # whose leaves the caller sees
    *("bind", "compose"),
    "broadcast_prefix",  # whose leaves are the prefix's
}


def tree_with(host: Any) -> dict[str, Any]:
    return {"b": WHOLE("b", torch.ones(2)), "step": 3, "inside": [None, host]}


def check_refuses(apply: Callable[[Any], Any], host: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"tree\['inside'\]\[1\]: ") as caught:
        apply(tree_with(host))
    assert ("register_dataclass" in str(caught.value)) is not isinstance(host, set)


@pytest.mark.parametrize("name", MAPS)
def test_every_map_refuses_a_value_that_hides_shards(name: str) -> None:
    for host in HOSTS.values():
        for shard in SHARDS.values():
            check_refuses(MAPS[name], host(shard()))


def test_the_law_of_hidden_shards_catches_a_map_that_asks_leaves_alone() -> None:
    def cast(tree: Any) -> Any:
        pairs, rebuild = trees.flatten_with_paths(tree)
        return rebuild([leaf.data if isinstance(leaf, st.ShardedTensor) else leaf for _, leaf in pairs])

    with pytest.raises(pytest.fail.Exception):
        check_refuses(cast, Layer(WHOLE("a.w", torch.ones(2))))


def test_every_function_of_trees_is_tried_or_named() -> None:
    functions = {name for name in st.trees.__all__ if isfunction(getattr(st.trees, name))}
    assert functions == {name.partition(" ")[0] for name in MAPS} | OTHERS | {"flat"}


def test_flat_refuses_too() -> None:
    with pytest.raises(CheckpointingException, match=r"hidden in values\n  tree\['a'\]: Layer"):
        transforms.flat({"a": Layer(WHOLE("a.w", torch.ones(2)))})


@pytest.mark.parametrize("name", MAPS)
def test_values_without_shards_are_left_alone(name: str) -> None:
    if name != "rebox":
        MAPS[name](tree_with(Layer([1, torch.ones(2)])))


def test_all_such_values_are_named() -> None:
    tree = {"a": Layer(WHOLE("a.w", torch.ones(2))), "b": [Slots(WHOLE("b.w", torch.ones(2)))]}
    for apply in (MAPS["select"], MAPS["unbox"]):
        with pytest.raises(UnsupportedValue, match=r"tree\['a'\]: Layer\n.*tree\['b'\]\[0\]: Slots"):
            apply(tree)
    with pytest.raises(UnsupportedValue, match="save: shards"):
        st.save({**tree, "f": st.ShardedTensorFactory("f", torch.ones(2), build, torch.cat)}, MemoryStorage())


def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
    return [WHOLE(key, data)]


# Registered dataclasses


@trees.register_dataclass
@dataclass(frozen=True)
class State:
    params: Any
    step: int = 0


@dataclass(frozen=True, slots=True)
class Marked:
    """As Flax marks a field by `pytree_node=False`, and Equinox one by `static=True`."""

    w: Any
    apply: Any = field(default=len, metadata={"pytree_node": False})
    width: int = field(default=7, metadata={"static": True})
    name: str = "x"
    norm: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if not isinstance(self.w, st.ShardedTensor):
            raise TypeError("a map's values need not be shards")


trees.register_dataclass(Marked, static=("name",))


def test_a_registered_dataclass_is_a_node_of_maps_saves_and_loads() -> None:
    state = State({"w": WHOLE("a.w", torch.arange(4.0))}, 3)
    mapped = trees.select(trees.prefix(state, "model."), "model.a.*")
    assert type(mapped) is State
    assert mapped.params["w"].key == "model.a.w"
    assert mapped.step is trees.HOLE
    folder = MemoryStorage()
    st.save({"state": state}, folder)
    loaded = st.load({"state": trees.without_data(state)}, folder)["state"]
    assert type(loaded) is State
    assert loaded.params["w"].tolist() == [0, 1, 2, 3]
    assert loaded.step == 3
    assert st.load_common_state_dict(folder) == {"state": {"step": 3}}


def test_what_other_libraries_mark_as_static_is_no_child() -> None:
    node = Marked(WHOLE("w", torch.ones(2)), name="y")
    assert [path for path, _ in trees.leaves_with_paths(node)] == [("w",), ("norm",)]
    bare = transforms.unbox(trees.without_data(node))
    assert (bare.w, bare.apply, bare.width, bare.name, bare.norm) == (None, len, 7, "y", 0.0)


def test_registering_again_is_the_same_and_otherwise_refused() -> None:
    assert trees.register_dataclass(State) is State
    assert trees.register_dataclass(Marked, static=["name"]) is Marked
    with pytest.raises(MetadataError, match="was registered with other arguments"):
        trees.register_dataclass(State, static=("step",))
    with pytest.raises(MetadataError, match=r"unknown fields of Layer\n.*'v'"):
        trees.register_dataclass(Layer, static=("v",))
    for wrong in (Slots, State({}), 3):
        with pytest.raises(MetadataError, match="not a dataclass"):
            trees.register_dataclass(wrong)  # type: ignore[type-var]


def test_a_dataclass_of_optree_is_registered_already() -> None:
    @optree.dataclasses.dataclass(namespace="shardtree")
    class Own:
        w: Any

    assert trees.prefix(Own(WHOLE("w", torch.ones(2))), "a.").w.key == "a.w"


def test_a_class_that_cant_be_taken_apart_is_named() -> None:
    @dataclass
    class Table(dict[str, Any]):
        w: Any = None

    with pytest.raises(MetadataError, match="Table is a container"):
        trees.register_dataclass(Table)

    @dataclass
    class Cached:
        w: Any
        cache: Any = field(init=False)

    trees.register_dataclass(Cached)
    with pytest.raises(MetadataError, match=r"Cached has fields without a value.*\n.*cache"):
        trees.map_shards(lambda leaf: leaf, {"c": Cached(WHOLE("a.w", torch.ones(2)))})
