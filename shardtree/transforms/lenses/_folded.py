"""Lenses that store one axis as several, row-major, or several as one: what einops writes with parentheses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from ...geometry import flat_boxes
from ...mapping import ShardedTensor
from ...trees import join_data
from ._boxes import Shape, flat_axes, nothing, reshaped, with_values
from ._lens import Built, Lens


def unfolded(at: int, sizes: Shape) -> Lens:
    """Return the lens that stores an axis as several of these sizes; their product is its length.

    An interval of the axis becomes the few boxes that a flat range consists of; always views.

    Args:
        at: the axis, counted from the front, without prepended ones.
        sizes: the new axes'.

    Examples:
        >>> built = unfolded(0, (2, 3))(ShardedTensor.from_rank_offsets("w", torch.arange(3), (0, 1, 2)))
        >>> [(shard.local_shape, shard.global_offset) for shard in built.shards]
        [((1, 3), (1, 0))]
    """

    def lens(shard: ShardedTensor) -> Built:
        begin = shard.global_offset[at + shard.prepend_axis_num]
        boxes = _interval_boxes(sizes, begin, begin + shard.local_shape[at])
        parts = tuple(_unfolded(shard, at, sizes, *box) for box in boxes)
        return Built(parts, lambda merged: _joined(shard, at, len(sizes), merged, shard.local_shape))

    return lens


def _interval_boxes(sizes: Shape, begin: int, end: int) -> list[tuple[Shape, Shape, int]]:
    """Return offset, shape and first place of each box that an interval of a folded axis consists of."""
    if not prod(sizes):
        return [((0,) * len(sizes), sizes, 0)]  # somebody must store that there is nothing
    columns = flat_boxes(*map(np.array, ([sizes], [begin], [end])))
    rows = zip(*(column.tolist() for column in columns[1:]), strict=True)
    return [(tuple(offset), tuple(shape), position) for offset, shape, position in rows]


def _unfolded(shard: ShardedTensor, at: int, sizes: Shape, offset: Shape, shape: Shape, position: int) -> ShardedTensor:
    place, local = at + shard.prepend_axis_num, with_values(shard.local_shape, at, shape)
    part = None if shard.data is None else shard.data.narrow(at, position, prod(shape)).reshape(local)
    return replace(
        shard,
        data=part,
        local_shape=local,
        global_shape=with_values(shard.global_shape, place, sizes),
        global_offset=with_values(shard.global_offset, place, offset),
        axis_fragmentations=None,
    )


def folded(at: int, count: int) -> Lens:
    """Return the lens that stores several axes beside each other as one.

    A box becomes a box for each of its indices along those axes behind which it hasn't all of the tensor.

    Args:
        at: the first of the axes, counted from the front, without prepended ones.
        count: how many there are.

    Examples:
        >>> shard = ShardedTensor("w", torch.zeros(2, 1), torch.float32, (2, 1), (2, 3), (0, 1), None)
        >>> [(part.local_shape, part.global_offset) for part in folded(0, 2)(shard).shards]
        [((1,), (1,)), ((1,), (4,))]
    """

    def lens(shard: ShardedTensor) -> Built:
        place = at + shard.prepend_axis_num
        sizes, box = shard.global_shape[place : place + count], shard.local_shape[at : at + count]
        single = _single_axes(sizes, box)
        holds_any = bool(prod(box)) or not prod(sizes)
        indices = product(*map(range, box[:single])) if holds_any else ()
        parts = tuple(_folded(shard, at, sizes, index) for index in indices)
        return Built(parts, lambda merged: _joined(shard, at, 1, merged, shard.local_shape))

    return lens


def _single_axes(sizes: Shape, box: Shape) -> int:
    """Return how many of the first axes a box is taken apart along; behind them it is one interval."""
    if not prod(sizes):
        return 0
    return next((axis for axis in reversed(range(len(sizes))) if box[axis] != sizes[axis]), 0)


def _folded(shard: ShardedTensor, at: int, sizes: Shape, index: Shape) -> ShardedTensor:
    place, count = at + shard.prepend_axis_num, len(sizes)
    offset = shard.global_offset[place : place + count]
    first = (*(base + number for base, number in zip(offset, index, strict=False)), *offset[len(index) :])
    length = prod(shard.local_shape[at + len(index) : at + count])
    local = with_values(shard.local_shape, at, (length,), count)
    data = shard.data
    for axis, number in enumerate(index if data is not None else ()):
        data = data.narrow(at + axis, number, 1)
    return replace(
        shard,
        data=None if data is None else flat_axes(data, at, count),
        local_shape=local,
        global_shape=with_values(shard.global_shape, place, (prod(sizes),), count),
        global_offset=with_values(shard.global_offset, place, (_row_major(first, sizes),), count),
        axis_fragmentations=None,
    )


def _row_major(index: Shape, sizes: Shape) -> int:
    number = 0
    for place, size in zip(index, sizes, strict=True):
        number = number * size + place
    return number if prod(sizes) else 0


def _joined(shard: ShardedTensor, at: int, count: int, parts: Sequence[Any], shape: Shape) -> Any:
    """Return pieces, which have some axes where their join has one, joined and shaped as the box that they make up."""
    if not parts:
        return nothing(shard, shape)
    rows = [flat_axes(part, at, count) for part in parts]
    return reshaped(rows[0] if len(rows) == 1 else join_data(torch.cat, rows, at), shape)
