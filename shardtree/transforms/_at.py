"""Replacement of single nodes of a tree, chosen by a pattern, a path, or a function that returns nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from ..core.lazy import LazyTensor
from ..core.mapping import ShardedTensor, ShardedTensorFactory
from ..core.trees import (
    call_at,
    chooser,
    deepest,
    entries,
    flatten_visible,
    flatten_with_paths,
    is_function,
    leaves_with_paths,
    like,
    map_data,
    map_sharing,
    names_of,
    near_patterns,
    place_above,
    refusing_depth,
    with_data,
)
from ..errors import TreeError, TreePath, error_text, render_path, shorten

SameTree = TypeVar("SameTree")
Where: TypeAlias = str | re.Pattern[str] | TreePath | Callable[[Any], Any] | Any
"""Nodes of a tree: a pattern of keys, a regular expression, a path, a tree of booleans, or a function of the tree."""

_BOXED: Final = (ShardedTensor, ShardedTensorFactory)


@refusing_depth
def tree_at(tree: Any, where: Where, replace: Any) -> Any:
    """Return the tree with some nodes replaced; all other subtrees are shared.

    Args:
        tree: Any tree; it may be a leaf. Shards are leaves.
        where: Nodes to replace. A text is a pattern of keys, and a compiled regular expression is searched in keys, as
            in `select`; both choose leaves. A tuple is the path of one leaf or subtree. A function gets the tree with
            placeholders as leaves, and returns a node of it, or a list or tuple of nodes:
            ``lambda tree: tree["model"].layers[0]``. A tree of booleans chooses leaves; one boolean may stand for a
            whole subtree.
        replace: New value of any kind, or a function from the old value to the new one. If `where` returns several
            nodes, a list with a value for each of them, or a function.

    Raises:
        TreeError: No node is found, a chosen node is inside another one, or the number of values is wrong.
        UnsupportedValue: Shards lie in values that aren't nodes, such as instances of unregistered classes.

    Examples:
        >>> tree = {"model": {"w": 1, "b": [2, 3]}, "step": 4}
        >>> tree_at(tree, "model.b.*", lambda leaf: leaf * 10)
        {'model': {'w': 1, 'b': [20, 30]}, 'step': 4}
        >>> tree_at(tree, lambda tree: tree["model"]["b"], 0) == tree_at(tree, ("model", "b"), 0)
        True
        >>> tree_at(tree, ("model", "bias"), 0)
        Traceback (most recent call last):
        shardtree.errors.TreeError: tree_at: `where` does not fit the tree
          not in the tree: tree['model']['bias']
          found 'w', 'b' in tree['model']
          Correct the path, pattern or function.

    References:
        equinox.tree_at.
    """
    places, several = _places("tree_at", tree, where)
    if callable(replace):
        return _edited(tree, dict.fromkeys(places, replace))
    values = replace if several else [replace] * len(places)
    if not isinstance(values, (list, tuple)) or len(values) != len(places):
        found = f"a {type(values).__name__}" + (f" of {len(values)}" if isinstance(values, (list, tuple)) else "")
        expected, fix = f"a list of {len(places)}", "Pass one value for each node, or one function for all nodes."
        raise TreeError(error_text("tree_at: values do not match the nodes", found=found, expected=expected, fix=fix))
    return _edited(tree, {place: partial(_constant, value) for place, value in zip(places, values, strict=True)})


def _constant(value: Any, _: Any) -> Any:
    return value


@refusing_depth
def data_at(tree: SameTree, where: Where, data: Any) -> SameTree:
    """Return the tree with some tensors replaced: plain ones, and the data of shards and factories.

    Chosen leaves that aren't tensors stay. Shards keep their metadata, including dtype and shape.

    Args:
        tree: Any tree; its other leaves and subtrees are shared.
        where: Nodes, as for `tree_at`. In a subtree, every tensor is replaced.
        data: New tensor, or a function from the old tensor to it. The function isn't called for shards without data.

    Raises:
        TreeError: No node is found, or none of the nodes contains a tensor.
        UnsupportedValue: Shards lie in values that aren't nodes, such as instances of unregistered classes.
        ShapeError: A shard's tensor would have another dtype or shape.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> tree = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 3}
        >>> data_at(tree, "w", torch.zeros_like)["w"].data
        tensor([0., 0.])
        >>> data_at(tree, lambda tree: tree["w"], torch.arange(2.0))["w"].data
        tensor([0., 1.])
    """
    places, _ = _places("data_at", tree, where)
    changed: list[Any] = []

    def on_leaf(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        changed.append(leaf)
        if not isinstance(leaf, _BOXED):
            return data(leaf) if callable(data) else data
        if not callable(data):
            return with_data(leaf, data, "data_at")
        return leaf if leaf.data is None else with_data(leaf, data(leaf.data), "data_at")

    result: SameTree = _edited(tree, dict.fromkeys(places, partial(map_sharing, on_leaf)))
    if not changed:
        offenders, fix = [render_path(place) for place in places], "Use `tree_at` for other values."
        raise TreeError(error_text("data_at: no tensor at these paths", offenders=offenders, fix=fix))
    return result


def is_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or a shard or factory of one.

    Examples:
        >>> is_tensor(torch.ones(2)), is_tensor(3)
        (True, False)
    """
    return isinstance(leaf, (*_BOXED, torch.Tensor, LazyTensor))


def on_tensor(f: Callable[..., Any], leaf: Any, *others: Any) -> Any:
    """Return a leaf with a function applied to its tensor; the function also gets the tensors of the other leaves.

    Examples:
        >>> on_tensor(torch.add, torch.ones(2), ShardedTensor.from_rank_offsets("w", torch.ones(2)))
        tensor([2., 2.])
    """
    if isinstance(leaf, _BOXED):
        return map_data(f, leaf, *others)
    return f(leaf, *(other.data if isinstance(other, _BOXED) else other for other in others))


def _edited(tree: Any, edits: Mapping[TreePath, Callable[[Any], Any]]) -> Any:
    """Return a tree with functions applied to the nodes at some paths; all other subtrees are shared."""
    around = {place[:depth] for place in edits for depth in range(len(place))}

    def at(path: TreePath, node: Any) -> Any:
        if path in edits:
            return call_at(path, edits[path], node)
        if path not in around:
            return node
        children = entries(node) or {}
        new = {entry: at((*path, entry), child) for entry, child in children.items()}
        return node if all(new[entry] is child for entry, child in children.items()) else like(node, new)

    return at((), tree)


# Paths of the chosen nodes.


def _places(doing: str, tree: Any, where: Where) -> tuple[list[TreePath], bool]:
    """Return the paths of the chosen nodes, and whether `where` is a function that returned several nodes."""
    flatten_visible(tree)  # raises where shards lie in values that aren't nodes
    if isinstance(where, tuple):
        return [_checked_path(doing, tree, where)], False
    if is_function(where):
        return _marked_places(doing, tree, where)
    fits, leaves = chooser(doing, where, tree), leaves_with_paths(tree)
    places = [path for path, leaf in leaves if fits(path, leaf)]
    if not places:
        names = {name for path, leaf in leaves for name in names_of(path, leaf)}
        text = where if isinstance(where, str) else repr(where)
        raise _missing(doing, near_patterns([text], names), shorten([repr(name) for name in sorted(names)], shown=5))
    return places, False


def _checked_path(doing: str, tree: Any, path: TreePath) -> TreePath:
    node, depth = deepest(tree, path)
    if depth == len(path):
        return path
    names = [repr(str(entry) if isinstance(entry, str) else entry) for entry in entries(node) or ()]
    found = shorten(names, shown=5) or [f"a {type(node).__name__}"]
    raise _missing(doing, [render_path(path[: depth + 1])], found, f" in {render_path(path[:depth])}" * bool(names))


def _missing(doing: str, offenders: Sequence[str], found: Sequence[str], inside: str = "") -> TreeError:
    fix = "Correct the path, pattern or function."
    heading, lines = f"{doing}: `where` does not fit the tree", [f"not in the tree: {text}" for text in offenders]
    return TreeError(error_text(heading, found=f"{', '.join(found) or 'nothing'}{inside}", offenders=lines, fix=fix))


class _Mark:
    """A placeholder for a leaf, unique so that it can be found by identity: equal leaves may be the same object."""


def _marked_places(doing: str, tree: Any, where: Callable[[Any], Any]) -> tuple[list[TreePath], bool]:
    """Return the paths of the nodes that `where` returns, and whether it returns a list or tuple of nodes.

    The function gets the tree with placeholders as leaves.
    """
    pairs, rebuild = flatten_with_paths(tree)
    marked = rebuild([_Mark() for _ in pairs])
    paths = {id(node): path for path, node in _nodes((), marked)}
    try:
        wanted = where(marked)
    except (AttributeError, LookupError, TypeError) as error:
        text = f"{type(error).__name__}: {error}".replace("'_Mark' object", "a leaf")
        raise _missing(doing, [f"the node that the function looks up ({text})"], ["a tree with leaves"]) from error
    several = id(wanted) not in paths and isinstance(wanted, (list, tuple))
    nodes = wanted if several else [wanted]
    strangers = [node for node in nodes if id(node) not in paths]
    if strangers or not nodes:
        names = [f"a {type(node).__name__}, which is no node of the tree" for node in strangers] or ["no node at all"]
        raise _missing(doing, [f"the function's result: {name}" for name in names], ["a tree with leaves"])
    places = [paths[id(node)] for node in nodes]
    nested = [render_path(place) for place in places if place and place_above(place[:-1], places) is not None]
    if nested:
        raise TreeError(
            error_text(
                f"{doing}: chosen nodes lie in other chosen nodes", offenders=nested, fix="Choose only the outer nodes."
            )
        )
    return places, several


def _nodes(path: TreePath, node: Any) -> Iterator[tuple[TreePath, Any]]:
    if node != ():  # all empty tuples are one object, so identity can't tell them apart
        yield path, node
    for entry, child in (entries(node) or {}).items():
        yield from _nodes((*path, entry), child)
