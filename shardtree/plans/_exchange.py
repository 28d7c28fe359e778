"""Which rank reads for others, in rounds of bounded size; and other work grouped so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..geometry import Column
from ..layouts import ShardColumns
from ._save import Rows, balanced_rows, held_places

# Shards that several ranks want are read once and passed on, in rounds of bounded size.

ROUND_BYTES = 64 * 1024 * 1024
"""The most bytes that all ranks together pass on in one round."""


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """Which rank reads which shard, and which bytes of it go to which rank in which round.

    Attributes:
        reads: the shards that are read from storage, bool (shards,), rows as in the columns of all ranks.
        source: the row that is passed on, int64 (transfers,).
        target: the row that gets it, int64 (transfers,).
        start: first byte of the shard's data that is passed on, int64 (transfers,).
        stop: one past the last, int64 (transfers,).
        round: when, ascending, int64 (transfers,).
    """

    reads: Rows
    source: Column
    target: Column
    start: Column
    stop: Column
    round: Column

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return int(self.round[-1]) + 1 if self.round.size else 0


def plan_exchange(columns: ShardColumns, ranks: int, *, round_bytes: int = ROUND_BYTES) -> ExchangePlan:
    """Return the plan by which ranks that want the same shard read it once between them.

    Args:
        columns: the shards that all ranks want.
        ranks: how many ranks there are.
        round_bytes: the most that is passed on in one round.

    Examples:
        >>> import torch, shardtree as st
        >>> def wanted_by(rank):
        ...     shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=rank)
        ...     return st.layouts.shard_columns([shard], rank)
        >>> plan = plan_exchange(st.layouts.join_columns([wanted_by(0), wanted_by(1)]), 2)
        >>> plan.reads.tolist(), plan.source.tolist(), plan.target.tolist(), plan.stop.tolist()
        ([True, False], [0], [1], [16])
    """
    place, places = held_places(columns)
    # Readers are chosen as writers are: by the same function, so that ranks read about as many bytes each.
    reads = balanced_rows(columns, ranks, place, np.ones(places, dtype=np.bool_))
    reader = np.zeros(places, dtype=np.int64)
    reader[place[reads]] = np.flatnonzero(reads)
    target = np.flatnonzero(~reads)
    size = (columns.elements * columns.item_size[columns.key])[target]
    # The transfers are laid end to end and cut every `round_bytes`: rounds are full, however the shards are sized.
    end = np.cumsum(size)
    begin = end - size
    pieces = np.where(size > 0, -(-end // round_bytes) - begin // round_bytes, 0)
    row = np.repeat(np.arange(target.size), pieces)
    number = (begin // round_bytes)[row] + np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.maximum(number * round_bytes, begin[row]) - begin[row]
    stop = np.minimum((number + 1) * round_bytes, end[row]) - begin[row]
    return ExchangePlan(reads, reader[place[target]][row], target[row], start, stop, number)


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
