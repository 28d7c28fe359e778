"""Flat ranges as the boxes that they consist of, and those boxes as the flat range again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ..errors import ShapeError, error_text, plural
from ..geometry import box_column, flat_boxes
from ..lazy import LazyTensor
from ..mapping import ShardedTensor
from ..trees import as_integers, join_data


def boxes_of(shard: ShardedTensor) -> tuple[ShardedTensor, ...]:
    """Return the boxes that a flat shard consists of, at most ``2 * axes - 1``, as views, in the order of its elements.

    They hold the same elements of the same global tensor, and are for what knows no flat ranges.

    Args:
        shard: a flat one, with data or without; one that is a box already is returned as it is.

    Returns:
        Boxes of an irregular grid. A range without elements has none; all of a box without elements is that box.

    Raises:
        ShapeError: it isn't a shard.

    Examples:
        >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(7), (3, 4), flattened_range=slice(2, 9))
        >>> for box in boxes_of(flat):
        ...     print(box.global_offset, box.data.tolist())
        (0, 2) [[0, 1]]
        (1, 0) [[2, 3, 4, 5]]
        (2, 0) [[6]]
    """
    _check_shard(shard, "boxes_of")
    flat = shard.flattened_range
    if flat is None:
        return (shard,)
    if not prod(shard.local_shape):
        return (_box(shard, (0,) * len(shard.local_shape), shard.local_shape, 0),)
    axes = len(shard.local_shape)
    shape, (start, stop) = box_column([shard.local_shape], fill=1), box_column([[flat.start], [flat.stop]], fill=0)
    _, offsets, shapes, positions = flat_boxes(shape, start, stop)
    first = offsets.shape[1] - axes  # a scalar is a box of one axis there
    rows = zip(offsets[:, first:].tolist(), shapes[:, first:].tolist(), positions.tolist(), strict=True)
    return tuple(_box(shard, tuple(offset), tuple(size), position) for offset, size, position in rows)


def flat_of(shard: ShardedTensor, tensors: Sequence[Any]) -> ShardedTensor:
    """Return a flat shard with new data: tensors of exactly the boxes that it consists of; undoes `boxes_of`.

    Args:
        shard: the flat one, with data or without.
        tensors: one for each of `boxes_of(shard)`, in that order.

    Raises:
        ShapeError: they aren't of these boxes, or of several dtypes; names each of them.

    Examples:
        >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(3), (2, 2), flattened_range=slice(1, 4))
        >>> flat_of(flat, [10 * box.data for box in boxes_of(flat)]).data
        tensor([ 0, 10, 20])
    """
    _check_shard(shard, "flat_of")
    given = _checked_tensors(shard, tensors)
    if shard.flattened_range is None:
        return replace(shard, data=given[0], dtype=given[0].dtype)
    parts = [_flattened(tensor) for tensor in given]
    if not parts:
        return replace(shard, data=torch.empty(0, dtype=shard.dtype))
    data = parts[0] if len(parts) == 1 else join_data(torch.cat, parts, 0)
    return replace(shard, data=data, dtype=data.dtype)


def _checked_tensors(shard: ShardedTensor, tensors: Any) -> list[Any]:
    """Return a shard's tensors, once they are known to be of its boxes and of one dtype."""
    subject, boxes = f"flat_of: {shard.key!r}", boxes_of(shard)
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        found, expected = type(tensors).__name__, "a list of them, one for each of `boxes_of(shard)`"
        raise ShapeError(error_text(f"{subject}: not tensors", found=found, expected=expected))
    given = list(tensors)
    if len(given) != len(boxes):
        found, expected = plural(len(given), "tensor"), f"{len(boxes)}, one for each of `boxes_of(shard)`"
        raise ShapeError(error_text(subject, found=found, expected=expected))
    pairs = enumerate(zip(given, boxes, strict=True))
    wrong = [f"tensor {number}: {text}" for number, (one, box) in pairs if (text := _misfit(one, box)) is not None]
    if wrong:
        raise ShapeError(error_text(f"{subject}: tensors of other boxes", offenders=wrong))
    if len({tensor.dtype for tensor in given}) > 1:
        of_each = [f"tensor {number}: {tensor.dtype}" for number, tensor in enumerate(given)]
        fix = "Convert them to one dtype."
        raise ShapeError(error_text(f"{subject}: tensors of several dtypes", offenders=of_each, fix=fix))
    return given


def _misfit(tensor: Any, box: ShardedTensor) -> str | None:
    shape = getattr(tensor, "shape", type(tensor).__name__)
    if shape != box.local_shape:
        return f"{shape}, not {box.local_shape}"
    return None if isinstance(tensor, (torch.Tensor, LazyTensor)) else f"{type(tensor).__name__}, not a tensor"


def _box(shard: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...], position: int) -> ShardedTensor:
    front = shard.prepend_axis_num
    base = shard.global_offset
    place = tuple(first + more for first, more in zip(base[front:], offset, strict=True))
    data = None if shard.data is None else shard.data.narrow(0, position, prod(shape)).reshape(shape)
    return replace(
        shard,
        data=data,
        local_shape=shape,
        global_offset=(*base[:front], *place),
        axis_fragmentations=None,
        flattened_range=None,
    )


def _flattened(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor.reshape(-1)
    return as_integers(tensor).reshape(-1).view(tensor.dtype)


def _check_shard(shard: Any, doing: str) -> None:
    if not isinstance(shard, ShardedTensor):
        fix = "Apply factories first: what they build are shards." if hasattr(shard, "build") else None
        what = f"{doing}: not a shard"
        raise ShapeError(error_text(what, found=type(shard).__name__, expected="a ShardedTensor", fix=fix))
