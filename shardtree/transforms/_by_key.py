"""Functions of leaves that depend on their keys: a map that passes paths, and functions of tensors by pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.geometry import check_type, refuse
from ..core.mapping import ShardedBase
from ..core.trees import check_function, flatten_with_paths, leaves_with_paths, map_shards, match_keys, names_of
from ..errors import MetadataError, TreePath
from ._at import is_tensor, on_tensor


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return a tree of the values that `f` returns: like `map_shards`, but `f` also gets the path of each leaf.

    Args:
        f: A function of a path and one leaf of each tree. Its value replaces the leaf.
        tree: Any tree; shards and None are leaves. `path_key` makes a dotted name of a path.
        rest: Further trees with the structure of `tree`; where it has a leaf, they may have a subtree.

    Raises:
        TreeError: A tree of `rest` doesn't have the structure of `tree`.
        UnsupportedValue: Shards lie in values that aren't nodes, such as instances of unregistered classes.
        MetadataError: `f` isn't a function.
        Exception: An error of `f`, with the leaf's path in a note.

    Examples:
        >>> map_with_path(lambda path, leaf: (path[-1], leaf), {"b": 1, "a": [2, 3]})
        {'b': ('b', 1), 'a': [(0, 2), (1, 3)]}

    References:
        jax.tree.map_with_path.
    """
    check_function("map_with_path", "f", f)
    pairs, rebuild = flatten_with_paths(tree)

    def on_leaf(leaf: Any, *others: Any) -> Any:
        *values, number = others
        return f(pairs[number][0], leaf, *values)

    return map_shards(on_leaf, tree, *rest, rebuild(range(len(pairs))))


def map_by_pattern(functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that applies functions to a tree's tensors, chosen by key; other leaves stay.

    In a tree with shards, the functions get the data of shards and factories, as in `map_data`. Plain tensors of such a
    tree, such as step counters, stay. In any other tree, the functions get the plain tensors.

    Args:
        functions: Functions by pattern of keys. The first pattern that matches a shard's key, or the leaf's path,
            chooses the function. Besides the tensor, this function gets the tensors of further trees at the same path.
            Tensors that no pattern matches stay.

    Raises:
        MetadataError: The argument isn't a mapping of functions.

    Returns:
        A function of a tree, and of further ones with its structure. It raises a TreeError if a pattern matches no
        tensor, or only tensors that earlier patterns match, and a ShapeError if a shard would get another dtype or
        shape.

    Examples:
        >>> import torch
        >>> tree = {"up": {"weight": torch.ones(2), "bias": torch.ones(2)}, "step": 3}
        >>> map_by_pattern({"**.bias": torch.zeros_like, "**": torch.neg})(tree)
        {'up': {'weight': tensor([-1., -1.]), 'bias': tensor([0., 0.])}, 'step': 3}
        >>> decay = map_by_pattern({"**.weight": lambda step, weight: step - 0.5 * weight})
        >>> decay(tree, tree)["up"]["weight"]
        tensor([0.5000, 0.5000])

    References:
        optax.partition; optax.masked.
    """
    fix = 'Pass {pattern: function}, such as {"**.bias": f, "**": g}.'
    check_type("map_by_pattern", "functions", functions, Mapping, fix)
    wrong = [f"{pattern!r}: {type(f).__name__}" for pattern, f in functions.items() if not callable(f)]
    if wrong:
        refuse("map_by_pattern", "functions", ", ".join(wrong), "functions of tensors", fix, error=MetadataError)

    def on_tree(tree: Any, *rest: Any) -> Any:
        chosen = _chosen(functions, tree)

        def on_leaf(path: TreePath, leaf: Any, *others: Any) -> Any:
            return on_tensor(chosen[path], leaf, *others) if path in chosen else leaf

        return map_with_path(on_leaf, tree, *rest)

    return on_tree


def _chosen(functions: Mapping[str, Callable[..., Any]], tree: Any) -> dict[TreePath, Callable[..., Any]]:
    """Return the function of each tensor that a pattern matches, by path."""
    leaves = leaves_with_paths(tree)
    has_shards = any(isinstance(leaf, ShardedBase) for _, leaf in leaves)
    names = {
        path: names_of(path, leaf)
        for path, leaf in leaves
        if is_tensor(leaf) and isinstance(leaf, ShardedBase) is has_shards
    }
    matches = match_keys("map_by_pattern", functions, [name for both in names.values() for name in both])
    order = {pattern: number for number, pattern in enumerate(functions)}
    patterns = {path: [matches[name][0] for name in both if name in matches] for path, both in names.items()}
    return {path: functions[min(fitting, key=order.__getitem__)] for path, fitting in patterns.items() if fitting}
