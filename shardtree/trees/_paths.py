"""A tree as a flat list of leaves with their paths, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import TreeError, TreePath, error_text
from ._nodes import Tree, flatten


def path_key(path: TreePath) -> str:
    """Return a path's entries joined by dots: the key of what stands there.

    Examples:
        >>> path_key(("layers", 0, "weight"))
        'layers.0.weight'
    """
    return ".".join(map(str, path))


def leaves_with_paths(tree: Tree) -> list[tuple[TreePath, Any]]:
    """Return a tree's leaves, shards among them, each with the path that reaches it.

    Examples:
        >>> leaves_with_paths({"model": [1, None]})
        [(('model', 0), 1), (('model', 1), None)]
    """
    return shard_leaves(tree)[0]


def shard_leaves(tree: Tree) -> tuple[list[tuple[TreePath, Any]], Callable[[Sequence[Any]], Tree]]:
    """Return a tree's leaves with paths, and the function that makes a tree of this structure from other leaves.

    Args:
        tree: any tree. Shards, factories, objects and None are leaves.

    Returns:
        The pairs of path and leaf in the order of sorted dict keys, and `rebuild(leaves)`, which takes as many leaves
        in the same order and returns new containers that keep each dict's own order.

    Raises:
        TreeError: `rebuild` got more or fewer leaves than there are places.

    Examples:
        >>> pairs, rebuild = shard_leaves({"b": 1, "a": (2, 3)})
        >>> rebuild([leaf * 10 for _, leaf in pairs])
        {'b': 10, 'a': (20, 30)}
    """
    leaves, spec = flatten(tree)

    def rebuild(new: Sequence[Any]) -> Tree:
        if len(new) != spec.num_leaves:
            raise TreeError(error_text("rebuild: wrong number of leaves", found=len(new), expected=spec.num_leaves))
        return spec.unflatten(new)

    return list(zip(spec.paths(), leaves, strict=True)), rebuild
