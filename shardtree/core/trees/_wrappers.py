"""Wrapper subclasses: subclasses of torch.Tensor, such as torchao's, whose elements follow from inner tensors in them.

The inner tensors are stored instead of the wrapper, each under a key of its own. The method ``__tensor_flatten__``
returns them, but does not tell how a cut of the wrapper divides them. For known classes, the table `_RULES` has this
information; their shards load in any layout that the class itself allows. Shards of other classes load in the same
layout only: each rank's inner tensor is stored whole, at the position of the rank's shard in the wrapper's grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from operator import floordiv
from typing import Any, Final

import torch

from ...errors import TreePath
from ..mapping import ShardedTensor, ShardedTensorFactory
from ._maps import map_sharing
from ._nodes import Tree

_Rule = Callable[[str, torch.Tensor, ShardedTensor], ShardedTensor | None]
"""A function from an inner tensor's key, the inner tensor and the whole tensor's shard to the inner tensor's shard. It
returns None if the cut of the whole tensor isn't a cut of the inner tensor."""


def unwrap(tree: Tree) -> Tree:
    """Return the tree with each shard of a wrapper subclass replaced by a factory of its inner tensors' shards.

    A wrapper subclass is a subclass of torch.Tensor whose elements follow from inner tensors, such as torchao's. The
    key of an inner tensor is the shard's key, a dot, and the name of the attribute that holds the inner tensor. `save`,
    `load` and `redistribute` unwrap trees themselves. A loaded tensor has the target's class; everything except its
    inner tensors, such as block sizes, comes from the target too.

    Examples:
        >>> tree = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
        >>> unwrap(tree) is tree
        True
    """
    return map_sharing(lambda leaf: factory_of(leaf) or leaf, tree)


def has_factories(leaves: list[tuple[TreePath, Any]]) -> bool:
    """Return whether leaves with paths include a factory, or a shard that `unwrap` turns into a factory.

    Examples:
        >>> has_factories([(("w",), ShardedTensor.from_rank_offsets("w", torch.zeros(2)))])
        False
    """
    kinds = {type(leaf) for _, leaf in leaves}
    if any(issubclass(kind, ShardedTensorFactory) for kind in kinds):
        return True
    return any(map(_can_be_taken_apart, {type(leaf.data) for _, leaf in leaves if type(leaf) is ShardedTensor}))


def factory_of(leaf: Any) -> ShardedTensorFactory | None:
    """Return the leaf if it is a factory, or a new factory if it is a shard whose data is a wrapper subclass, or None.

    Examples:
        >>> factory_of(ShardedTensor.from_rank_offsets("w", torch.zeros(2))) is None
        True
    """
    if isinstance(leaf, ShardedTensorFactory):
        return leaf
    # A flat range of a wrapper's elements isn't a flat range of its inner tensors.
    if type(leaf) is not ShardedTensor or leaf.flattened_range or not _can_be_taken_apart(type(leaf.data)):
        return None
    shards = _inner_shards(leaf)
    if shards is None:
        return None
    whole: Any = leaf.data
    _, context = whole.__tensor_flatten__()

    def merge(parts: Mapping[str, Any]) -> Any:
        if all(parts[name] is shard.data for name, shard in shards.items()):
            return whole  # its inner tensors were donated, and are already filled
        return type(whole).__tensor_unflatten__(dict(parts), context, whole.shape, whole.stride())

    return ShardedTensorFactory(leaf.key, whole, lambda *_: unwrap(shards), merge, leaf.replica_id)


def _can_be_taken_apart(kind: type) -> bool:
    # DTensors have shards of their own, and the result of a collective may still be pending.
    is_known = hasattr(kind, "placements") or hasattr(kind, "trigger_wait")
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__") and not is_known


def _inner_shards(shard: ShardedTensor) -> dict[str, ShardedTensor] | None:
    """Return the shards of a wrapper's inner tensors by name; None if an inner tensor cannot be stored.

    An inner tensor cannot be stored if no rule in `_RULES` fits, and the wrapper's shards form no regular grid.

    Args:
        shard: Shard whose data is a wrapper, a tensor subclass that holds inner tensors.
    """
    kind, (names, _) = type(shard.data), shard.data.__tensor_flatten__()
    rules = _RULES.get(kind.__name__, {}) if kind.__module__.startswith("torchao.") else {}
    shards = {}
    for name in names:
        key, inner = f"{shard.key}.{name}", getattr(shard.data, name)
        inner_shard = rules[name](key, inner, shard) if name in rules else None
        inner_shard = inner_shard or _by_place(key, inner, shard)
        if inner_shard is None:
            return None
        shards[name] = inner_shard
    return shards


def _by_place(key: str, inner: torch.Tensor, shard: ShardedTensor) -> ShardedTensor | None:
    """Return this rank's shard of a global tensor that has one whole inner tensor for each shard of the wrapper.

    The leading axes of the global tensor are the grid of the wrapper's shards; the axes of `inner` follow. Such a
    tensor loads in the same layout only. The result is None if the wrapper's shards form no regular grid.

    Args:
        key: Key of the inner tensor.
        inner: Inner tensor on this rank.
        shard: Shard of the wrapper, the tensor subclass that holds `inner`.
    """
    grid = shard.axis_fragmentations
    if grid is None:
        return None
    place = shard.local_chunk_offset_in_global() if prod(shard.local_shape) else (0,) * len(grid)
    offsets = [(axis, index, count) for axis, (index, count) in enumerate(zip(place, grid, strict=True))]
    return ShardedTensor.from_rank_offsets(
        key, inner, *offsets, replica_id=shard.replica_id, prepend_axis_num=len(grid)
    )


def _in_blocks(key: str, inner: torch.Tensor, shard: ShardedTensor) -> ShardedTensor | None:
    """Return the shard of an inner tensor whose elements, such as scales, belong to blocks of the wrapper's elements.

    The result is None if the wrapper is cut inside a block.

    Args:
        key: Key of the inner tensor.
        inner: Inner tensor on this rank.
        shard: Shard of the wrapper, the tensor subclass that holds `inner`.
    """
    front = shard.prepend_axis_num
    shape, offset = shard.global_shape[front:], shard.global_offset[front:]
    if inner.ndim != len(shape):
        return None
    sizes = zip(shard.local_shape, inner.shape, strict=True)
    blocks = [length // size if size and length % size == 0 else 1 for length, size in sizes]
    if any(start % block or whole % block for start, whole, block in zip(offset, shape, blocks, strict=True)):
        return None
    return replace(
        shard,
        key=key,
        data=inner,
        dtype=inner.dtype,
        local_shape=tuple(inner.shape),
        global_shape=(*shard.global_shape[:front], *map(floordiv, shape, blocks)),
        global_offset=(*shard.global_offset[:front], *map(floordiv, offset, blocks)),
        # A rank must never keep its own scales beside loaded values.
        allow_shape_mismatch=shard.allow_shape_mismatch and all(block == 1 for block in blocks),
    )


def _row_major(key: str, inner: torch.Tensor, shard: ShardedTensor) -> ShardedTensor | None:
    """Return the shard of a 1-D inner tensor whose elements belong to groups of consecutive elements of the wrapper.

    The wrapper's elements are grouped in row-major order. The result is None if the wrapper is cut inside a group or
    along an axis after the first, or if `inner` isn't of this kind.

    Args:
        key: Key of the inner tensor.
        inner: Inner tensor on this rank.
        shard: Shard of the wrapper, the tensor subclass that holds `inner`.
    """
    front, count = shard.prepend_axis_num, inner.numel()
    (first, *others), (start, *_) = (shard.global_shape[front:] or (1,)), (shard.global_offset[front:] or (0,))
    elements = prod(shard.local_shape)
    # If another axis than the first is cut, a rank's elements aren't contiguous in the whole.
    if inner.ndim != 1 or not count or elements % count or list(shard.local_shape[1:]) != others:
        return None
    group, row = elements // count, prod(others)
    if (first * row) % group or (start * row) % group:
        return None
    grid = shard.axis_fragmentations
    return ShardedTensor(
        key,
        inner,
        inner.dtype,
        (count,),
        (*shard.global_shape[:front], first * row // group),
        (*shard.global_offset[:front], start * row // group),
        None if grid is None else grid[: front + 1],
        shard.replica_id,
        front,
    )


def _alike(key: str, inner: torch.Tensor, shard: ShardedTensor) -> ShardedTensor | None:
    """Return the shard of an inner tensor that is the same in all shards of the wrapper; never None.

    Each shard of the wrapper has a replica of the inner tensor.

    Args:
        key: Key of the inner tensor.
        inner: Inner tensor on this rank.
        shard: Shard of the wrapper, the tensor subclass that holds `inner`.
    """
    replica = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
    return ShardedTensor.from_rank_offsets(key, inner, replica_id=(*shard.global_offset, *replica))


_QUANTISED: Final[Mapping[str, _Rule]] = {"qdata": _in_blocks, "scale": _in_blocks, "zero_point": _in_blocks}
_RULES: Final[Mapping[str, Mapping[str, _Rule]]] = {
    "OptimState8bit": {"codes": _in_blocks, "scale": _row_major, "qmap": _alike},
    "OptimState4bit": {"codes": _row_major, "scale": _row_major, "qmap": _alike},
    "OptimStateFp8": {"codes": _in_blocks, "scale": _row_major},
    "Int8Tensor": _QUANTISED,
    "Float8Tensor": _QUANTISED,
}
"""The functions that cut inner tensors of torchao's classes, by class and by name: the states of AdamW8bit, AdamW4bit
and AdamWFp8, and weights of Int8 and FP8."""
