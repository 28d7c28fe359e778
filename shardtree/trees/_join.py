"""The common tree that is stored, with holes where shards were, and its join with what a load's target got.

A place keeps its position from save to load because it is stored as a hole. A container with nothing but holes is
stored as one hole, so that the target's own shape stands there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TreeError, TreePath, error_text, render_path
from ..mapping import LocalNonpersistentObject, ShardedBase
from ._hole import HOLE
from ._nodes import Tree, describe, entries, flatten, is_known_leaf, is_sequence, like, same_kind


def common_with_holes(tree: Tree) -> Tree:
    """Return what is stored of a tree outside its shards: each sharded leaf and nonpersistent object is a hole.

    A container with nothing but holes becomes a hole itself, save the outermost. An empty container stays as it is.

    Examples:
        >>> from shardtree.mapping import LocalNonpersistentObject
        >>> local = LocalNonpersistentObject(0)
        >>> common_with_holes({"step": 3, "mixed": [local, 1], "all": [local, local], "empty": []})
        {'step': 3, 'mixed': [HOLE, 1], 'all': HOLE, 'empty': []}
    """
    children = entries(tree)
    if children is None:
        return _hole_or_leaf(tree)
    return like(tree, {entry: _stored(child) for entry, child in children.items()})


def _hole_or_leaf(leaf: Any) -> Any:
    return HOLE if isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) else leaf


def _stored(tree: Tree) -> Tree:
    children = entries(tree)
    if children is None:
        return _hole_or_leaf(tree)
    new = {entry: _stored(child) for entry, child in children.items()}
    return HOLE if new and all(child is HOLE for child in new.values()) else like(tree, new)


def without_holes(tree: Tree) -> Tree:
    """Return the tree with holes left out of its dicts; in a list or tuple they stay, since they keep positions.

    So two ranks' common trees can be compared although they hold different shards.

    Examples:
        >>> without_holes({"a": HOLE, "b": [HOLE, 1]})
        {'b': [HOLE, 1]}
    """
    children = entries(tree)
    if children is None:
        return tree
    new = {entry: without_holes(child) for entry, child in children.items()}
    return like(tree, _filled(new)) if isinstance(tree, dict) else like(tree, new)


def join(common: Tree, target: Tree) -> Tree:
    """Return the stored common tree joined by what was loaded for a target.

    Dicts are joined by key, lists and tuples of equal length by position, a hole or an empty list by what the target
    has. Order is the stored one, then the target's new keys; containers are of the target's type where it has one.

    Args:
        common: as `common_with_holes` gave it.
        target: the target's tree with each shard replaced by what was loaded and each plain value by a hole.
            `LocalNonpersistentObject` is a box that is unwrapped here, and what it holds isn't looked into: put loaded
            objects in one too, for they may be containers.

    Returns:
        A tree without holes; subtrees of the target that hold none are shared.

    Raises:
        TreeError: both have a value at a path, containers don't fit, or a hole in a list or tuple stays unfilled.

    Examples:
        >>> join({"step": 3, "w": HOLE, "gone": HOLE, "mixed": [HOLE, 1]}, {"mixed": ["b", HOLE], "w": "a"})
        {'step': 3, 'w': 'a', 'mixed': ['b', 1]}
    """
    joined = _join(common, target, ())
    if joined is HOLE:
        raise _unfilled("a single shard", ["tree"])
    return joined


def join_loaded(common: Tree, target: Tree) -> Tree:
    """Return `join(common, target)`, where a common tree that shows only that shards stood there is no part of it.

    So a tree of nothing but shards may be loaded for a target of another shape.

    Args:
        common: as `common_with_holes` gave it.
        target: as in `join`.

    Raises:
        TreeError: as `join`.

    Examples:
        >>> join_loaded([HOLE, HOLE], {"w": "a"})
        {'w': 'a'}
    """
    both_dicts = isinstance(common, dict) and isinstance(target, dict)
    nothing_else = holds_only_holes(common) or common == {}
    if nothing_else and not both_dicts and any(leaf is not HOLE for leaf in flatten(target)[0]):
        common = HOLE  # a tree of nothing but shards: the target's own shape counts
    return join(common, target)


def holds_only_holes(common: Any) -> bool:
    """Return whether a common tree is the trace of a tree of nothing but shards.

    Examples:
        >>> holds_only_holes([HOLE, HOLE]), holds_only_holes({"w": HOLE, "step": 1}), holds_only_holes([])
        (True, False, False)
    """
    if not isinstance(common, (dict, list, tuple)):
        return False
    children = list(common.values() if isinstance(common, dict) else common)
    return bool(children) and all(child is HOLE for child in children)


def comparable(common: Any) -> Any:
    """Return what must be the same on all ranks of a common tree: not where shards were, nor how many. New containers.

    Examples:
        >>> comparable({"w": HOLE, "step": 1, "none here": []}), comparable([HOLE, HOLE])
        ({'step': 1}, [])
    """
    rest = _without_traces(common)
    if rest is HOLE:
        return like(common, {}) if isinstance(common, (dict, list)) else []
    return rest


def _without_traces(tree: Tree) -> Tree:
    """Return a tree without holes and without what holds nothing else: a hole where nothing is left."""
    children = entries(tree)
    if children is None:
        return tree
    new = {entry: _without_traces(child) for entry, child in children.items() if child is not HOLE}
    left = _filled(new)
    # An empty container doesn't count: a list of shards is empty on a rank that holds none of them.
    if not left:
        return HOLE
    return like(tree, left if isinstance(tree, dict) else {**dict.fromkeys(children, HOLE), **left})


def _join(stored: Tree, target: Tree, path: TreePath) -> Tree:
    """Return the join at one path, or a hole where neither tree has anything."""
    if stored is HOLE:
        return target if is_known_leaf(target) else _settled(_loaded(target), path)
    if target is HOLE:
        return _settled(stored, path)
    if _joinable(stored, target):
        return _join_entries(stored, target, path)
    if (wanted := _loaded(target)) is HOLE:
        return _settled(stored, path)
    if is_sequence(stored) and is_sequence(wanted) and not len(stored):
        return _settled(wanted, path)
    raise _conflict(stored, target, path)


def _joinable(stored: Tree, target: Tree) -> bool:
    if entries(stored) is None or entries(target) is None or not same_kind(stored, target):
        return False
    return not is_sequence(stored) or len(stored) == len(target)


def _join_entries(stored: Tree, target: Tree, path: TreePath) -> Tree:
    mine, theirs = entries(stored) or {}, entries(target) or {}
    order = dict.fromkeys([*mine, *theirs])
    new = {entry: _join(mine.get(entry, HOLE), theirs.get(entry, HOLE), (*path, entry)) for entry in order}
    return _closed(target, new, path)


def _loaded(target: Tree) -> Tree:
    """Return the target with each container that got nothing as a hole: plain values, empty ones too, don't count."""
    children = entries(target)
    if children is None:
        return target
    new = {entry: _loaded(child) for entry, child in children.items()}
    if all(child is HOLE for child in new.values()):
        return HOLE
    return target if all(new[entry] is child for entry, child in children.items()) else like(target, new)


def _settled(tree: Tree, path: TreePath) -> Tree:
    """Return the tree with its boxes unwrapped and its unfilled holes left out."""
    children = entries(tree)
    if children is None:
        return tree.unwrap() if isinstance(tree, LocalNonpersistentObject) else tree
    new = {entry: _settled(child, (*path, entry)) for entry, child in children.items()}
    same = all(new[entry] is child is not HOLE for entry, child in children.items())
    return tree if same else _closed(tree, new, path)


def _closed(node: Tree, new: Mapping[Any, Tree], path: TreePath) -> Tree:
    """Return a container like the node without holes: left out of a dict, an error at a position."""
    holes = [render_path((*path, entry)) for entry, child in new.items() if child is HOLE]
    if holes and not isinstance(node, dict):
        raise _unfilled(f"a {type(node).__name__}", holes)
    return like(node, _filled(new))


def _filled(children: Mapping[Any, Tree]) -> dict[Any, Tree]:
    return {entry: child for entry, child in children.items() if child is not HOLE}


def _unfilled(place: str, holes: list[str]) -> TreeError:
    what = f"join: shards stood in {place}, and the target asks for none there"
    fix = "Put shards for these places in the target, or load the tensors with `load_plain_tensors`."
    return TreeError(error_text(what, fix=fix, offenders=holes))


def _conflict(stored: Tree, target: Tree, path: TreePath) -> TreeError:
    what = f"join: {render_path(path, 'target')} doesn't fit {render_path(path, 'common')}"
    fix = "Give the target the structure that was saved, or take this entry out of it."
    return TreeError(error_text(what, found=describe(target), expected=describe(stored), fix=fix))
