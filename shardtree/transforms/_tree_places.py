"""Trees flattened into leaves with paths, and rebuilt from leaves at new paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..core.lazy import LazyTensor
from ..core.mapping import ShardedBase
from ..core.trees import (
    HOLE,
    Tree,
    entries,
    fields_of,
    flatten_visible,
    hides_shards,
    is_dict,
    is_sequence,
    like,
    refusing_depth,
)
from ..errors import TreeError, TreePath, error_text, render_path

_TENSORS: Final = (ShardedBase, torch.Tensor, LazyTensor)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """A tree, flattened.

    Attributes:
        leaves: Leaves by path, in the tree's own order.
        containers: Containers above the leaves by path, including the tree itself.
        is_flat: Whether the tree is a dict with all of its tensors as direct values.
    """

    leaves: Mapping[TreePath, Any]
    containers: Mapping[TreePath, Tree]
    is_flat: bool


@refusing_depth
def places(tree: Tree) -> Places:
    """Return the leaves of a tree by path, and the containers above them.

    Dicts are always flattened, other containers only if they contain a tensor: a list of plain values is one leaf, and
    so is each empty container. The tree itself is always flattened.

    Raises:
        UnsupportedValue: Shards lie in values that aren't nodes, such as instances of unregistered classes.

    Examples:
        >>> list(places({"layers": [{"w": torch.ones(2)}], "betas": [0.9, 0.95]}).leaves)
        [('layers', 0, 'w'), ('betas',)]
    """
    containers: dict[TreePath, Tree] = {(): tree}
    leaves = dict(_leaves((), tree, containers))
    if hides_shards(*leaves.values()):
        flatten_visible(tree)  # raises, and names all such leaves
    above = {path[:-1] for path, leaf in leaves.items() if isinstance(leaf, _TENSORS)}
    return Places(leaves, containers, is_dict(tree) and above <= {()})


def _leaves(path: TreePath, node: Tree, containers: dict[TreePath, Tree]) -> list[tuple[TreePath, Any]]:
    """Return the leaves of a node; add the flattened containers to the dict."""
    children = entries(node)
    if not children:
        return [(path, node)] if path or children is None else []
    below: dict[TreePath, Tree] = {}
    pairs = [pair for entry, child in children.items() for pair in _leaves((*path, entry), child, below)]
    if path and not is_dict(node) and not any(isinstance(leaf, _TENSORS) for _, leaf in pairs):
        return [(path, node)]
    containers |= {path: node, **below}
    return pairs


def named_paths(doing: str, tree: Places, separator: str = ".") -> dict[str, TreePath]:
    """Return the paths of a tree's leaves by name; a name is the path's entries, joined by the separator.

    Raises:
        TreeError: Two leaves have one name.

    Examples:
        >>> named_paths("flat", places({"h": {"0": 1}}), "/")
        {'h/0': ('h', '0')}
    """
    paths: dict[str, list[TreePath]] = {}
    for path in tree.leaves:
        paths.setdefault(separator.join(map(str, path)), []).append(path)
    twice = [f"{name!r}: {', '.join(map(render_path, those))}" for name, those in paths.items() if len(those) > 1]
    if twice:
        fix = "Rename one of them."
        raise TreeError(error_text(f"{doing}: two values would have one name", offenders=twice, fix=fix))
    return {name: path for name, (path,) in paths.items()}


# The way back: each leaf determines the containers around it.


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The path of a leaf in a new tree, and the containers around it.

    Attributes:
        path: Path of the leaf.
        kinds: For each entry of the path, an old container whose type the new container gets; None for a dict.
        is_old: Whether the leaf stays at its old path. Then its containers' types override those of moved leaves.
    """

    path: TreePath
    kinds: tuple[Tree | None, ...]
    is_old: bool


def kept_place(tree: Places, path: TreePath) -> Place:
    """Return the path of a leaf that doesn't move, with the containers around it, as a `Place`.

    Examples:
        >>> kept_place(places({"h": [torch.ones(2)]}), ("h", 0)).path
        ('h', 0)
    """
    return Place(path, tuple(tree.containers[path[:depth]] for depth in range(len(path))), is_old=True)


def moved_place(tree: Places, path: TreePath, name: str) -> Place:
    """Return the new path of a renamed leaf, with containers like the old ones around it, as a `Place`.

    If the new path is as long as the old one, its containers have the same types. Otherwise the first and last entries
    that both paths share keep their containers, and containers added between them are dicts.

    Args:
        tree: The old tree.
        path: The leaf's old path.
        name: The leaf's new name: the entries of its new path, joined by dots.

    Examples:
        >>> tree = places({"h": [{"w": torch.ones(2)}, {"w": torch.ones(2)}]})
        >>> moved_place(tree, ("h", 1, "w"), "h.0.w").path, moved_place(tree, ("h", 1, "w"), "h.w").path
        (('h', 0, 'w'), ('h', 'w'))
    """
    if tree.is_flat and len(path) == 1:
        return Place((name,), (tree.containers[()],), is_old=False)
    front, behind, between = _differing(path, name)
    around = [tree.containers[path[:depth]] for depth in range(len(path))]
    at, after = around[:front], around[len(path) - behind :]
    old = around[front : len(path) - behind]
    if len(old) == len(between):
        inner: list[Tree | None] = [*old]
    else:
        # New entries go into the container that had the replaced ones. If none is replaced, as where a layer number is
        # inserted, only a dict can take them; around the fields of a class there is a new dict.
        host = tree.containers.get(path[:front])
        inner = [host if old or is_dict(host) else None, *[None] * (len(between) - 1)][: len(between)]
    return Place((*path[:front], *between, *path[len(path) - behind :]), (*at, *inner, *after), is_old=False)


def _differing(path: TreePath, name: str) -> tuple[int, int, TreePath]:
    """Compare a leaf's old path with its new name, whose entries are joined by dots.

    Returns:
        The number of leading entries that both have, the number of trailing entries that both have, and the new path's
        entries between these.
    """
    between, front, behind = f".{name}", 0, 0
    # The end is matched first: behind a layer number there may be another number, which stays.
    while behind < len(path) and between.endswith(end := f".{path[-1 - behind]}"):
        between, behind = between.removesuffix(end), behind + 1
    while front < len(path) - behind and f"{between}.".startswith(start := f".{path[front]}."):
        between, front = between.removeprefix(start[:-1]), front + 1
    old = path[front : len(path) - behind]
    if not between:
        return front, behind, ()
    if len(old) == 1 and "." in str(old[0]):
        return front, behind, (between[1:],)
    parts = between[1:].split(".")
    if len(parts) != len(old):
        return front, behind, tuple(parts)
    # An entry that was an integer stays an integer.
    pairs = zip(parts, old, strict=True)
    return (
        front,
        behind,
        tuple(int(part) if isinstance(entry, int) and part.isdecimal() else part for part, entry in pairs),
    )


@dataclass(slots=True, eq=False)
class _Node:
    kind: Tree | None = None
    is_old: bool = False
    children: dict[Any, Any] = field(default_factory=dict)


@refusing_depth
def planted(doing: str, tree: Tree, leaves: Iterable[tuple[Place, Any]]) -> Tree:
    """Build a tree from leaves and their places; containers that would have no leaf are left out.

    A list or tuple ends at the largest index of its leaves. Missing indices get `HOLE`, as in `select`, and so do
    missing fields of a class or named tuple. Every container is new, as with `map_shards`.

    Args:
        doing: Name of the transform in error messages.
        tree: The tree of the old leaves; if no leaf is left, an empty one of its kind is returned.
        leaves: Leaves with their places.

    Raises:
        TreeError: Two leaves have the same path, one is under another, or a container can't have such an entry.

    Examples:
        >>> tree = {"layers": [1, 2], "step": 3}
        >>> planted("keep", tree, [(Place(("layers", 0), (tree, tree["layers"]), is_old=False), 2)])
        {'layers': [2]}
    """
    root = _Node(tree)
    for place, leaf in leaves:
        _plant(doing, root, place, leaf)
    return _built(doing, root, ())


def _plant(doing: str, root: _Node, place: Place, leaf: Any) -> None:
    node, last = root, len(place.path) - 1
    for depth, (entry, kind) in enumerate(zip(place.path, place.kinds, strict=True)):
        if node is not root and (not node.children or (place.is_old and not node.is_old)):
            node.kind, node.is_old = kind, place.is_old
        child = node.children.get(entry)
        is_taken = entry in node.children and (depth == last or not isinstance(child, _Node))
        if is_taken:
            heading = f"{doing}: in the result, two values would have the same path, or one would lie under the other"
            fix = "Pass a flat dict {shard.key: shard} instead of this tree."
            raise TreeError(error_text(heading, found=render_path(place.path[: depth + 1]), fix=fix))
        if depth == last:
            node.children[entry] = leaf
        else:
            node = node.children.setdefault(entry, _Node())


def _built(doing: str, node: _Node, path: TreePath) -> Tree:
    children = {
        entry: _built(doing, child, (*path, entry)) if isinstance(child, _Node) else child
        for entry, child in node.children.items()
    }
    kind = node.kind
    if kind is None:
        return children
    old = entries(kind) or {}
    if len(old) == len(children) and all(entry in old and old[entry] is child for entry, child in children.items()):
        new = like(kind, {entry: children[entry] for entry in old})
        return new if type(new) is type(kind) else kind  # other tree maps treat such a class, e.g. Counter, as a value
    if is_dict(kind):
        return like(kind, children)
    wanted: Iterable[Any] = old
    if is_sequence(kind) and not fields_of(type(kind)):
        wanted = range(1 + max((entry for entry in children if isinstance(entry, int)), default=-1))
    if others := [entry for entry in children if entry not in wanted]:
        heading = f"{doing}: the result would have entries that a {type(kind).__name__} cannot have"
        fix = "Convert the tree to dicts first: `st.trees.nested(st.trees.flat(tree))`."
        raise TreeError(error_text(heading, offenders=[render_path((*path, entry)) for entry in others], fix=fix))
    return like(kind, {entry: children.get(entry, HOLE) for entry in wanted})
