"""A tree taken apart and put together: partition and combine are inverses, and a hole stands for what was taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..mapping import LocalNonpersistentObject, ShardedBase
from ._hole import HOLE
from ._nodes import Tree, call_on_leaves, flatten


def partition(tree: Tree, predicate: Callable[[Any], object]) -> tuple[Tree, Tree]:
    """Return the tree with only the leaves that match, and the tree with only the others, holes in their places.

    Both have the structure of the whole. Leaves that are holes already stay holes in both.

    Args:
        tree: any tree.
        predicate: takes a leaf; shards are leaves.

    Examples:
        >>> small, rest = partition({"a": 1, "b": [2, 3]}, lambda leaf: leaf < 2)
        >>> small, rest
        ({'a': 1, 'b': [HOLE, HOLE]}, {'a': HOLE, 'b': [2, 3]})
        >>> from shardtree.trees import combine
        >>> combine(small, rest)
        {'a': 1, 'b': [2, 3]}
    """
    leaves, spec = flatten(tree)
    chosen = call_on_leaves(lambda leaf: leaf is HOLE or bool(predicate(leaf)), spec, leaves)
    matching = [leaf if yes else HOLE for leaf, yes in zip(leaves, chosen, strict=True)]
    rest = [HOLE if yes else leaf for leaf, yes in zip(leaves, chosen, strict=True)]
    return spec.unflatten(matching), spec.unflatten(rest)


def extract_sharded(tree: Tree) -> tuple[Tree, Tree]:
    """Return the tree with only its shards, factories and sharded objects, and the tree with only the rest.

    Examples:
        >>> from shardtree.mapping import ShardedObject
        >>> extract_sharded({"rng": ShardedObject("rng", None, (1,), (0,)), "step": 3})[1]
        {'rng': HOLE, 'step': 3}
    """
    return partition(tree, lambda leaf: isinstance(leaf, ShardedBase))


def extract_nonpersistent(sharded_state_dict: Tree) -> tuple[Tree, Tree]:
    """Return the tree with only its `LocalNonpersistentObject` leaves, and the tree with only the rest.

    Examples:
        >>> from shardtree.mapping import LocalNonpersistentObject
        >>> extract_nonpersistent({"cache": LocalNonpersistentObject(1), "step": 3})[1]
        {'cache': HOLE, 'step': 3}
    """
    return partition(sharded_state_dict, lambda leaf: isinstance(leaf, LocalNonpersistentObject))
