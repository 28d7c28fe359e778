"""Padding at the end of an axis cut off and put back, as that of a vocabulary is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..errors import ShapeError, error_text
from ..geometry import integer
from ..lazy import LazyTensor, stored
from ..mapping import ShardedTensor
from ..trees import as_integers, empty_data, join_data
from ._axis import map_tensors, resized, whole_axis
from ._flat import Flat


def unpad_tensors(tree: Flat, keys: Sequence[str], length: int, *, axis: int = 0) -> dict[str, Any]:
    """Return the tree with tensors cut off at a length along an axis, as views.

    What is cut off isn't looked at. Undoes `pad_tensors`.

    Args:
        tree: shards by key.
        keys: of the tensors; each ``*`` stands for one part between dots.
        length: what is kept, in elements.
        axis: of the tensors; other axes may be sharded.

    Raises:
        TreeError: a pattern names nothing.
        ShapeError: a tensor is shorter, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> table = ShardedTensor.from_rank_offsets("embedding.weight", torch.ones(128, 4))
        >>> unpad_tensors({"embedding.weight": table}, ["embedding.weight"], 100)["embedding.weight"].global_shape
        (100, 4)
    """
    return map_tensors("unpad_tensors", tree, keys, partial(_unpadded, length=length, axis=axis))


def _unpadded(shard: ShardedTensor, length: int, axis: int) -> ShardedTensor:
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
        keys: of the tensors; each ``*`` stands for one part between dots.
        length: the new one, in elements.
        axis: of the tensors; other axes may be sharded.

    Raises:
        TreeError: a pattern names nothing.
        ShapeError: a tensor is longer, or the shard isn't whole along the axis.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> pad_tensors({"b": ShardedTensor.from_rank_offsets("b", torch.ones(2))}, ["b"], 3)["b"].data
        tensor([1., 1., 0.])
    """
    return map_tensors("pad_tensors", tree, keys, partial(_padded, length=length, axis=axis))


def _padded(shard: ShardedTensor, length: int, axis: int) -> ShardedTensor:
    at = whole_axis("pad_tensors", shard, axis)
    wanted = integer(f"pad_tensors: {shard.key!r}", "length", length)
    if wanted < shard.local_shape[at]:
        expected = f"{shard.local_shape[at]} or more, its length along axis {at}"
        raise ShapeError(error_text(f"pad_tensors: {shard.key!r} is longer", found=wanted, expected=expected))
    if wanted == shard.local_shape[at]:
        return shard
    return resized(shard, shard.key, at, wanted, None if shard.data is None else _extended(shard.data, at, wanted))


def _extended(data: Any, at: int, length: int) -> Any:
    shape = (*data.shape[:at], length - data.shape[at], *data.shape[at + 1 :])
    if isinstance(data, LazyTensor):
        zeros: Any = stored(lambda _, box: _zeros(box, data.dtype, "cpu"), shape, data.dtype, name="zeros")
    else:
        zeros = _zeros(shape, data.dtype, data.device)
    return join_data(torch.cat, [data, zeros], at)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return zeros of any dtype; torch can't fill all."""
    return torch.zeros_like(as_integers(empty_data(shape, dtype, device))).view(dtype)
