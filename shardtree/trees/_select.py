"""A tree cut down to the leaves that are wanted."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from ..errors import TreePath
from ..mapping import ShardedBase
from ._hole import HOLE
from ._nodes import Tree, call_at, check_function, depth_error, entries, like
from ._paths import path_key

Wanted: TypeAlias = str | re.Pattern[str] | Callable[[TreePath, Any], object]


def select(tree: Tree, wanted: Wanted) -> Tree:
    """Return the tree with only the leaves that are wanted, and only the containers that hold some.

    The rest is left out of dicts; in a list or tuple it becomes a hole, so that positions don't shift.

    Args:
        tree: any tree.
        wanted: what to keep. A text is a glob (``*``, ``?``, ``[seq]``) and must match a whole shard key or the whole
            path of a leaf, written with dots; a compiled regular expression need only be found in one of them; a
            function takes path and leaf.

    Examples:
        >>> tree = {"model": {"w": 1, "bias": 2}, "groups": [{"lr": 3, "eps": 4}, {"eps": 5}]}
        >>> select(tree, "model.*")
        {'model': {'w': 1, 'bias': 2}}
        >>> select(tree, lambda path, leaf: path[-1] == "lr")
        {'groups': [{'lr': 3}, HOLE]}
    """
    try:
        chosen = _select(tree, (), _chooser(wanted))
    except RecursionError as error:
        raise depth_error(error, tree) from None
    return like(tree, {}) if chosen is HOLE and isinstance(tree, (dict, list)) else chosen


def _select(tree: Tree, path: TreePath, choose: Callable[[TreePath, Any], object]) -> Tree:
    children = entries(tree)
    if children is None:
        return tree if call_at(path, choose, path, tree) else HOLE
    new = {entry: _select(child, (*path, entry), choose) for entry, child in children.items()}
    if all(child is HOLE for child in new.values()):
        return HOLE
    if all(new[entry] is child for entry, child in children.items()):
        return tree
    kept = {entry: child for entry, child in new.items() if child is not HOLE}
    return like(tree, kept if isinstance(tree, dict) else new)


def _chooser(wanted: Wanted) -> Callable[[TreePath, Any], object]:
    if not isinstance(wanted, (str, re.Pattern)):
        check_function("select", "wanted", wanted, "a text, a pattern or a function")
        return wanted
    found = re.compile(fnmatch.translate(wanted)).match if isinstance(wanted, str) else wanted.search
    return lambda path, leaf: any(map(found, _names(path, leaf)))


def _names(path: TreePath, leaf: Any) -> list[str]:
    key = path_key(path)
    return [key, leaf.key] if isinstance(leaf, ShardedBase) else [key]
