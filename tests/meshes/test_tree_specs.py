"""Specs given as a tree: for containers of every kind, registered classes among them, and what doesn't fit a tree."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draws

import shardtree as st
from shardtree.core.trees import _prefixes, entries
from shardtree.errors import MetadataError
from shardtree.layouts import Mesh, PartitionSpec, from_local, layout_of
from shardtree.testing import bits
from shardtree.trees import flatten_with_paths, leaves_with_paths, register_dataclass

MESH = Mesh(tp=2)
ROWS, COLUMNS, WHOLE = PartitionSpec("tp"), PartitionSpec(None, "tp"), PartitionSpec()


@register_dataclass
@dataclass(frozen=True)
class Layer:
    w: Any
    b: Any


@register_dataclass
@dataclass(frozen=True)
class Module:
    """A node that can be called, as Equinox's modules can."""

    w: Any
    b: Any

    def __call__(self, key: str, leaf: Any) -> PartitionSpec:
        raise AssertionError("a module is not a function of specs")


Named = namedtuple("Named", "w b")


class Keyed:
    """A class of somebody else's, registered with names for its children."""

    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b = w, b


class Counted(Keyed):
    """Likewise, without names: its children go by their positions."""


def both(node: Any) -> tuple[Any, Any]:
    return node.w, node.b


register: Any = optree.register_pytree_node
register(
    Keyed, lambda node: (both(node), None, ("w", "b")), lambda _, children: Keyed(*children), namespace="shardtree"
)
register(Counted, lambda node: (both(node), None), lambda _, children: Counted(*children), namespace="shardtree")

W, B = torch.arange(24.0).view(6, 4), torch.arange(6.0)
BY_NAME = {
    "dict": lambda w, b: {"w": w, "b": b},
    "ordered dict": lambda w, b: OrderedDict(b=b, w=w),
    "dataclass": Layer,
    "module": Module,
    "named tuple": Named,
    "registered class": Keyed,
}
BY_POSITION = {
    "list": lambda w, b: [w, b],
    "tuple": lambda w, b: (w, b),
    "deque": lambda w, b: deque([w, b]),
    "positions": Counted,
    "named tuple": Named,
}
PAIRS = [(one, other) for kinds in (BY_NAME, BY_POSITION) for one in kinds for other in kinds]
MAKE: dict[str, Any] = BY_NAME | BY_POSITION


def held(tree: Any) -> dict[Any, Any]:
    """Return a rank's offsets and bits, by path."""
    return {path: (leaf.global_offset, bits(leaf.data)) for path, leaf in leaves_with_paths(tree)}


def expected(tree: Any, rank: int) -> dict[Any, Any]:
    """Return what a rank has of `w` cut by columns and of `b` cut by rows: by a function, which needs no tree."""
    return held(st.shard_at(tree, MESH, lambda key, leaf: COLUMNS if leaf.ndim == 2 else ROWS, rank))


def place_specs(tree: Any, specs: Any) -> None:
    """Raise unless all that take specs cut `w` by columns and `b` by rows."""
    for rank in range(2):
        right = expected(tree, rank)
        assert held(st.shard_at(tree, MESH, specs, rank)) == right
        assert [leaf.global_offset for _, leaf in leaves_with_paths(st.abstract_at(tree, MESH, specs, rank))] == [
            offset for offset, _ in right.values()
        ]
        pairs, rebuild = flatten_with_paths(st.shard_at(tree, MESH, specs, rank))
        local = from_local(rebuild([leaf.data for _, leaf in pairs]), MESH, specs, rank)
        assert held(local) == right
    assert set(layout_of(tree, MESH, specs).offset[:, -1].tolist()) == {0, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "specs"), PAIRS)
def test_specs_stand_at_the_places_of_any_container(tree: str, specs: str) -> None:
    place_specs(MAKE[tree](W, B), MAKE[specs](COLUMNS, ROWS))
    place_specs({"p": [MAKE[tree](W, B)]}, {"p": [MAKE[specs](COLUMNS, ROWS)]})


@pytest.mark.parametrize("tree", BY_POSITION)
def test_positions_may_be_keys_of_a_dict(tree: str) -> None:
    place_specs(MAKE[tree](W, B), {0: COLUMNS, 1: ROWS})


def nodes(inner: Any) -> Any:
    return draws.builds(lambda kind, w, b: MAKE[kind](w, b), draws.sampled_from(sorted(MAKE)), inner, inner)


def finds_own_specs(tree: Any) -> None:
    """The law: specs that are mapped from a tree are found, whatever it is made of."""
    specs = st.map_shards(lambda leaf: COLUMNS if leaf.ndim == 2 else ROWS, tree)
    for rank in range(2):
        assert held(st.shard_at(tree, MESH, specs, rank)) == expected(tree, rank)


@settings(max_examples=30)
@given(nodes(draws.recursive(draws.sampled_from([W, B]), nodes, max_leaves=6)))
def test_a_tree_s_own_structure_holds_its_specs(tree: Any) -> None:
    finds_own_specs(tree)


def test_the_law_catches_places_that_are_looked_up_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def indexed(node: Any) -> Any:
        is_spec = any(isinstance(leaf, PartitionSpec) for _, leaf in leaves_with_paths(node))
        return entries(node) if is_spec or isinstance(node, dict | list | tuple) else None

    monkeypatch.setattr(_prefixes, "entries", indexed)
    finds_own_specs({"p": [W, (B, W)]})
    with pytest.raises(MetadataError, match="specs have entries that the tree does not have"):
        finds_own_specs({"p": Keyed(W, B)})


@pytest.mark.parametrize(
    ("specs", "places"),
    [
        (Layer(WHOLE, [WHOLE]), ["specs['b'][0]"]),
        (Layer({"x": WHOLE, "y": WHOLE}, WHOLE), ["specs['w']['x']", "specs['w']['y']"]),
        ({"w": WHOLE, "c": WHOLE}, ["specs['c']"]),
        ([WHOLE, WHOLE], ["specs[0]", "specs[1]"]),
        ({"w": WHOLE, "b": {0: WHOLE}}, ["specs['b'][0]"]),
    ],
)
def test_specs_for_what_is_not_in_the_tree_are_all_named(specs: Any, places: list[str]) -> None:
    """A tensor's rows and a text's letters are no places, though both have an index."""
    for tree in (Layer(W, B), Keyed(W, B), {"w": W, "b": "text"}):
        with pytest.raises(MetadataError, match="specs have entries that the tree does not have") as caught:
            st.shard(tree, MESH, specs)
        assert str(caught.value).splitlines()[1:-1] == [f"  {place}" for place in places]


@pytest.mark.parametrize("specs", [{0: COLUMNS, "w": ROWS, 1: ROWS}, {-1: WHOLE, 0: WHOLE}])
def test_a_place_has_one_spec_and_positions_count_from_the_front(specs: Any) -> None:
    with pytest.raises(MetadataError, match="specs have entries that the tree does not have"):
        st.shard(Named(W, B), MESH, specs)


@pytest.mark.parametrize("make", BY_NAME.values(), ids=list(BY_NAME))
def test_tensors_without_a_spec_are_all_named(make: Any) -> None:
    with pytest.raises(MetadataError, match="tensors without a spec") as caught:
        st.shard({"p": make(W, B), "q": W}, MESH, {"p": make(None, None), "q": WHOLE})
    assert sorted(line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]) == ["'p.b'", "'p.w'"]
