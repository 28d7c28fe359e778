"""Tensors with their axes in another order, as where one program stores a matrix the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import ShapeError, error_text
from ..geometry import integers
from ..mapping import ShardedTensor
from ._axis import map_tensors
from ._flat import Flat, check_plain


def transpose_tensors(tree: Flat, keys: Sequence[str], axes: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the tree with the axes of tensors in another order, as views; undone by the inverse order.

    Args:
        tree: shards by key; boxes of any kind.
        keys: of the tensors; each ``*`` stands for one part between dots.
        axes: the old axis for each new one, as in ``torch.permute``; the other way round by default.

    Raises:
        TreeError: a pattern names nothing, or a shard isn't a box with all its axes.
        ShapeError: that isn't an order of a tensor's axes.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> left = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (1, 0, 4))
        >>> transpose_tensors({"w": left}, ["w"])["w"].global_shape
        (12, 2)
    """
    return map_tensors("transpose_tensors", tree, keys, partial(_transposed, axes=axes))


def _transposed(shard: ShardedTensor, axes: Sequence[int] | None) -> ShardedTensor:
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
