"""Conversions to trees of other libraries: without boxes and back (`unbox`, `rebox`), and to flat or nested dicts.

A box, as Flax calls it, is a leaf with data and metadata: a shard, a factory, a sharded object, or a local object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from ..core.lazy import LazyTensor
from ..core.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject
from ..core.trees import (
    HOLE,
    Tree,
    describe,
    described_kind,
    entries,
    flatten_visible,
    is_sequence,
    leaves_with_paths,
    like,
    map_sharing,
    refusing_depth,
    same_kind,
    with_data,
)
from ..errors import ShapeError, TreeError, TreePath, error_text, render_path
from ._tree_places import named_paths, places

_BOXES: Final = (ShardedBase, LocalNonpersistentObject)


def unbox(tree: Tree) -> Tree:
    """Return the tree with each box replaced by its content, as `load` returns it.

    Shards, factories and sharded objects give their data, which may be None, and a `LocalNonpersistentObject` its
    value, as in a load. Other values stay, and subtrees without boxes are shared.

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
    """Wrap data in a sharded tree's boxes (shards, factories, objects): the inverse of `unbox`.

    So a loaded tree becomes a sharded tree again, ready to be saved: ``rebox(target, load(target, folder))``.

    Args:
        tree: A tree with boxes. Its plain values and the data in its boxes are ignored.
        data: A tree with a value at the path of each box. The value goes into the box, even if it is a container.
            Other values stay, such as common values that `load` adds.

    Returns:
        A tree with the containers, the order and the plain values of `data`; subtrees without boxes are shared.

    Raises:
        ShapeError: Tensors don't have their shards' shapes and dtypes; each is named by its path.
        TreeError: `data` has no value for a box, or no tensor for a shard; each is named by its path.
        UnsupportedValue: Boxes lie in values that aren't nodes, such as instances of unregistered classes.

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
        heading, fix = "rebox: the data does not fit the sharded tree", "Pass the tree that the data was loaded for."
        kind = TreeError if places else ShapeError
        raise kind(error_text(heading, offenders=[*places, *shapes], fix=fix))
    return new


def _rebox(tree: Tree, data: Tree, path: TreePath, places: list[str], shapes: list[str]) -> Tree:
    """Return the subtree `data`, whose path is `path`, with its values put into boxes like those of `tree`.

    Misfits are added to two lists, so that one error can name them all: `places` gets a text for each value that is
    missing or isn't a tensor, `shapes` for each tensor of a wrong shape or dtype.
    """
    if isinstance(tree, _BOXES):
        return _rebox_leaf(tree, data, path, places, shapes)
    children, values = entries(tree), entries(data)
    if children is None:
        return data
    if values is None or not same_kind(tree, data) or (is_sequence(tree) and len(tree) != len(data)):
        boxes = [(*path, *inner) for inner, leaf in leaves_with_paths(tree) if isinstance(leaf, _BOXES)]
        text = "missing" if data is HOLE else f"found {describe(data)} at {render_path(path)}"
        places += [f"{render_path(box)}: {text}, expected a value in a {describe(tree)}" for box in boxes]
        return data
    new = {
        entry: _rebox(child, values.get(entry, HOLE), (*path, entry), places, shapes)
        for entry, child in children.items()
    }
    # Only changed subtrees get new containers; all others are shared.
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


# Trees as flat dicts, whose names are the paths, and back.


def flat(tree: Tree, *, separator: str = ".") -> dict[str, Any]:
    """Return the leaves of a tree as one dict. Each name is the leaf's path, with its entries joined by dots.

    Lists, tuples and registered classes that contain tensors or shards are flattened too, by index and field; others
    stay values, and so do empty containers. `nested` restores the tree if all containers are dicts whose keys are
    texts without dots; otherwise its result has such dicts instead.

    Args:
        tree: Any tree; the keys of its dicts are texts or integers.
        separator: Separator between the entries of a name.

    Raises:
        TreeError: The argument isn't a tree, a key is neither a text nor an integer, or two values would have one name.
        UnsupportedValue: Shards lie in values that aren't nodes, such as instances of unregistered classes.

    Examples:
        >>> flat({"model": {"layers": {"0": {"w": 1}, "1": {"w": 2}}}, "betas": [0.9, 0.95]})
        {'model.layers.0.w': 1, 'model.layers.1.w': 2, 'betas': [0.9, 0.95]}
        >>> list(flat({"layers": [{"w": torch.ones(2)}, {"w": torch.ones(2)}]}))
        ['layers.0.w', 'layers.1.w']

    References:
        `flax.traverse_util.flatten_dict`.
    """
    known = places(dict(tree) if isinstance(tree, Mapping) and not isinstance(tree, dict) else tree)
    if () in known.leaves:
        found, expected = describe(tree), "a dict, list, tuple or registered class"
        raise TreeError(error_text("flat: not a tree", found=found, expected=expected))
    wrong = [render_path(path) for path in known.leaves if not all(map(_is_name, path))]
    if wrong:
        heading, fix = "flat: keys that are neither strings nor integers", "Use dicts with strings as keys."
        raise TreeError(error_text(heading, offenders=wrong, fix=fix))
    return {name: known.leaves[path] for name, path in named_paths("flat", known, separator).items()}


def _is_name(entry: Any) -> bool:
    return isinstance(entry, (str, int)) and not isinstance(entry, bool)


def nested(tree: Mapping[str, Any], *, separator: str = ".") -> dict[str, Any]:
    """Return a flat dict as nested ones, split at the dots of its names; undone by `flat`.

    Numbers are names too: layers become a dict with the keys "0", "1" and so on, whichever layers a rank holds.

    Args:
        tree: Values of any kind by name, such as an open checkpoint. Shards' own keys are ignored.
        separator: Separator at which names are split.

    Raises:
        TreeError: A name isn't a text, or is also the prefix of another name.

    Examples:
        >>> nested({"model.layers.0.w": 1, "model.layers.1.w": 2, "step": 3})
        {'model': {'layers': {'0': {'w': 1}, '1': {'w': 2}}}, 'step': 3}

    References:
        `flax.traverse_util.unflatten_dict`.
    """
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        heading = "nested: not a dict with strings as keys"
        raise TreeError(error_text(heading, found=describe(tree), expected="a dict from names to values"))
    result: dict[str, Any] = {}
    inner: dict[TreePath, dict[str, Any]] = {(): result}
    both: list[str] = []
    for name, value in tree.items():
        *above, last = name.split(separator)
        node = result
        for depth, entry in enumerate(above, 1):
            # New dicts are known by path: a dict here may also be a value of the caller's, which isn't changed.
            child = inner.setdefault(tuple(above[:depth]), {})
            if node.setdefault(entry, child) is not child:
                both.append(separator.join(above[:depth]))
            node = child
        if node.setdefault(last, value) is not value or (*above, last) in inner:
            both.append(name)
    if both:
        offenders = [repr(name) for name in dict.fromkeys(both)]
        fix = "Leave the mapping flat, or pass another separator=."
        heading = "nested: a name is also the prefix of another name"
        raise TreeError(error_text(heading, offenders=offenders, fix=fix))
    return result
