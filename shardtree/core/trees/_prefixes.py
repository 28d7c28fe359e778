"""Prefixes of trees, such as specs, labels and predicates: a value at a path applies to all leaves below that path."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from ...errors import TreeError, TreePath, error_text, render_path
from ._nodes import Field, Tree, entries, flatten_with_paths, refusing_depth


@refusing_depth
def broadcast_prefix(prefix: Tree, tree: Tree) -> Tree:
    """Return a tree with the structure of `tree`, in which each leaf is the prefix's value at or above its path.

    Containers of the prefix may be of other classes than the tree's: only their entries or field names matter.

    Args:
        prefix: A single value, or a tree whose leaves are at paths that `tree` has too. None is a value.
        tree: Tree with the structure of the result; its shards are leaves.

    Raises:
        TreeError: A path of the prefix isn't in the tree, or a leaf gets no value; the error names all of these.

    Examples:
        >>> broadcast_prefix({"model": "decay", "step": None}, {"model": {"w": 1.0, "b": [2.0, 3.0]}, "step": 4})
        {'model': {'w': 'decay', 'b': ['decay', 'decay']}, 'step': None}

    References:
        `in_axes` of jax.vmap; jax.tree_util.tree_broadcast.
    """
    placed = [*prefix_places(prefix, tree)]
    values = {place: value for _, place, value in placed if place is not None}
    pairs, rebuild = flatten_with_paths(tree)
    nearest = [place_above(path, values) for path, _ in pairs]
    wrong = [f"{render_path(path, 'prefix')}: not in the tree" for path, place, _ in placed if place is None]
    wrong += [
        f"{render_path(path)}: without a value"
        for (path, _), place in zip(pairs, nearest, strict=True)
        if place is None
    ]
    if wrong:
        fix = "Give one value at, or above, each leaf of the tree."
        raise TreeError(error_text("broadcast_prefix: not a prefix of the tree", offenders=wrong, fix=fix))
    return rebuild([values[place] for place in nearest if place is not None])


def place_above(path: TreePath, places: Container[TreePath]) -> TreePath | None:
    """Return the shortest prefix of a path, perhaps the whole path, that is in `places`; None if there is none.

    Examples:
        >>> place_above(("model", "w"), [("model",), ("step",)])
        ('model',)
    """
    # Values are leaves of the prefix, so at most one path above a leaf has a value.
    return next((path[:depth] for depth in range(len(path) + 1) if path[:depth] in places), None)


def prefix_places(
    prefix: Tree, tree: Tree, path: TreePath = (), place: TreePath | None = ()
) -> Iterator[tuple[TreePath, TreePath | None, Any]]:
    """Yield (path in the prefix, path in the tree, value) for each leaf of a prefix; the value is the leaf.

    The path in the tree is None if the tree has no such path.

    Args:
        prefix: Prefix of the tree. Containers may be of other classes than the tree's: only their entries or field
            names matter.
        tree: The tree; ignored if `place` is None.
        path: Start of all yielded paths in the prefix: the path of `prefix` in a larger one.
        place: Start of all yielded paths in the tree: the path of `tree` in a larger one; None if that has no
            such path.

    Examples:
        >>> [*prefix_places({"a": 1, "c": 2}, {"a": [3, 4], "b": 5})]
        [(('a',), ('a',), 1), (('c',), None, 2)]
    """
    children = entries(prefix)
    if children is None:
        yield path, place, prefix
        return
    remaining = {} if place is None else dict(entries(tree) or {})
    fields = {entry.name: entry for entry in remaining if isinstance(entry, Field)}
    for entry, child in children.items():
        name = entry.name if isinstance(entry, Field) else entry
        key = entry if entry in remaining else fields.get(name, name)
        below = (*place, key) if place is not None and key in remaining else None
        # The entry is removed, so that a position and a name can't give a value to the same field.
        yield from prefix_places(child, remaining.pop(key, None), (*path, entry), below)
