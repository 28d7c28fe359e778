"""Transforms of single tensors: removing and adding padding, and reordering axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..errors import ShapeError, error_text
from ..geometry import integer, integers
from ..lazy import LazyTensor, stored
from ..mapping import ShardedTensor
from ..trees import as_integers, empty_data, join_data
from ._flat import Flat, check_plain, map_tensors, resized, whole_axis

# Padding at the end of an axis, as that of a vocabulary.


def unpad_tensors(tree: Flat, keys: Sequence[str], length: int, *, axis: int = 0) -> dict[str, Any]:
    """Return the tree with tensors cut off at a length along an axis, as views.

    What is cut off isn't read. Undoes `pad_tensors`.

    Args:
        tree: shards by key.
        keys: of the tensors; each ``*`` matches one part between dots.
        length: what is kept, in elements.
        axis: of the tensors; other axes may be sharded.

    Raises:
        TreeError: a pattern matches nothing.
        ShapeError: a tensor is shorter, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> table = ShardedTensor.from_rank_offsets("embedding.weight", torch.ones(128, 4))
        >>> unpad_tensors({"embedding.weight": table}, ["embedding.weight"], 100)["embedding.weight"].global_shape
        (100, 4)
    """
    return map_tensors("unpad_tensors", tree, keys, partial(_unpad, length=length, axis=axis))


def _unpad(shard: ShardedTensor, length: int, axis: int) -> ShardedTensor:
    at = whole_axis("unpad_tensors", shard, axis)
    kept = integer(f"unpad_tensors: {shard.key!r}", "length", length)
    if not 0 <= kept <= shard.local_shape[at]:
        expected = f"0 to {shard.local_shape[at]}, its length along axis {at}"
        raise ShapeError(error_text(f"unpad_tensors: {shard.key!r} has no such part", found=kept, expected=expected))
    return resized(shard, shard.key, at, kept, None if shard.data is None else shard.data.narrow(at, 0, kept))


def pad_tensors(tree: Flat, keys: Sequence[str], length: int, *, axis: int = 0) -> dict[str, Any]:
    """Return the tree with tensors made longer along an axis, by zeros at the end; undone by `unpad_tensors`.

    Tensors in memory are copied; lazy ones aren't read.

    Args:
        tree: shards by key.
        keys: of the tensors; each ``*`` matches one part between dots.
        length: the new one, in elements.
        axis: of the tensors; other axes may be sharded.

    Raises:
        TreeError: a pattern matches nothing.
        ShapeError: a tensor is longer, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> pad_tensors({"b": ShardedTensor.from_rank_offsets("b", torch.ones(2))}, ["b"], 3)["b"].data
        tensor([1., 1., 0.])
    """
    return map_tensors("pad_tensors", tree, keys, partial(_pad, length=length, axis=axis))


def _pad(shard: ShardedTensor, length: int, axis: int) -> ShardedTensor:
    at = whole_axis("pad_tensors", shard, axis)
    wanted = integer(f"pad_tensors: {shard.key!r}", "length", length)
    if wanted < shard.local_shape[at]:
        expected = f"{shard.local_shape[at]} or more, its length along axis {at}"
        raise ShapeError(error_text(f"pad_tensors: {shard.key!r} is longer", found=wanted, expected=expected))
    if wanted == shard.local_shape[at]:
        return shard
    return resized(shard, shard.key, at, wanted, None if shard.data is None else _with_zeros(shard.data, at, wanted))


def _with_zeros(data: Any, at: int, length: int) -> Any:
    shape = (*data.shape[:at], length - data.shape[at], *data.shape[at + 1 :])
    # Zeros, since what was cut off isn't known any more, and Megatron-Core's own loading of a vocabulary without
    # padding puts zeros there.
    if isinstance(data, LazyTensor):
        zeros: Any = stored(lambda _, box: _zeros(box, data.dtype, "cpu"), shape, data.dtype, name="zeros")
    else:
        zeros = _zeros(shape, data.dtype, data.device)
    return join_data(torch.cat, [data, zeros], at)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return zeros of any dtype: torch has no fill for some, and integers of zeros are zeros of every dtype."""
    return torch.zeros_like(as_integers(empty_data(shape, dtype, device))).view(dtype)


# Axes in another order, as where a program stores matrices transposed.


def transpose_tensors(tree: Flat, keys: Sequence[str], axes: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the tree with the axes of tensors in another order, as views; undone by the inverse order.

    Args:
        tree: shards by key; boxes of any kind.
        keys: of the tensors; each ``*`` matches one part between dots.
        axes: the old axis for each new one, as in ``torch.permute``; the other way round by default.

    Raises:
        TreeError: a pattern matches nothing, or a shard isn't a box with all its axes.
        ShapeError: that isn't an order of a tensor's axes.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> left = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (1, 0, 4))
        >>> transpose_tensors({"w": left}, ["w"])["w"].global_shape
        (12, 2)
    """
    return map_tensors("transpose_tensors", tree, keys, partial(_transpose, axes=axes))


def _transpose(shard: ShardedTensor, axes: Sequence[int] | None) -> ShardedTensor:
    check_plain("transpose_tensors", shard)
    count = len(shard.local_shape)
    given = range(count)[::-1] if axes is None else integers(f"transpose_tensors: {shard.key!r}", "axes", axes)
    order = [axis + count if axis < 0 else axis for axis in given]
    if sorted(order) != list(range(count)):
        expected = f"each axis of {shard.local_shape} once"
        raise ShapeError(error_text(f"transpose_tensors: {shard.key!r}", found=list(given), expected=expected))

    def ordered(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[axis] for axis in order)

    return replace(
        shard,
        data=None if shard.data is None else shard.data.permute(*order),
        local_shape=ordered(shard.local_shape),
        global_shape=ordered(shard.global_shape),
        global_offset=ordered(shard.global_offset),
        axis_fragmentations=None if shard.axis_fragmentations is None else ordered(shard.axis_fragmentations),
    )
