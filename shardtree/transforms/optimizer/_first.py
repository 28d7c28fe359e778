"""Which shard of a tensor has its first element: the one place for what there is once of a parameter."""

from __future__ import annotations

from math import prod

from ...mapping import ShardedTensor


def first_element(shard: ShardedTensor) -> int:
    """Return the number of the first element that a shard has, 0 for one shard of each tensor and its replicas alone.

    Elements are counted in row-major order, behind prepended axes: each place along those is a tensor of its own. A
    shard without elements gets a number that no element has. A tensor without elements has its first one where a shard
    begins at index 0 and is as long as can be along all axes that have a length.

    Args:
        shard: a box, or a flat range of one; on any grid.

    Examples:
        >>> import torch
        >>> [first_element(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, n, 4))) for n in range(4)]
        [0, 6, 12, 18]
        >>> flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 4), flattened_range=slice(5, 8))
        >>> first_element(flat)
        5
    """
    front = shard.prepend_axis_num
    whole, offset, box = shard.global_shape[front:], shard.global_offset[front:], shard.local_shape
    start, stop = (0, prod(box)) if (flat := shard.flattened_range) is None else (flat.start, flat.stop)
    if start < stop:
        index = [low + inside for low, inside in zip(offset, _index(start, box), strict=True)]
        # A padded shard may reach beyond a global axis of length 0.
        return max(_number(index, whole), int(any(index)))
    begins = not any(offset) and all(size > 0 or length == 0 for size, length in zip(box, whole, strict=True))
    return 0 if prod(whole) == 0 and begins and start == 0 else max(prod(whole), 1)


def _index(number: int, shape: tuple[int, ...]) -> list[int]:
    """Return the index of an element of a box by its number."""
    index = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        index.append(place)
    return index[::-1]


def _number(index: list[int], shape: tuple[int, ...]) -> int:
    number = 0
    for place, size in zip(index, shape, strict=True):
        number = number * size + place
    return number
