"""Trees put together: combine fills holes in trees of one structure, merge unites the entries of two trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from ..errors import TreeError, TreePath, error_text, render_path
from ._hole import HOLE
from ._nodes import Tree, depth_error, describe, entries, is_sequence, like, same_kind

_Check = Callable[[Tree, Tree, TreePath], None]


def combine(*trees: Tree) -> Tree:
    """Return the one tree that parts with holes make together; the inverse of `partition`.

    Where every part has a hole, the whole has one. A part may hold a subtree where the others have a hole.

    Args:
        trees: trees of the same structure, where each place is filled in at most one of them.

    Raises:
        TreeError: a place is filled twice, or the structures differ; the path is named.

    Examples:
        >>> combine({"a": 1, "b": [HOLE, 3]}, {"a": HOLE, "b": [2, HOLE]})
        {'a': 1, 'b': [2, 3]}
    """
    return reduce(lambda left, right: _united(left, right, (), _check_combine), trees, HOLE)


def merge(x1: Tree, x2: Tree, key: TreePath = ()) -> Tree:
    """Return the union of two trees: dicts by key, lists and tuples of equal length by position.

    Containers are of the first tree's type, in its order, then the second tree's new keys. What only one tree holds is
    shared. A hole is filled by what the other tree has.

    Args:
        x1: any tree.
        x2: what is added to it.
        key: where the two are in a larger tree, for errors.

    Raises:
        TreeError: both trees have a leaf at a path, or containers that can't be united; the path is named.

    Examples:
        >>> merge({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}})
        {'a': 1, 'b': {'c': 2, 'd': 3}}
    """
    return _united(x1, x2, tuple(key), _check_merge)


def _united(left: Tree, right: Tree, path: TreePath, check: _Check) -> Tree:
    try:
        return _unite(left, right, path, check)
    except RecursionError as error:
        raise depth_error(error, left, right) from None


def _unite(left: Tree, right: Tree, path: TreePath, check: _Check) -> Tree:
    if left is HOLE or right is HOLE:
        return right if left is HOLE else left
    mine, theirs = entries(left), entries(right)
    if mine is None or theirs is None or not same_kind(left, right):
        raise _conflict(left, right, path)
    check(left, right, path)
    return like(left, {**mine, **_new_entries(mine, theirs, path, check)})


def _new_entries(
    mine: Mapping[Any, Tree], theirs: Mapping[Any, Tree], path: TreePath, check: _Check
) -> dict[Any, Tree]:
    return {
        entry: _unite(mine[entry], child, (*path, entry), check) if entry in mine else child
        for entry, child in theirs.items()
    }


def _check_merge(left: Tree, right: Tree, path: TreePath) -> None:
    if is_sequence(left) and len(left) != len(right):
        raise _conflict(left, right, path)


def _check_combine(left: Tree, right: Tree, path: TreePath) -> None:
    _check_merge(left, right, path)
    if type(left) is not type(right) or (entries(left) or {}).keys() != (entries(right) or {}).keys():
        raise _conflict(left, right, path)


def _conflict(left: Tree, right: Tree, path: TreePath) -> TreeError:
    both = entries(left) is None and entries(right) is None
    what = "both trees have a value" if both else "trees don't fit together"
    fix = "Take it out of one of them, with `partition` for one."
    found = f"{describe(left)} and {describe(right)}"
    return TreeError(error_text(f"{what} at {render_path(path)}", found=found, fix=fix))
