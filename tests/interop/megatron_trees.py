"""What the tests of interop.megatron share: trees of Megatron-Core's leaves, and leaves as plain values."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st

from shardtree.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensor, ShardedTensorFactory
from shardtree.testing import global_states, rank_tree, state_layouts
from shardtree.trees import flatten_with_paths, map_shards
from tests.core.trees.samples import KEYS, Config, leaves, outline

OPAQUE = ("data", "build_fn", "merge_fn")


def seen(leaf: Any, opaque: tuple[str, ...] = OPAQUE) -> Any:
    """Return a leaf as what `==` compares: a shard by its fields, what is opaque by identity."""
    if type(leaf).__name__ == "LocalNonpersistentObject":
        return "local", id(leaf.obj)
    if not hasattr(leaf, "replica_id"):
        return id(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf))
    values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    plain = {name: value for name, value in values.items() if name not in OPAQUE}
    shown = {name: tuple(value) if isinstance(value, (list, tuple)) else repr(value) for name, value in plain.items()}
    return type(leaf).__module__, type(leaf).__name__, shown | {n: id(values[n]) for n in opaque if n in values}


def view(tree: Any, opaque: tuple[str, ...] = OPAQUE) -> Any:
    """Return a tree as what `==` compares: its containers with their order, and each leaf at its path."""
    pairs, rebuild = flatten_with_paths(tree)
    return outline(rebuild([None] * len(pairs))), [(path, seen(leaf, opaque)) for path, leaf in pairs]


def built_by(mapping: ModuleType, leaf: Any) -> Any:
    """Return Megatron-Core's leaf with the fields of one of ours, made by its own constructor."""
    if isinstance(leaf, LocalNonpersistentObject):
        return mapping.LocalNonpersistentObject(leaf.obj)
    if not isinstance(leaf, ShardedBase):
        return leaf
    cls = getattr(mapping, type(leaf).__name__)
    given = {field.name: getattr(leaf, field.name) for field in fields(cls)}
    if isinstance(leaf, ShardedTensorFactory):
        given["build_fn"] = partial(_build, mapping, leaf)
    return cls(**given)


def _build(mapping: ModuleType, factory: Any, key: str, data: Any, replica_id: Any, flat: Any = None) -> Any:
    return as_megatrons(mapping, factory.build_fn(key, data, replica_id, flat))


def as_megatrons(mapping: ModuleType, tree: Any) -> Any:
    return map_shards(lambda leaf: built_by(mapping, leaf), tree)


def unflat(leaf: Any) -> Any:
    """Return a shard without its flat range, which 0.16.1 doesn't know."""
    flat = isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None
    return replace(leaf, data=None, flattened_range=None) if flat else leaf


def entered(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return the containers that Megatron-Core looks into."""
    named = st.dictionaries(KEYS | st.integers(0, 3), children, max_size=3)
    return named | named.map(OrderedDict) | named.map(Config) | st.lists(children, max_size=3)


@st.composite
def our_trees(draw: st.DrawFn) -> Any:
    """Return trees of every kind of leaf, in what Megatron-Core looks into, or a rank's tree in any layout."""
    if draw(st.booleans()):
        return draw(st.recursive(leaves(), entered, max_leaves=8))
    state = draw(global_states())
    return rank_tree(state, draw(state_layouts(state, 3)), draw(st.integers(0, 2)))
