"""The common state of a tree, which is all its plain values: its form in storage, comparison and union over ranks.

Holes (`HOLE`) take the places of shards in a common tree, so that a load can put the loaded tensors there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from ...errors import TreePath
from ..mapping import LocalNonpersistentObject, ShardedBase
from ._difference import diff
from ._join import is_hollow
from ._nodes import HOLE, Tree, drop_holes, entries, is_dict, is_subclass, like, refusing_depth, stored_like


@refusing_depth
def common_with_holes(tree: Tree) -> Tree:
    """Return a tree's common state for storage: sharded leaves and nonpersistent objects become holes.

    A container that holds only holes becomes a hole itself, except the outermost container. Empty containers stay. An
    instance of a class that users registered with optree becomes a dict of its entries.

    Examples:
        >>> from shardtree.mapping import LocalNonpersistentObject
        >>> local = LocalNonpersistentObject(0)
        >>> common_with_holes({"step": 3, "mixed": [local, 1], "all": [local, local], "empty": []})
        {'step': 3, 'mixed': [HOLE, 1], 'all': HOLE, 'empty': []}
    """
    children = entries(tree)
    if children is None:
        return _with_holes(tree)
    return stored_like(tree, {entry: _with_holes(child) for entry, child in children.items()})


def _with_holes(tree: Tree) -> Tree:
    children = entries(tree)
    if children is None:
        return HOLE if isinstance(tree, (ShardedBase, LocalNonpersistentObject)) else tree
    new = {entry: _with_holes(child) for entry, child in children.items()}
    # A large subtree of shards, such as a model's, then takes no space in the common state.
    return HOLE if new and all(child is HOLE for child in new.values()) else stored_like(tree, new)


@refusing_depth
def without_holes(tree: Tree) -> Tree:
    """Return the tree without the holes in its dicts; in a list or tuple holes stay, since they keep positions.

    Ranks that hold different shards can then compare their common trees.

    Examples:
        >>> without_holes({"a": HOLE, "b": [HOLE, 1]})
        {'b': [HOLE, 1]}
    """
    return _without_holes(tree)


def _without_holes(tree: Tree) -> Tree:
    children = entries(tree)
    if children is None:
        return tree
    new = {entry: _without_holes(child) for entry, child in children.items()}
    return stored_like(tree, drop_holes(new) if is_dict(tree) else new)


def comparable(common: Any) -> Any:
    """Return a common tree reduced to its values, which must be equal on all ranks.

    Dicts lose their holes (`HOLE`, the placeholder of a shard) and the containers without a value. A list or tuple with
    a value keeps its length: holes stay, and replace containers without a value. The containers of the result are new.

    Examples:
        >>> comparable({"w": HOLE, "step": 1, "none here": []}), comparable([HOLE, HOLE])
        ({'step': 1}, [])
    """
    rest = values_only(common)
    if rest is HOLE:
        return like(common, {}) if isinstance(common, (dict, list)) else []
    return rest


def values_only(tree: Tree) -> Tree:
    """Return a tree without the holes of its dicts, and without containers that hold no value; a hole if none remains.

    In a list or tuple with values, holes stay, since they keep positions.

    Examples:
        >>> values_only([HOLE, {"w": HOLE, "step": 1}]), values_only([HOLE, {}])
        ([HOLE, {'step': 1}], HOLE)
    """
    children = entries(tree)
    if children is None:
        return tree
    new = {entry: values_only(child) for entry, child in drop_holes(children).items()}
    left = drop_holes(new)
    # Empty containers count as holes: a rank may have an empty list where others have a list of shards. `narrow`, for
    # example, makes a list of a flat shard.
    if not left:
        return HOLE
    return like(tree, left if is_dict(tree) else {**dict.fromkeys(children, HOLE), **left})


# The union of ranks' common states, for pipeline stages whose keys differ, and a rank's part of the union.

Conflicts = dict[TreePath, dict[int, Tree]]
"""Conflicting values of ranks, by path and rank."""

United = Mapping[TreePath, Set[Any]]
"""The keys that no rank lacks, by the dict's path, for each dict whose keys differ between ranks."""


@refusing_depth
def unite(trees: Mapping[int, Tree]) -> tuple[Tree, Conflicts]:
    """Return the union of several ranks' common trees, and the values in which they conflict.

    Dicts are united by key, at any depth. A value that isn't a dict must have the same bits on all ranks that have it.
    A list counts as one such value, since its items have no keys. A hole (`HOLE`, the placeholder of a shard) or an
    empty container agrees with any value.

    Args:
        trees: Common tree of each rank, which may have holes.

    Returns:
        The union, which has the first rank's value where ranks conflict; and a dict from the path of each conflict to
        the value of each rank.

    Examples:
        >>> unite({0: {"lr": {"embed": 0.1}, "step": 3}, 1: {"lr": {"head": 0.2}, "step": 4}})
        ({'lr': {'embed': 0.1, 'head': 0.2}, 'step': 3}, {('step',): {0: 3, 1: 4}})
    """
    conflicts: Conflicts = {}
    return _unite(trees, (), conflicts), conflicts


def _unite(trees: Mapping[int, Tree], path: TreePath, conflicts: Conflicts) -> Tree:
    dicts = {rank: tree for rank, tree in trees.items() if _is_mapping(tree)}
    owners = {rank: tree for rank, tree in trees.items() if not is_hollow(tree)}
    if dicts and owners.keys() <= dicts.keys():
        keys = dict.fromkeys(key for tree in dicts.values() for key in tree)
        parts = {key: {rank: tree[key] for rank, tree in dicts.items() if key in tree} for key in keys}
        return like(
            next(iter(dicts.values())), {key: _unite(of_key, (*path, key), conflicts) for key, of_key in parts.items()}
        )
    values = {rank: comparable(tree) for rank, tree in owners.items()}
    if any(diff(next(iter(values.values())), value) for value in values.values()):
        conflicts[path] = values
    return next(iter(owners.values()), next((tree for tree in trees.values() if tree is not HOLE), HOLE))


def united(trees: Sequence[Tree]) -> United:
    """Return the paths of the dicts whose keys differ between ranks, each with the keys that no rank lacks.

    Ranks without the dict are ignored. A key counts as missing if its value has nothing but holes (placeholders of
    shards) and empty containers.

    Args:
        trees: Common tree of each rank.

    Examples:
        >>> united([{"lr": {"embed": 0.1, "max": 1}, "step": 3}, {"lr": {"head": 0.2, "max": 1}, "step": 3}])
        {('lr',): frozenset({'max'})}
    """
    return dict(_shared_keys(trees, ()))


def _shared_keys(trees: Sequence[Tree], path: TreePath) -> Iterator[tuple[TreePath, frozenset[Any]]]:
    dicts = [tree for tree in trees if _is_mapping(tree)]
    key_sets = [frozenset(key for key, child in tree.items() if not is_hollow(child)) for tree in dicts]
    if len(set(key_sets)) > 1:
        yield path, frozenset.intersection(*key_sets)
    for key in dict.fromkeys(key for tree in dicts for key in tree):
        yield from _shared_keys([tree[key] for tree in dicts if key in tree], (*path, key))


@refusing_depth
def restrict(tree: Tree, like: Tree, at: United | None = None) -> Tree:
    """Return the tree without dict keys that another tree lacks.

    A rank thereby gets its part of a common state that is the union of several ranks' states. A dict that has none of
    the other tree's keys stays whole, as do lists, leaves, holes and empty containers. A load restricts trees itself if
    the checkpoint's format records which dicts were united, as the native format and zarr do.

    Args:
        tree: Tree to restrict, such as the result of `load`.
        like: Tree with the wanted keys, such as the target.
        at: Paths of the dicts to restrict, each with the keys that stay in any case, as `united` returns them. By
            default all dicts are restricted, and no key stays in any case.

    Examples:
        >>> loaded = {"lr": {"embed": 0.1, "head": 0.2}, "betas": {"embed": 0.9, "head": 0.8}, "step": 3}
        >>> restrict(loaded, {"lr": {"head": 0.0}, "betas": {}})
        {'lr': {'head': 0.2}, 'betas': {'embed': 0.9, 'head': 0.8}}
        >>> restrict(loaded, {"lr": {"head": 0.0}, "betas": {"head": 0.0}}, {("lr",): frozenset()})
        {'lr': {'head': 0.2}, 'betas': {'embed': 0.9, 'head': 0.8}, 'step': 3}
    """
    return _restrict(tree, like, at, ())


def _restrict(tree: Tree, names: Tree, at: United | None, path: TreePath) -> Tree:
    if not _is_mapping(tree) or not isinstance(names, dict):
        return tree
    shared = frozenset() if at is None else at.get(path, tree.keys())
    separate = {key for key, child in tree.items() if key not in shared and not is_hollow(child)}
    excess = separate - names.keys() if separate & names.keys() else set()
    kept = {
        key: _restrict(child, names[key], at, (*path, key)) if key in names else child
        for key, child in tree.items()
        if key not in excess
    }
    return like(tree, kept)


def _is_mapping(tree: Tree) -> bool:
    # A subclass of dict, such as a Counter, is a value.
    return isinstance(tree, dict) and not is_subclass(tree)
