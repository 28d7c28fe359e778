"""Division and union of trees: `partition`, `combine` (its inverse), `merge`, `select` and `prune`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias, TypeGuard, overload

from ...errors import TreeError, TreePath, error_text, render_path
from ..deferred import when_called
from ..mapping import LocalNonpersistentObject, ShardedBase
from ._hidden import flatten_visible, hides_shards
from ._key_patterns import key_matcher, shell_differences
from ._maps import call_at, call_on_leaves, check_function
from ._nodes import (
    HOLE,
    LEAVES,
    Tree,
    describe,
    drop_holes,
    entries,
    is_dict,
    is_sequence,
    leaves_with_paths,
    like,
    path_key,
    refusing_depth,
    same_kind,
)

Wanted: TypeAlias = str | re.Pattern[str] | Callable[[TreePath, Any], object] | Tree
"""A condition of `select`: a pattern of keys, a function of path and leaf, or a prefix of booleans."""

# partition: trees of one structure; each leaf of the whole is a hole in all of them but one.


@overload
def partition(tree: Tree, predicate: Callable[[Any], object] | Tree) -> tuple[Tree, Tree]: ...
@overload
def partition(
    tree: Tree, predicate: Callable[[Any], object] | Tree, *more: Callable[[Any], object] | Tree
) -> tuple[Tree, ...]: ...
def partition(
    tree: Tree, predicate: Callable[[Any], object] | Tree, *more: Callable[[Any], object] | Tree
) -> tuple[Tree, ...]:
    """Return the tree with only the matching leaves, and the tree with only the others; holes replace the rest.

    With several conditions there is one tree for each, and a last tree for leaves that meet none. A leaf is in the tree
    of the first condition that it meets. All trees have the structure of the given tree, whose holes stay holes.

    Args:
        tree: Any tree.
        predicate: Condition of the first tree: a function of a leaf; a pattern of keys or a regular expression, as for
            `select`; or a tree of booleans, which may be a prefix of the tree. Shards are leaves.
        more: Further conditions.

    Raises:
        TreeError: A string would match different leaves as a shell pattern, whose ``*`` matches dots too; or a tree of
            booleans isn't a prefix of the tree.
        MetadataError: A condition has none of these types.
        UnsupportedValue: Shards lie in values that aren't nodes, as in an instance of a class that isn't registered.

    Examples:
        >>> small, rest = partition({"a": 1, "b": [2, 3]}, lambda leaf: leaf < 2)
        >>> small, rest
        ({'a': 1, 'b': [HOLE, HOLE]}, {'a': HOLE, 'b': [2, 3]})
        >>> from shardtree.trees import combine
        >>> combine(small, rest)
        {'a': 1, 'b': [2, 3]}
        >>> partition({"a": 1, "b": [2, 3]}, "b.0", {"a": True, "b": False})
        ({'a': HOLE, 'b': [2, HOLE]}, {'a': 1, 'b': [HOLE, HOLE]}, {'a': HOLE, 'b': [HOLE, 3]})

    References:
        equinox.partition; flax.nnx.split.
    """
    leaves, spec = flatten_visible(tree)
    conditions = (predicate, *more)
    choosers = [chooser("partition", wanted, tree, lambda f: lambda _, leaf: f(leaf)) for wanted in conditions]
    # Paths take several times as long as all else, and functions of leaves need none.
    is_named = not all(map(is_function, conditions))
    paths = [path for path, _ in leaves_with_paths(tree)] if is_named else [()] * len(leaves)

    def part_of(path: TreePath, leaf: Any) -> int | None:
        if leaf is HOLE:
            return None
        return next((number for number, fits in enumerate(choosers) if fits(path, leaf)), len(choosers))

    parts = call_on_leaves(part_of, spec, paths, leaves)
    return tuple(
        spec.unflatten(leaf if part == number else HOLE for leaf, part in zip(leaves, parts, strict=True))
        for number in range(len(choosers) + 1)
    )


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


# combine fills holes in trees of one structure; merge unites the entries of two trees.

_Check = Callable[[Tree, Tree, TreePath], None]


@refusing_depth
def combine(*trees: Tree) -> Tree:
    """Return the union of trees that have holes in different places; the inverse of `partition`.

    An entry that is a hole in every tree stays a hole. A tree may have a subtree where the others have a hole.

    Args:
        trees: Trees of one structure; at each path at most one of them has a value.

    Raises:
        TreeError: Two trees have a value at the same path, or the structures differ; the error names the path.

    Examples:
        >>> combine({"a": 1, "b": [HOLE, 3]}, {"a": HOLE, "b": [2, HOLE]})
        {'a': 1, 'b': [2, 3]}
    """
    return reduce(lambda left, right: _unite(left, right, (), _check_combine), trees, HOLE)


@refusing_depth
def merge(x1: Tree, x2: Tree, key: TreePath = ()) -> Tree:
    """Return the union of two trees: dicts by key, lists and tuples of equal length by position.

    Containers have the first tree's type and order; the second tree's new keys follow. Subtrees that only one tree has
    are shared. A hole is filled by the other tree's value.

    Args:
        x1: Any tree.
        x2: Tree that is added to it.
        key: Path of both trees in a larger one, for errors.

    Raises:
        TreeError: Both trees have a leaf at a path, or containers that can't be united; the error names the path.

    Examples:
        >>> merge({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}})
        {'a': 1, 'b': {'c': 2, 'd': 3}}
    """
    return _unite(x1, x2, tuple(key), _check_merge)


def _unite(left: Tree, right: Tree, path: TreePath, check: _Check) -> Tree:
    if left is HOLE or right is HOLE:
        return right if left is HOLE else left
    mine, theirs = entries(left), entries(right)
    if mine is None or theirs is None or not same_kind(left, right):
        raise _conflict(left, right, path)
    check(left, right, path)
    new = {
        entry: _unite(mine[entry], child, (*path, entry), check) if entry in mine else child
        for entry, child in theirs.items()
    }
    return like(left, {**mine, **new})


def _check_merge(left: Tree, right: Tree, path: TreePath) -> None:
    if is_sequence(left) and len(left) != len(right):
        raise _conflict(left, right, path)


def _check_combine(left: Tree, right: Tree, path: TreePath) -> None:
    _check_merge(left, right, path)
    # This is stricter than a merge: parts of one partition have one structure, so a difference is a mistake.
    if type(left) is not type(right) or (entries(left) or {}).keys() != (entries(right) or {}).keys():
        raise _conflict(left, right, path)


def _conflict(left: Tree, right: Tree, path: TreePath) -> TreeError:
    both = entries(left) is None and entries(right) is None
    heading = "both trees have a value" if both else "trees do not fit together"
    fix = "Remove this entry from one tree, for example with `partition`."
    found = f"{describe(left)} and {describe(right)}"
    return TreeError(error_text(f"{heading} at {render_path(path)}", found=found, fix=fix))


# prune: trees without holes.


@refusing_depth
def prune(tree: Tree) -> Tree:
    """Return the tree without its holes, and without the containers that hold nothing else.

    Dicts lose their holes; in a list or tuple holes stay, so that positions don't shift. Containers that were empty
    before stay, and so does the outermost container.

    Examples:
        >>> prune({"a": HOLE, "b": {"c": HOLE}, "d": [{"e": HOLE}, 1], "f": {}})
        {'d': [HOLE, 1], 'f': {}}
    """
    rest, children = _prune(tree), entries(tree)
    if rest is not HOLE or children is None:
        return rest
    return like(tree, {} if is_dict(tree) else dict.fromkeys(children, HOLE))


def _prune(tree: Tree) -> Tree:
    children = entries(tree)
    if children is None:
        return tree
    new = {entry: _prune(child) for entry, child in children.items()}
    if new and all(child is HOLE for child in new.values()):
        return HOLE
    if all(new[entry] is child is not HOLE for entry, child in children.items()):
        return tree
    return like(tree, drop_holes(new) if is_dict(tree) else new)


# select: the wanted leaves.


@refusing_depth
def select(tree: Tree, wanted: Wanted) -> Tree:
    """Return the tree with only the wanted leaves and the containers that hold some.

    Dicts lose all other leaves; in a list or tuple other leaves become holes, so that positions don't shift.

    Args:
        tree: Any tree.
        wanted: Condition for a leaf to stay. A string is a pattern (``*`` matches one part between dots, ``**`` any
            number) and must match a whole shard key or the whole path of a leaf, written with dots. A compiled regular
            expression only needs to match somewhere in the key or path. A function takes path and leaf. A tree of
            booleans may be a prefix of the tree.

    Raises:
        TreeError: A string would match different leaves as a shell pattern, whose ``*`` matches dots too; or a tree of
            booleans isn't a prefix of the tree.
        UnsupportedValue: Shards lie in values that aren't nodes, as in an instance of a class that isn't registered.

    Examples:
        >>> tree = {"model": {"w": 1, "bias": 2}, "groups": [{"lr": 3, "eps": 4}, {"eps": 5}]}
        >>> select(tree, "model.*")
        {'model': {'w': 1, 'bias': 2}}
        >>> select(tree, lambda path, leaf: path[-1] == "lr")
        {'groups': [{'lr': 3}, HOLE]}
    """
    choose = chooser("select", wanted, tree)

    def at(path: TreePath, node: Tree) -> Tree:
        if type(node) in LEAVES:
            return node if call_at(path, choose, path, node) else HOLE
        children = entries(node)
        if children is None:
            if hides_shards(node):
                flatten_visible(tree)  # raises, and names all such leaves
            return node if call_at(path, choose, path, node) else HOLE
        new = {entry: at((*path, entry), child) for entry, child in children.items()}
        if all(child is HOLE for child in new.values()):
            return HOLE
        if all(new[entry] is child for entry, child in children.items()):
            return node
        return like(node, drop_holes(new) if is_dict(node) else new)

    part = at((), tree)
    return like(tree, {}) if part is HOLE and (is_dict(tree) or isinstance(tree, list)) else part


_broadcast_prefix = when_called("core.trees._prefixes:broadcast_prefix")  # a save doesn't need it

_Chooser: TypeAlias = Callable[[TreePath, Any], object]


def chooser(doing: str, wanted: Wanted, tree: Tree, of_function: Callable[[Any], _Chooser] = lambda f: f) -> _Chooser:
    """Return a predicate of (path, leaf) that tells whether a leaf of a tree is wanted.

    Args:
        doing: Name of the public function, for errors.
        wanted: Condition: a pattern of keys, a regular expression, a tree of booleans or a function, as for `select`.
        tree: Tree with the leaves.
        of_function: Function that converts `wanted` to the predicate, if `wanted` is a function; by default `wanted` is
            the predicate itself.

    Raises:
        TreeError: A string is ambiguous, or a tree of booleans isn't a prefix of the tree.
        MetadataError: `wanted` has none of these types.

    Examples:
        >>> tree = {"w": 1, "b": {"c": 2}}
        >>> chooser("select", {"w": False, "b": True}, tree)(("b", "c"), 2), chooser("select", "w", tree)(("w",), 1)
        (True, True)
    """
    if isinstance(wanted, (str, re.Pattern)):
        return _name_chooser(doing, wanted, tree)
    if isinstance(wanted, bool) or entries(wanted) is not None:
        flags = dict(leaves_with_paths(_broadcast_prefix(wanted, tree)))
        others = [
            f"{render_path(path)}: {describe(flag)}" for path, flag in flags.items() if not isinstance(flag, bool)
        ]
        if others:
            raise TreeError(error_text(f"{doing}: not a tree of booleans", expected="booleans", offenders=others))
        return lambda path, _: flags[path]
    check_function(doing, "wanted", wanted, "a string, a pattern or a function, or a tree of booleans")
    return of_function(wanted)


def is_function(wanted: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether a value is a function, and not a callable tree such as a module of Equinox.

    Examples:
        >>> is_function(len), is_function({"w": True})
        (True, False)
    """
    return callable(wanted) and entries(wanted) is None


def _name_chooser(doing: str, wanted: str | re.Pattern[str], tree: Tree) -> _Chooser:
    matches: Callable[[str], object] = key_matcher([wanted]) if isinstance(wanted, str) else wanted.search
    if isinstance(wanted, str):
        names = {name for path, leaf in leaves_with_paths(tree) for name in names_of(path, leaf)}
        differences = shell_differences([wanted], names)
        if differences:
            fix = "Write * for one part between dots, ** for any number; or pass a regular expression or a function."
            raise TreeError(error_text(f"{doing}: ambiguous pattern", offenders=differences, fix=fix))
    return lambda path, leaf: any(map(matches, names_of(path, leaf)))


def names_of(path: TreePath, leaf: Any) -> list[str]:
    """Return the names by which patterns may match a leaf: its path joined by dots and, for a shard, its key.

    Examples:
        >>> names_of(("opt", 0), 1)
        ['opt.0']
    """
    key = path_key(path)
    return [key, leaf.key] if isinstance(leaf, ShardedBase) else [key]
