"""Whole states: global tensors and objects, and the sharded trees that ranks hold of them in some layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from ..mapping import LocalNonpersistentObject, ShardedObject
from ..trees import without_data
from ._common import common_states
from ._layout import Layout, cut
from ._layouts import layouts
from ._pretty import pretty_repr
from ._tensors import tensors


@dataclass(frozen=True, slots=True, eq=False)
class GlobalState:
    """What all ranks hold together: the oracle that a load is compared with.

    Attributes:
        tensors: global tensors by key.
        objects: for each key of sharded objects, the array's objects in order.
        common: what is the same on every rank.
    """

    tensors: Mapping[str, torch.Tensor]
    objects: Mapping[str, Sequence[Any]]
    common: Mapping[str, Any]

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the tensors' shapes and dtypes, and the rest as it is: torch can't print tensors of some dtypes."""
        kinds = {key: f"{str(whole.dtype)[6:]} {tuple(whole.shape)}" for key, whole in self.tensors.items()}
        return f"GlobalState(tensors={kinds}, objects={self.objects}, common={self.common})"


def global_states(*, max_tensors: int = 3) -> st.SearchStrategy[GlobalState]:
    """Return a strategy for states of one or more tensors of any shape and dtype, objects and a common state.

    Examples:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3)
        ... @given(global_states())
        ... def check_has_tensors(state):
        ...     assert state.tensors
        >>> check_has_tensors()
    """
    named = st.dictionaries(st.text("ab./é", min_size=1, max_size=3), tensors(), min_size=1, max_size=max_tensors)
    objects = st.dictionaries(st.sampled_from(["rng", "o/shard_1"]), st.lists(st.integers(), min_size=1, max_size=3))
    return st.builds(GlobalState, named, objects, common_states())


@st.composite
def state_layouts(draw: st.DrawFn, state: GlobalState, ranks: int) -> dict[str, Layout]:
    """Return a strategy for a layout of each of a state's tensors.

    Examples:
        >>> state = GlobalState({"w": torch.zeros(2)}, {}, {})
        >>> from hypothesis import find
        >>> find(state_layouts(state, 1), lambda found: True)["w"].pieces
        (Piece(0, (0,), (2,)),)
    """
    return {key: draw(layouts(tuple(tensor.shape), ranks)) for key, tensor in state.tensors.items()}


def rank_tree(state: GlobalState, layout: Mapping[str, Layout], rank: int) -> dict[str, Any]:
    """Return the sharded tree that a rank holds of a state: what it would save.

    Without common values it is shards and objects alone, which formats of nothing but tensors hold too; with some,
    a local value stands beside them.

    Args:
        state: the global values.
        layout: for each tensor's key, how it lies over the ranks.
        rank: whose tree.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> state = GlobalState({"w": torch.arange(4)}, {}, {"step": 3})
        >>> tree = rank_tree(state, {"w": even_layout((4,), 2, axis=0)}, 1)
        >>> tree["model"]["w"][0].data, tree["common"]
        (tensor([2, 3]), {'step': 3})
    """
    ranks = next(iter(layout.values())).ranks
    shards = {key: cut(layout[key], key, whole, rank) for key, whole in state.tensors.items()}
    objects = [item for key, values in state.objects.items() for item in _objects(key, values, rank, ranks)]
    held = {"model": {key: found for key, found in shards.items() if found}, "objects": objects}
    rest = {"common": dict(state.common), "local": [7, LocalNonpersistentObject(rank)]} if state.common else {}
    return {name: tree for name, tree in held.items() if tree} | rest


def target_tree(state: GlobalState, layout: Mapping[str, Layout], rank: int) -> dict[str, Any]:
    """Return the tree that a rank asks for: `rank_tree` without data.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> state = GlobalState({"w": torch.arange(4)}, {}, {})
        >>> target_tree(state, {"w": even_layout((4,), 1, axis=0)}, 0)["model"]["w"][0].data is None
        True
    """
    tree = {name: part for name, part in rank_tree(state, layout, rank).items() if name != "common"}
    target: dict[str, Any] = without_data(tree)
    return target


def _objects(key: str, values: Sequence[Any], rank: int, ranks: int) -> list[ShardedObject]:
    """Return the objects that a rank holds: each lies on two ranks where there are two."""
    shape, holders = (len(values),), range(min(ranks, 2))
    return [
        ShardedObject(key, value, shape, (number,), replica)
        for number, value in enumerate(values)
        for replica in holders
        if (number + replica) % ranks == rank
    ]
