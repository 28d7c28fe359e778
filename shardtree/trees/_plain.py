"""Trees as other libraries hold them: without boxes by `unbox`, back by `rebox`; dicts flat or nested.

A box, as Flax calls it, is a leaf with data and metadata: a shard, a factory, a sharded object, or a local object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from ..errors import ShapeError, TreeError, TreePath, error_text, render_path
from ..lazy import LazyTensor
from ..mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from ._hidden import flatten_visible, hides_shards
from ._maps import described_kind, map_sharing, with_data
from ._nodes import HOLE, Tree, describe, entries, is_sequence, leaves_with_paths, like, refusing_depth, same_kind

_BOXES: Final = (ShardedBase, LocalNonpersistentObject)


def unbox(tree: Tree) -> Tree:
    """Return the tree with each box replaced by what it holds: the form of what `load` returns.

    Shards, factories and sharded objects give their data, which may be None, and a `LocalNonpersistentObject` what it
    was given, as a load does with each. Other values stay as they are, and subtrees without boxes are shared.

    Examples:
        >>> from shardtree.mapping import LocalNonpersistentObject, ShardedTensor
        >>> w = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))
        >>> unbox({"model": {"w": w}, "cache": LocalNonpersistentObject([1]), "step": 3})
        {'model': {'w': tensor([1., 1.])}, 'cache': [1], 'step': 3}

    References:
        flax.core.meta.unbox.
    """
    return map_sharing(_unwrap, tree)


def _unwrap(leaf: Any) -> Any:
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf.unwrap()
    return leaf.data if isinstance(leaf, ShardedBase) else leaf


@refusing_depth
def rebox(tree: Tree, data: Tree) -> Tree:
    """Return the data in the boxes of a sharded tree: the inverse of `unbox`.

    So what was loaded becomes a sharded tree again, ready to be saved: ``rebox(target, load(target, folder))``.

    Args:
        tree: its boxes are used. Its plain values and the data in its boxes are ignored.
        data: has a place for each box. What is there goes into the box, even a container. The rest stays as it is: a
            load's result has common values that the target lacks.

    Returns:
        A tree with the containers, the order and the plain values of `data`; subtrees without boxes are shared.

    Raises:
        ShapeError: tensors aren't of their shards' shapes and dtypes; each is named by its path.
        TreeError: there is no place for a box, or no tensor for a shard; each is named by its path.
        UnsupportedValue: boxes lie in values that aren't nodes, as in an instance of a class that isn't registered.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> target = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))}
        >>> again = rebox(target, {"w": torch.ones(2), "step": 3})
        >>> again["w"].data, again["w"].global_shape, again["step"]
        (tensor([1., 1.]), (4,), 3)

    References:
        flax.core.meta.replace_boxed.
    """
    places: list[str] = []
    shapes: list[str] = []
    flatten_visible(tree)
    new = _rebox(tree, data, (), places, shapes)
    if places or shapes:
        what, fix = "rebox: the data doesn't fit the sharded tree", "Pass the tree that the data was loaded for."
        kind = TreeError if places else ShapeError
        raise kind(error_text(what, offenders=[*places, *shapes], fix=fix))
    return new


def _rebox(tree: Tree, data: Tree, path: TreePath, places: list[str], shapes: list[str]) -> Tree:
    """Return the data at one path, boxed; adds what doesn't fit to the two lists, so that one error names all."""
    if isinstance(tree, _BOXES):
        return _rebox_leaf(tree, data, path, places, shapes)
    children, values = entries(tree), entries(data)
    if children is None:
        return data
    if values is None or not same_kind(tree, data) or (is_sequence(tree) and len(tree) != len(data)):
        boxes = [(*path, *rest) for rest, leaf in leaves_with_paths(tree) if isinstance(leaf, _BOXES)]
        text = "missing" if data is HOLE else f"found {describe(data)} at {render_path(path)}"
        places += [f"{render_path(box)}: {text}, expected a place in a {describe(tree)}" for box in boxes]
        return data
    new = {
        entry: _rebox(child, values.get(entry, HOLE), (*path, entry), places, shapes)
        for entry, child in children.items()
    }
    # Only what changed makes a new container; everything else is shared.
    updates = {entry: child for entry, child in new.items() if entry in values and child is not values[entry]}
    return like(data, {**values, **updates}) if updates else data


def _rebox_leaf(leaf: Any, data: Any, path: TreePath, places: list[str], shapes: list[str]) -> Any:
    if data is HOLE:
        places.append(f"{render_path(path)}: missing")
        return leaf
    if isinstance(leaf, LocalNonpersistentObject):
        return LocalNonpersistentObject(data)
    if isinstance(leaf, ShardedObject):
        return replace(leaf, data=data)
    expected = described_kind(leaf)
    # A factory without a tensor may merge to anything, and a shard without data holds None.
    if expected is None or data is None or data is leaf.data:
        return with_data(leaf, data)
    if not isinstance(data, (torch.Tensor, LazyTensor)):
        places.append(f"{render_path(path)}: found {describe(data)}, expected {_text(*expected)}")
        return leaf
    if (data.dtype, tuple(data.shape)) != expected:
        shapes.append(f"{render_path(path)}: found {_text(data.dtype, data.shape)}, expected {_text(*expected)}")
        return leaf
    return with_data(leaf, data)


def _text(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> str:
    return f"{tuple(shape)} {dtype}"


# Nested dicts as flat ones, whose names are the paths, and back.


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
    pairs, wrong = _pairs(dict(tree))
    if wrong:
        fix = "Use dicts with texts as keys, {str(n): layer for n, layer in enumerate(layers)}; states go by names."
        raise TreeError(error_text("flat: what `nested` couldn't undo", offenders=wrong, fix=fix))
    places: dict[str, list[TreePath]] = {}
    for path, _ in pairs:
        places.setdefault(separator.join(path), []).append(path)
    twice = [f"{name!r}: {', '.join(map(render_path, paths))}" for name, paths in places.items() if len(paths) > 1]
    if twice:
        raise TreeError(error_text("flat: two values would have one name", offenders=twice, fix="Rename one of them."))
    return {separator.join(path): leaf for path, leaf in pairs}


@refusing_depth
def _pairs(tree: dict[str, Any]) -> tuple[list[tuple[TreePath, Any]], list[str]]:
    """Return all values with their paths, and what is wrong with some."""
    pairs = [pair for key, child in tree.items() for pair in _values((key,), child)]
    return pairs, [problem for path, leaf in pairs if (problem := _problem(path, leaf)) is not None]


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
    return (
        hides_shards(node)
        if children is None
        else any(isinstance(child, ShardedBase) or _holds_shards(child) for child in children.values())
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
