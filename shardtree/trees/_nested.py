"""Nested dicts as flat ones, whose names are the paths, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import TreeError, TreePath, error_text, render_path
from ..mapping import ShardedBase
from ._nodes import Tree, depth_error, describe, entries


def flat(tree: Mapping[str, Any], *, separator: str = ".") -> dict[str, Any]:
    """Return nested dicts as one dict, in which names are joined by dots; undone by `nested`.

    What isn't a dict is a value and stays as it is, a list of plain values too, and so does an empty dict. Names that
    have dots are taken apart further by `nested`; where none has, it gives back the same tree.

    Args:
        tree: nested dicts with texts as keys.
        separator: between names.

    Raises:
        TreeError: it isn't a dict, a key isn't a text, two values would have one name, or shards are in a list or
            another container that isn't a dict, where functions of flat trees wouldn't find them.

    Examples:
        >>> flat({"model": {"layers": {"0": {"w": 1}, "1": {"w": 2}}}, "betas": [0.9, 0.95]})
        {'model.layers.0.w': 1, 'model.layers.1.w': 2, 'betas': [0.9, 0.95]}

    References:
        `flax.traverse_util.flatten_dict`.
    """
    if not isinstance(tree, Mapping):
        raise TreeError(error_text("flat: not nested dicts", found=describe(tree), expected="a dict"))
    try:
        pairs = [pair for key, child in tree.items() for pair in _values((key,), child)]
        wrong = [problem for path, leaf in pairs if (problem := _problem(path, leaf)) is not None]
    except RecursionError as error:
        raise depth_error(error, dict(tree)) from None
    if wrong:
        fix = "Use dicts with texts as keys, {str(n): layer for n, layer in enumerate(layers)}; states go by names."
        raise TreeError(error_text("flat: what `nested` couldn't undo", offenders=wrong, fix=fix))
    found: dict[str, list[TreePath]] = {}
    for path, _ in pairs:
        found.setdefault(separator.join(path), []).append(path)
    twice = [f"{name!r}: {', '.join(map(render_path, paths))}" for name, paths in found.items() if len(paths) > 1]
    if twice:
        raise TreeError(error_text("flat: two values would have one name", offenders=twice, fix="Rename one of them."))
    return {separator.join(path): leaf for path, leaf in pairs}


def _values(path: TreePath, node: Tree) -> Iterator[tuple[TreePath, Any]]:
    """Yield what isn't a dict with its path, and empty dicts, which would get lost."""
    if not isinstance(node, dict) or not node:
        yield path, node
        return
    for key, child in node.items():
        yield from _values((*path, key), child)


def _problem(path: TreePath, leaf: Any) -> str | None:
    if not all(isinstance(name, str) for name in path):
        return f"{render_path(path)}: a key that isn't a text"
    return f"{render_path(path)}: {describe(leaf)} that holds shards" if _holds_shards(leaf) else None


def _holds_shards(node: Tree) -> bool:
    children = entries(node)
    return children is not None and any(
        isinstance(child, ShardedBase) or _holds_shards(child) for child in children.values()
    )


def nested(tree: Mapping[str, Any], *, separator: str = ".") -> dict[str, Any]:
    """Return a flat dict as nested ones, taken apart at the dots of its names; undone by `flat`.

    Numbers are names too: layers are dicts with keys "0", "1" ..., on every rank, whichever of them it holds.

    Args:
        tree: values of any kind by name, such as an open checkpoint. The names count, not shards' own keys.
        separator: where names are taken apart.

    Raises:
        TreeError: a name isn't a text, or is also the beginning of another one.

    Examples:
        >>> nested({"model.layers.0.w": 1, "model.layers.1.w": 2, "step": 3})
        {'model': {'layers': {'0': {'w': 1}, '1': {'w': 2}}}, 'step': 3}

    References:
        `flax.traverse_util.unflatten_dict`.
    """
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        what = "nested: not a dict of values by name"
        raise TreeError(error_text(what, found=describe(tree), expected="a dict with texts as keys"))
    result: dict[str, Any] = {}
    inner: dict[TreePath, dict[str, Any]] = {(): result}
    both: list[str] = []
    for name, value in tree.items():
        *above, last = name.split(separator)
        node = result
        for depth, entry in enumerate(above, 1):
            # Known by path: a dict that stands here may also be a value of the caller's, which isn't changed.
            child = inner.setdefault(tuple(above[:depth]), {})
            if node.setdefault(entry, child) is not child:
                both.append(separator.join(above[:depth]))
            node = child
        if node.setdefault(last, value) is not value or (*above, last) in inner:
            both.append(name)
    if both:
        offenders = [repr(name) for name in dict.fromkeys(both)]
        fix = "Use the flat mapping, or another separator."
        what = "nested: both a key and the beginning of another one"
        raise TreeError(error_text(what, offenders=offenders, fix=fix))
    return result
