"""Work in rounds and groups of bounded size, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from ..geometry import Column
from ..layouts import ShardColumns

# Rounds of reads that need a buffer besides their target.

CAST_BYTES = 256 * 1024 * 1024
"""The most bytes that a rank buffers of stored elements that are to be converted; a single tensor may take more."""


def read_rounds(columns: ShardColumns, *, most_bytes: int = CAST_BYTES) -> Column:
    """Return the round in which each shard is read, int64 (shards,): all of a tensor in one.

    In each round no rank reads more than `most_bytes`, unless a single tensor is larger.

    Args:
        columns: what one rank reads, or all of them.
        most_bytes: that a rank reads in one round.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(4)) for key in "abc"]
        >>> read_rounds(st.layouts.shard_columns(shards), most_bytes=32).tolist()
        [0, 0, 1]
    """
    ranks = int(columns.rank.max(initial=-1)) + 1
    held = np.zeros((len(columns.keys), ranks), dtype=np.int64)
    np.add.at(held, (columns.key, columns.rank), columns.elements * columns.item_size[columns.key])
    rounds, number, room = [], 0, np.full(ranks, most_bytes, dtype=np.int64)
    for size in held:
        # A round ends for all ranks at once: ranks that exchange what they read must find the same rounds.
        if (size > room).any() and (room < most_bytes).any():
            number, room = number + 1, np.full(ranks, most_bytes, dtype=np.int64)
        room = room - size
        rounds.append(number)
    return np.array(rounds, dtype=np.int64)[columns.key] if rounds else columns.key


# Groups of bounded size.

T = TypeVar("T")


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield items in groups, in order; a group is larger than that only if it is a single item.

    Args:
        items: any.
        nbytes: how large an item is.
        most_bytes: in a group.

    Examples:
        >>> list(grouped(["abc", "d", "e", "fghij"], len, 4))
        [['abc', 'd'], ['e'], ['fghij']]
    """
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group
