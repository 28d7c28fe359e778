"""Look-up of a load target's paths in a stored tree, or in the loaded tree, which `join` made of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...errors import TreePath
from ._join import Record, stored_entries
from ._nodes import Tree


def deepest(tree: Tree, path: TreePath) -> tuple[Tree, int]:
    """Follow a path through a tree as far as possible; return the last node, and the number of entries followed.

    Args:
        tree: Stored common tree, or the result of `join`.
        path: Path of a target's leaf. A position in the path also leads to a field of a stored `Record`.

    Examples:
        >>> from shardtree.trees import HOLE
        >>> deepest({"model": HOLE}, ("model", "w")), deepest({"step": [3]}, ("step", 0))
        ((HOLE, 1), (3, 2))
    """
    for depth, entry in enumerate(path):
        children = stored_entries(tree)
        if isinstance(tree, Record) and isinstance(entry, int) and entry < len(tree.fields):
            entry = [*tree.fields][entry]
        if children is None or entry not in children:
            return tree, depth
        tree = children[entry]
    return tree, len(path)


def nodes_at(tree: Tree, paths: Iterable[TreePath]) -> dict[TreePath, Tree]:
    """Return every node of a tree on the way to any of the given paths, by the node's own path.

    The time is linear in the sizes of containers and paths.

    Args:
        tree: Stored common tree, or the result of `join`.
        paths: Paths of a target's leaves; entries that the tree lacks are left out.

    Examples:
        >>> nodes_at({"step": [3, 4]}, [("step", 1), ("lr",)])
        {(): {'step': [3, 4]}, ('step',): [3, 4], ('step', 1): 4}
    """
    nodes, inside = {(): tree}, dict[TreePath, Mapping[Any, Tree]]()
    for path in paths:
        for depth, entry in enumerate(path):
            above, here = path[:depth], path[: depth + 1]
            if above not in inside:
                inside[above] = _entries_and_positions(nodes[above])
            if entry not in inside[above]:
                break
            nodes.setdefault(here, inside[above][entry])
    return nodes


def _entries_and_positions(node: Tree) -> Mapping[Any, Tree]:
    children = stored_entries(node) or {}
    return {**children, **dict(enumerate(children.values()))} if isinstance(node, Record) else children


def unfilled(tree: Tree, plain: Iterable[tuple[TreePath, Any]]) -> list[TreePath]:
    """Return the paths of a target's plain tensors that got no value, or only a container.

    Args:
        tree: Loaded tree: the result of `join` for a stored tree and the target.
        plain: Path and leaf of each plain tensor of the target.

    Examples:
        >>> unfilled({"state": {}, "step": 3}, [(("state",), torch.zeros(2)), (("step",), torch.zeros(()))])
        [('state',)]
    """
    places = [*plain]
    nodes = nodes_at(tree, (path for path, _ in places))
    return [
        path
        for path, leaf in places
        if path not in nodes or (isinstance(leaf, torch.Tensor) and stored_entries(nodes[path]) is not None)
    ]
