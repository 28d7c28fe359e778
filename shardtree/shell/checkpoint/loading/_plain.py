"""Plain tensors in a target: each asks for the whole stored tensor of its path's key, on every rank that has it.

What isn't stored under that key is looked for in the common state. What gets a value from neither is named: nothing
that holds a tensor is left out in silence.
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
    """Return a target in which each plain tensor whose path's key is stored is a shard: the whole tensor of that key.

    Where both have one element, the target's shape is kept, whatever the stored one is: () and (1,) are both usual for
    an optimizer's step.

    Args:
        target: A rank's target, taken apart.
        kinds: The stored kinds of the tensors that it may ask for, by key.

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
    """Return the tree of leaves in which the loaded tensors of these numbers have these shapes."""
    values = (
        leaf.view(shapes[number]) if number in shapes and isinstance(leaf, torch.Tensor) else leaf
        for number, leaf in enumerate(leaves)
    )
    return rebuild([*values])


def unfilled_paths(target: Target, tree: Any) -> list[TreePath]:
    """Return the paths of a target's plain tensors that get no value, neither loaded nor from the common state.

    Args:
        target: A rank's target, in which the stored ones are shards already.
        tree: The result of its join with the common state.
    """
    return trees.unfilled(tree, [(path, target.leaves[number]) for number, path in target.plain.items()])


def refuse_other_keys(paths: Sequence[TreePath], common: Any, checkpoint_keys: Collection[str]) -> None:
    """Raise where a plain tensor gets no value, and what seems to be meant is stored under another key.

    That is so where the saved tree had a shard at its path, and where a stored key is the end of its path's key.

    Args:
        paths: Paths of plain tensors that get no value.
        common: The stored common tree, with holes where shards were.
        checkpoint_keys: All stored keys.

    Raises:
        KeyMismatch: Names the path, and the stored key as far as it is known.
    """
    pairs = [(path, text) for path in paths if (text := _hint(path, common, checkpoint_keys))]
    if pairs:
        what = "load: plain tensors of the target that are stored under another key than that of their path"
        fix = (
            "Put `ShardedTensor.from_rank_offsets(key, tensor)` with the stored key in the place of each, or give the\n"
            "  target the structure of the keys. What is this rank's own goes into a `LocalNonpersistentObject`."
        )
        offenders = [f"{render_path(path)}: {path_key(path)!r} isn't stored, {text}" for path, text in pairs]
        raise KeyMismatch(error_text(what, offenders=offenders, fix=fix))


def _hint(path: TreePath, common: Any, keys: Collection[str]) -> str:
    """Return a text about the value stored in place of the tensor at a path; empty if nothing hints at one."""
    key = path_key(path)
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(1, len(parts)))
    # Until 0.1.0 a named tuple's fields had positions in keys, as a tuple's items have.
    by_position = path_key(tuple(int(entry) if isinstance(entry, int) else entry for entry in path))
    if (end := next((end for end in (by_position, *ends) if end in keys), None)) is not None:
        return f"but {end!r} is"
    node, depth = deepest(common, path)
    # A container of shards alone is one hole. Where their keys are those of their paths, the tensor is none of them:
    # the model has it since, say.
    inside = path_key(path[:depth]) + "."
    if node is not HOLE or (depth < len(path) and any(name.startswith(inside) for name in keys)):
        return ""
    near = find_unexpected([key], keys)[0].near
    under = f"perhaps {near!r}" if near else f"under one of {', '.join(shorten(sorted(map(repr, keys)), shown=3))}"
    return f"but a shard or object was saved there, {under}"
