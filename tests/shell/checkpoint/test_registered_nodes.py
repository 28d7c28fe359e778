"""Trees with nodes of users' classes: they are saved as dicts of their entries, and loaded as what the target has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.trees import NAMESPACE
from shardtree.errors import TreeError
from shardtree.testing import global_states, rank_tree, state_layouts, target_tree
from tests.core.trees.samples import assert_caught
from tests.shell.checkpoint.parts import FORMATS, saved, saved_by

W = torch.arange(6.0).view(3, 2)


@dataclass(frozen=True)
class TrainState:
    """A training job's state as Flax has it: fields that are a tree, and a function that isn't."""

    step: Any
    params: Any
    opt_state: Any
    apply_fn: Any = None


class Node:
    """A node with any entries."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held


class Params(OrderedDict[str, Any]):
    """A dict that is registered."""


class Stages(list[Any]):
    """A list that is registered."""


FIELDS = ("step", "params", "opt_state")
FLATTEN: dict[type, Callable[[Any], Any]] = {
    TrainState: lambda state: ([getattr(state, name) for name in FIELDS], state.apply_fn, FIELDS),
    Node: lambda node: (list(node.held.values()), tuple(node.held), tuple(node.held)),
    Params: lambda params: (list(params.values()), tuple(params), tuple(params)),
    Stages: lambda stages: (list(stages), None),
}
BUILD: dict[type, Any] = {
    TrainState: lambda apply_fn, children: replace(TrainState(*children), apply_fn=apply_fn),
    Node: lambda names, children: Node(dict(zip(names, children, strict=True))),
    Params: lambda names, children: Params(zip(names, children, strict=True)),
    Stages: lambda _, children: Stages(children),
}


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    register: Any = optree.register_pytree_node
    for kind, flatten in FLATTEN.items():
        register(kind, flatten, BUILD[kind], namespace=NAMESPACE)
    yield
    for kind in FLATTEN:
        optree.unregister_pytree_node(kind, namespace=NAMESPACE)


def half(key: str, rank: int, size: int) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, W.chunk(size, 1)[rank].contiguous(), (1, rank, size))


def train_state(rank: int = 0, size: int = 1, step: int = 3) -> TrainState:
    adam = {"mu": half("mu", rank, size), "count": step, "lr": [0.1, st.LocalNonpersistentObject(rank)]}
    factory = st.lenses.as_factory(half("f", rank, size), st.lenses.transposed())
    return TrainState(step, {"w": half("w", rank, size), "f": factory}, (adam, {}), W.sum)


def check_loaded(state: Any, rank: int = 0, size: int = 1) -> None:
    part = W.chunk(size, 1)[rank]
    assert type(state) is TrainState and state.step == 3 and state.apply_fn == W.sum
    assert torch.equal(state.params["w"], part) and torch.equal(state.params["f"], part)
    adam, empty = state.opt_state
    assert torch.equal(adam["mu"], part) and empty == {}
    assert (adam["count"], adam["lr"]) == (3, [0.1, rank])


@pytest.mark.parametrize("backend", FORMATS, ids=str)
@pytest.mark.parametrize(
    "at", [lambda state: state, lambda state: {"state": state}, lambda state: {"state": [1, state]}]
)
def test_a_train_state_is_saved_and_loaded(backend: tuple[str, int], at: Callable[[Any], Any]) -> None:
    place = saved_by([at(train_state(rank, 2)) for rank in range(2)], sharded_strategy=backend)
    loaded = st.load(at(st.without_data(train_state(step=0), meta=True)), place)
    found = loaded["state"] if isinstance(loaded, dict) else loaded
    check_loaded(found[1] if isinstance(found, list) else found)


def test_it_is_resharded_between_ranks_and_in_memory() -> None:
    sources = [train_state(rank, 2) for rank in range(2)]
    whole = st.without_data(train_state(step=0), meta=True)
    [found] = st.reshard(sources, [whole])
    check_loaded(st.unbox(found))

    def move(world: st.World) -> Any:
        return st.redistribute(sources[world.rank], whole if world.rank else {}, world=world)

    check_loaded(st.unbox(st.simulate(2, move)[1]))


def test_a_field_that_the_class_has_lost_is_an_error_that_names_the_place() -> None:
    place = saved({"n": Node({"w": half("w", 0, 1), "gone": 1})})
    with pytest.raises(TreeError, match=r"target\['n'\] does not fit"):
        st.load({"n": Node({"w": half("w", 0, 1)})}, place)


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_a_registered_subclass_comes_back_as_what_the_target_has(backend: tuple[str, int]) -> None:
    tree = {"p": Params(b=half("b", 0, 1), a=3, rest=half("rest", 0, 1)), "s": Stages([half("v", 0, 1), {"lr": 1}])}
    place = saved(tree, backend)
    loaded = st.load(st.without_data(tree), place)
    assert type(loaded["p"]) is Params and [*loaded["p"]] == ["b", "a", "rest"] and loaded["p"]["a"] == 3
    assert type(loaded["s"]) is Stages and torch.equal(loaded["s"][0], W) and loaded["s"][1] == {"lr": 1}
    again = st.rebox(st.without_data(tree), loaded)
    assert type(again["p"]) is Params and not st.diff(again, tree)
    plain = st.load({"p": {"b": half("b", 0, 1), "rest": half("rest", 0, 1)}}, place)["p"]
    assert type(plain) is dict and plain["a"] == 3
    kept, left = st.partition(tree, lambda leaf: isinstance(leaf, st.ShardedTensor))
    assert type(left["p"]) is Params and not st.diff(st.combine(kept, left), tree)
    assert type(st.core.trees.prune({"p": Params(a=st.trees.HOLE, b=1)})["p"]) is Params


As = Callable[[Any], Any]


def as_nodes(tree: Any) -> Any:
    """Return the tree with a node for each dict."""
    return Node({key: as_nodes(child) for key, child in tree.items()}) if type(tree) is dict else tree


def as_dicts(tree: Any) -> Any:
    if isinstance(tree, Node):
        return {key: as_dicts(child) for key, child in tree.held.items()}
    return {key: as_dicts(child) for key, child in tree.items()} if type(tree) is dict else tree


def with_model(convert: As, tree: dict[str, Any]) -> dict[str, Any]:
    return {key: convert(child) if key == "model" else child for key, child in tree.items()}


def nodes_are_as_good_as_dicts(stored_as: As, drawn: Callable[[], tuple[list[Any], list[Any]]]) -> None:
    trees, targets = drawn()

    def loaded(convert: As, form: As) -> list[Any]:
        place = saved_by([with_model(form, tree) for tree in trees])
        wanted = [with_model(convert, tree) for tree in targets]
        return st.simulate(len(targets), lambda world: st.load(wanted[world.rank], place, world=world))

    found, expected = loaded(as_nodes, stored_as), loaded(lambda tree: tree, lambda tree: tree)
    for target, one, other in zip(targets, found, expected, strict=True):
        assert "model" not in target or type(one["model"]) is Node
        assert not st.diff(as_dicts(one), other)


@some.composite
def saves(draw: some.DrawFn) -> Callable[[], tuple[list[Any], list[Any]]]:
    state = draw(global_states())
    one, other = (draw(state_layouts(state, draw(some.integers(1, 3)))) for _ in range(2))
    ranks = [next(iter(layout.values())).ranks for layout in (one, other)]
    trees = [rank_tree(state, one, rank) for rank in range(ranks[0])]
    targets = [target_tree(state, other, rank) for rank in range(ranks[1])]
    return lambda: (trees, targets)  # torch can't print some dtypes, as Hypothesis would


@pytest.mark.slow
@settings(max_examples=max(10, settings.default.max_examples // 4))
@given(saves())
def test_a_tree_of_nodes_loads_what_a_tree_of_dicts_does(drawn: Any) -> None:
    nodes_are_as_good_as_dicts(as_nodes, drawn)


def test_the_law_of_nodes_catches_entries_that_lose_their_names() -> None:
    def by_position(tree: Any) -> Any:
        return [*map(by_position, tree.values()), 0] if type(tree) is dict else tree

    assert_caught(nodes_are_as_good_as_dicts, by_position, saves())


def test_a_mesh_cuts_a_train_state_and_puts_it_together() -> None:
    state = TrainState(3, {"w": W}, [{"mu": W}])
    trees = st.shard(state, st.Mesh(tp=2), st.PartitionSpec(None, "tp"))
    assert type(trees[1]) is TrainState and trees[1].params["w"].global_offset == (0, 1)
    whole = st.unshard(trees)
    assert type(whole) is TrainState and torch.equal(whole.params["w"], W)
    assert replace(st.abstract(state, st.Mesh(tp=1), st.PartitionSpec())[0], params=0, opt_state=0).step == 3
