"""Shards of parts: a box's own, those that several ranks have, and all of them as one tensor again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..geometry import slices
from ..lazy import Box
from ..lenses import StoredForm
from ..mapping import ShardedTensor
from ..trees import join_data
from ._part import Part

Pieces = Sequence[tuple[Box, bool]]
"""Boxes, each with whether it is the own one of the rank that needs it."""


def is_of_blocks(box: Box, whole: Sequence[int], block: Sequence[int]) -> bool:
    """Return whether a box begins and ends where blocks do along the last two axes; 0 is a block of all of an axis.

    Examples:
        >>> last, first = Box((128, 0), (72, 6)), Box((0, 0), (64, 6))
        >>> is_of_blocks(last, (200, 6), (128, 0)), is_of_blocks(first, (200, 6), (128, 0))
        (True, False)
    """
    rows = zip(box.offset[-2:], box.shape[-2:], whole[-2:], block, strict=True)
    edges = [(low, low + size, length, each or max(1, length)) for low, size, length, each in rows]
    return all(low % each == 0 and (high == length or high % each == 0) for low, high, length, each in edges)


def shard_of(held: ShardedTensor, key: str, part: Part, box: Box, whole: Sequence[int], data: Any) -> ShardedTensor:
    """Return the shard of a box of a part, given that of the weight."""
    front = 0 if part.per is None else held.prepend_axis_num
    return replace(
        held,
        key=key,
        data=data,
        dtype=part.dtypes[0] if data is None else data.dtype,
        local_shape=box.shape[front:],
        global_shape=part.box((0,) * len(whole), whole).shape,
        global_offset=box.offset,
        axis_fragmentations=None,
        prepend_axis_num=front,
        flattened_range=None,
    )


def owned(shard: ShardedTensor, is_own: bool) -> ShardedTensor:
    """Return a shard, as a replica where it is another rank's."""
    if is_own:
        return shard
    replica = shard.replica_id
    return replace(shard, replica_id=replica + 1 if isinstance(replica, int) else (*replica[:-1], replica[-1] + 1))


def in_pieces(shard: ShardedTensor, pieces: Pieces) -> StoredForm:
    """Return what is stored of a part that a rank holds as one box, of which other ranks have some too."""
    front, made = shard.prepend_axis_num, []
    for box, is_own in pieces:
        inside = [low - base for low, base in zip(box.offset, shard.global_offset, strict=True)][front:]
        data = None if shard.data is None else shard.data[slices(tuple(inside), box.shape[front:])]
        piece = replace(shard, data=data, local_shape=box.shape[front:], global_offset=box.offset)
        made.append(owned(piece, is_own))
    return StoredForm(tuple(made), lambda parts: joined(pieces, parts))


def joined(pieces: Pieces, tensors: Sequence[Any]) -> Any:
    """Return tensors of a box's pieces as one; lazy if they are.

    Examples:
        >>> joined([(Box((0, 0), (1, 1)), False), (Box((0, 1), (1, 2)), True)], [torch.zeros(1, 1), torch.ones(1, 2)])
        tensor([[0., 1., 1.]])
    """
    items = [(box.offset, tensor) for (box, _), tensor in zip(pieces, tensors, strict=True)]
    axes = len(items[0][0])
    for axis in reversed(range(axes)):
        rows = defaultdict[tuple[int, ...], list[Any]](list)
        for offset, tensor in items:
            rows[offset[:axis]].append(tensor)
        # Counted from behind: a rank's tensors have no prepended axes.
        items = [
            (place, some[0] if len(some) == 1 else join_data(torch.cat, some, axis - axes))
            for place, some in rows.items()
        ]
    return items[0][1]
