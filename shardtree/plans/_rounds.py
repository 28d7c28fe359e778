"""In which order tensors are read that need room beside their target: a bounded number of bytes at a time."""

from __future__ import annotations

import numpy as np

from ..geometry import Column
from ..layouts import ShardColumns

CAST_BYTES = 256 * 1024 * 1024
"""The most bytes of memory that a rank takes for stored elements that are to be converted; one tensor may take more."""


def read_rounds(columns: ShardColumns, *, most_bytes: int = CAST_BYTES) -> Column:
    """Return the round in which each shard is read, int64 (shards,): all of a tensor in one, and none without any.

    In each round no rank reads more than `most_bytes`, but where one tensor alone has more.

    Args:
        columns: what one rank reads, or all of them.
        most_bytes: that a rank reads in one round.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(4)) for key in "abc"]
        >>> read_rounds(st.shard_columns(shards), most_bytes=32).tolist()
        [0, 0, 1]
    """
    ranks = int(columns.rank.max(initial=-1)) + 1
    held = np.zeros((len(columns.keys), ranks), dtype=np.int64)
    np.add.at(held, (columns.key, columns.rank), columns.elements * columns.item_size[columns.key])
    rounds, number, room = [], 0, np.full(ranks, most_bytes, dtype=np.int64)
    for size in held:
        if (size > room).any() and (room < most_bytes).any():
            number, room = number + 1, np.full(ranks, most_bytes, dtype=np.int64)
        room = room - size
        rounds.append(number)
    return np.array(rounds, dtype=np.int64)[columns.key] if rounds else columns.key
