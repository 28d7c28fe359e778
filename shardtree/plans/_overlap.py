"""What a shard has in common with a tensor that is stored with another global shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from ..geometry import intersect
from ..layouts import shard_boxes, shard_columns
from ..mapping import ShardedTensor


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box of a shard's elements.

    Attributes:
        start: the element of the shard's flattened data that the box around it begins with.
        shape: of that box.
        part: the slices of that box that are meant.
    """

    start: int
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return these elements of a shard's contiguous data, as a view."""
        return data.reshape(-1)[self.start : self.start + prod(self.shape)].view(self.shape)[self.part]


def overlaps(shard: ShardedTensor, global_shape: tuple[int, ...]) -> tuple[Overlap, ...]:
    """Return the boxes of a shard's elements that lie in a tensor of that global shape; none where it has no elements.

    Args:
        shard: one box, or a flat range, which consists of a few.
        global_shape: with as many axes as the shard's.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.arange(6).view(3, 2))
        >>> [overlap.of(shard.data).tolist() for overlap in overlaps(shard, (2, 9))]
        [[[0, 1], [2, 3]]]
    """
    columns = shard_columns([shard])
    # A scalar's columns have one axis, which has one index.
    whole = np.array(global_shape or (1,), dtype=np.int64)[None]
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    offset, shape = intersect(boxes.offset, boxes.shape, np.zeros_like(whole), whole)
    found = []
    for row in np.flatnonzero((shape > 0).all(axis=1)).tolist():
        begin = (offset[row] - boxes.offset[row]).tolist()
        part = tuple(slice(low, low + size) for low, size in zip(begin, shape[row].tolist(), strict=True))
        found.append(Overlap(int(boxes.position[row]), tuple(boxes.shape[row].tolist()), part))
    return tuple(found)


def stored_elements(shard: ShardedTensor, global_shape: tuple[int, ...]) -> int:
    """Return how many of a shard's elements lie in a tensor of that global shape.

    Examples:
        >>> stored_elements(ShardedTensor.from_rank_offsets("w", torch.zeros(3, 2)), (2, 9))
        4
    """
    return sum(prod(one.stop - one.start for one in overlap.part) for overlap in overlaps(shard, global_shape))
