"""A lens that stores a tensor with its axes in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...errors import ShapeError, error_text
from ...geometry import integers
from ...mapping import ShardedTensor
from ._boxes import check_box
from ._lens import Built, Lens


def transposed(*axes: int) -> Lens:
    """Return the lens that stores a tensor with its axes in this order, as `torch.permute` gives it; always views.

    Args:
        axes: all axes of the tensor that the model holds, prepended ones not counted; by default the last two change
            places.

    Raises:
        MetadataError: they aren't integers.
        ShapeError: they aren't the tensor's axes.

    Examples:
        >>> import torch
        >>> built = transposed()(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2)))
        >>> built.shards[0].global_shape, built.shards[0].global_offset
        ((3, 4), (0, 2))
    """
    given = integers("transposed", "axes", axes)

    def lens(shard: ShardedTensor) -> Built:
        check_box("transposed", shard)
        order = _order(shard, given)
        back = [order.index(axis) for axis in range(len(order))]
        front = shard.prepend_axis_num

        def moved(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:front], *(values[front + axis] for axis in order))

        stored = replace(
            shard,
            data=None if shard.data is None else shard.data.permute(order),
            local_shape=tuple(shard.local_shape[axis] for axis in order),
            global_shape=moved(shard.global_shape),
            global_offset=moved(shard.global_offset),
            axis_fragmentations=None if shard.axis_fragmentations is None else moved(shard.axis_fragmentations),
        )
        return Built((stored,), lambda parts: _back(parts[0], back))

    return lens


def _back(tensor: Any, order: Sequence[int]) -> Any:
    return tensor.permute(tuple(order))


def _order(shard: ShardedTensor, axes: Sequence[int]) -> tuple[int, ...]:
    count = len(shard.local_shape)
    if not axes and count >= 2:
        return (*range(count - 2), count - 1, count - 2)
    order = tuple(axis + count if -count <= axis < 0 else axis for axis in axes)
    if sorted(order) != list(range(count)) or not axes:
        found, expected = f"axes {tuple(axes)}", f"each of the {count} axes of {shard.local_shape} once"
        raise ShapeError(error_text(f"transposed: {shard.key!r} has no such axes", found=found, expected=expected))
    return order
