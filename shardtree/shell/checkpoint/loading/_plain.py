"""Plain tensors in a target: each requests the whole stored tensor whose key is the plain tensor's path.

If no tensor has that key, the value comes from the common state. Plain tensors that get a value from neither are always
named, never omitted silently.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ....core import trees
from ....core.mapping import ShardedTensor
from ....core.plans import find_unexpected
from ....core.trees import HOLE, deepest, path_key, refuse_shapeless
from ....errors import KeyMismatch, TreePath, error_text, render_path, shorten
from ._targets import Kinds, Target


def asking_whole(target: Target, kinds: Kinds) -> Target:
    """Return the target with shards in place of plain tensors, where the path of a plain tensor is a stored key.

    Each such shard requests the whole stored tensor. If the plain and the stored tensor have a single element, the
    loaded tensor has the plain tensor's shape: both () and (1,) are common for an optimizer's step.

    Args:
        target: A rank's target, split into leaves.
        kinds: The stored kinds (dtype, shape) of the tensors that plain tensors may request, by key.

    Raises:
        UnsupportedValue: Such a tensor is a wrapper subclass, whose memory can't be filled.
        TreeError: Such a tensor has no shape.
    """
    tensors = {number for number in target.plain if isinstance(target.leaves[number], torch.Tensor)}
    keys = {number: key for number in tensors if (key := path_key(target.plain[number])) in kinds}
    if not keys:
        return target
    refuse_shapeless("load", ((target.plain[number], target.leaves[number]) for number in keys))
    leaves, shapes = list(target.leaves), dict[int, torch.Size]()
    for number, key in keys.items():
        tensor, shape = leaves[number], kinds[key].global_shape
        if tensor.shape != shape and tensor.numel() == 1 == prod(shape):
            shapes[number], tensor = tensor.shape, tensor.detach().reshape(shape)
        leaves[number] = ShardedTensor.from_rank_offsets(key, tensor)
    trees.refuse_wrappers("load", [(target.plain[number], leaves[number]) for number in keys])
    return replace(
        target,
        leaves=tuple(leaves),
        tensors=tuple(leaf for leaf in leaves if isinstance(leaf, ShardedTensor)),
        plain={number: path for number, path in target.plain.items() if number not in keys},
        rebuild=partial(_in_shapes, target.rebuild, shapes) if shapes else target.rebuild,
    )


def _in_shapes(rebuild: Callable[[Sequence[Any]], Any], shapes: dict[int, torch.Size], leaves: Sequence[Any]) -> Any:
    """Rebuild a target's tree from loaded leaves, some of them in other shapes.

    Args:
        rebuild: Function from leaves to the tree.
        shapes: Shape in which to view a loaded tensor, by the index of the leaf.
        leaves: Loaded leaves.
    """
    values = (
        leaf.view(shapes[number]) if number in shapes and isinstance(leaf, torch.Tensor) else leaf
        for number, leaf in enumerate(leaves)
    )
    return rebuild([*values])


def unfilled_paths(target: Target, tree: Any) -> list[TreePath]:
    """Return the paths of a target's plain tensors that get no value, neither loaded nor from the common state.

    Args:
        target: A rank's target, with stored plain tensors already replaced by shards.
        tree: The join of the target with the common state.
    """
    return trees.unfilled(tree, [(path, target.leaves[number]) for number, path in target.plain.items()])


def refuse_other_keys(paths: Sequence[TreePath], common: Any, checkpoint_keys: Collection[str]) -> None:
    """Raise if a plain tensor of the target gets no value, although it seems to be stored under another key.

    It seems so if the saved tree had a shard at the plain tensor's path, or if a stored key is a suffix of that path.

    Args:
        paths: Paths of the plain tensors that get no value.
        common: The stored common tree, with holes in place of shards.
        checkpoint_keys: All stored keys.

    Raises:
        KeyMismatch: Such a tensor is stored; the error names the path, and the stored key if it is known.
    """
    pairs = [(path, text) for path in paths if (text := _hint(path, common, checkpoint_keys))]
    if pairs:
        heading = "load: plain tensors of the target are stored under other keys than those of their paths"
        fix = (
            "Replace each by `ShardedTensor.from_rank_offsets(stored_key, tensor)`, or nest the target so that each\n"
            "  path, joined by dots, is the stored key. Wrap a rank's own values in `LocalNonpersistentObject`."
        )
        offenders = [f"{render_path(path)}: {path_key(path)!r} is not stored, {text}" for path, text in pairs]
        raise KeyMismatch(error_text(heading, offenders=offenders, fix=fix))


def _hint(path: TreePath, common: Any, keys: Collection[str]) -> str:
    """Return a phrase for an error about the stored key that a plain tensor's path may mean; empty if there is none."""
    key = path_key(path)
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(1, len(parts)))
    # Until 0.1.0, keys contained the positions of a named tuple's fields, as of a tuple's items.
    by_position = path_key(tuple(int(entry) if isinstance(entry, int) else entry for entry in path))
    if (end := next((end for end in (by_position, *ends) if end in keys), None)) is not None:
        return f"but {end!r} is"
    node, depth = deepest(common, path)
    # A container of only shards is a single hole. If these shards' keys are those of their paths, the tensor isn't one
    # of them: it may be new in the model.
    inside = path_key(path[:depth]) + "."
    if node is not HOLE or (depth < len(path) and any(name.startswith(inside) for name in keys)):
        return ""
    near = find_unexpected([key], keys)[0].near
    where = f"perhaps as {near!r}" if near else f"under one of {', '.join(shorten(sorted(map(repr, keys)), shown=3))}"
    return f"but a shard or object was saved there, {where}"
