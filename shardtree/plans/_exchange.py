"""Which rank reads what for others, in rounds of bounded size; and other work grouped so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..geometry import Column, begins
from ..layouts import ShardColumns
from ._save import find_holders, held_places, holder_sets
from ._text import size_text, table_lines

# Shards that several ranks want are read once and passed on, in rounds of bounded size.

ROUND_BYTES = 64 * 1024 * 1024
"""The most bytes that all ranks together pass on in one round."""


STRIPE_BYTES = 1024 * 1024
"""Shards are cut between readers at multiples of this: whole requests, and few hashed blocks that two ranks read."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExchangePlan:
    """Which rank reads which bytes, and to which ranks it sends them in which round. Its text is a table.

    Attributes:
        ranks: how many there are.
        reader: who reads, int64 (reads,).
        row: the shard of the reader that it reads a part of, a row of all ranks' columns, int64 (reads,).
        read_start: first byte of the shard's data that is read, int64 (reads,).
        read_stop: one past the last, int64 (reads,).
        source: the row that is passed on, int64 (transfers,).
        target: the row that gets it, int64 (transfers,).
        sender: the rank of the source, int64 (transfers,).
        receiver: the rank of the target, int64 (transfers,).
        start: first byte of the shard's data that is passed on, int64 (transfers,).
        stop: one past the last, int64 (transfers,).
        round: when, ascending, int64 (transfers,).
    """

    ranks: int
    reader: Column
    row: Column
    read_start: Column
    read_stop: Column
    source: Column
    target: Column
    sender: Column
    receiver: Column
    start: Column
    stop: Column
    round: Column

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return int(self.round[-1]) + 1 if self.round.size else 0

    @property
    def bytes_read(self) -> Column:
        """How many bytes each rank reads, int64 (ranks,)."""
        return _by_rank(self.ranks, self.reader, self.read_stop - self.read_start)

    @property
    def bytes_sent(self) -> Column:
        """How many bytes each rank sends, int64 (ranks,)."""
        return _by_rank(self.ranks, self.sender, self.stop - self.start)

    @property
    def bytes_received(self) -> Column:
        """How many bytes each rank is sent, int64 (ranks,)."""
        return _by_rank(self.ranks, self.receiver, self.stop - self.start)

    def __repr__(self) -> str:
        columns = (self.bytes_read.tolist(), self.bytes_sent.tolist(), self.bytes_received.tolist())
        rows = [(str(rank), *map(size_text, row)) for rank, row in enumerate(zip(*columns, strict=True))]
        return "\n".join(table_lines([("rank", "reads", "sends", "receives"), *rows]))


def _by_rank(ranks: int, rank: Column, size: Column) -> Column:
    total = np.zeros(ranks, dtype=np.int64)
    np.add.at(total, rank, size)
    return total


def plan_exchange(
    columns: ShardColumns,
    ranks: int,
    *,
    round_bytes: int = ROUND_BYTES,
    stripe_bytes: int = STRIPE_BYTES,
    is_cut: bool = True,
) -> ExchangePlan:
    """Return the plan by which ranks that want the same shards read them once between them.

    The shards that a set of ranks wants are laid end to end and cut into one stretch a rank, so that each rank reads as
    much as the others, whatever it reads alone or with other sets. Cuts lie between shards or at whole stripes: a rank
    is at most a stripe away from its part.

    Args:
        columns: the shards that all ranks want.
        ranks: how many ranks there are.
        round_bytes: the most that is passed on in one round.
        stripe_bytes: shards are cut at multiples of so many bytes.
        is_cut: whether they are; if not, each is read whole by one rank.

    Examples:
        >>> import torch, shardtree as st
        >>> def wanted_by(rank):
        ...     shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(1024), replica_id=rank)
        ...     return st.layouts.shard_columns([shard], rank)
        >>> plan = plan_exchange(st.layouts.join_columns([wanted_by(0), wanted_by(1)]), 2, stripe_bytes=1024)
        >>> plan.reader.tolist(), plan.read_start.tolist(), plan.read_stop.tolist()
        ([0, 1], [0, 2048], [2048, 4096])
        >>> plan.bytes_sent.tolist(), plan.bytes_received.tolist()
        ([2048, 2048], [2048, 2048])
    """
    place, places = held_places(columns)
    size = np.zeros(places, dtype=np.int64)
    size[place] = columns.elements * columns.item_size[columns.key]
    item = np.ones(places, dtype=np.int64)
    item[place] = columns.item_size[columns.key]
    stripe = -(-stripe_bytes // item) * item if is_cut else np.maximum(size, 1)
    which, reader, read_start, read_stop = _stripes(columns.rank, ranks, place, size, stripe)
    by_place = np.argsort(place, kind="stable")
    first, count = np.searchsorted(place[by_place], np.arange(places)), np.bincount(place, minlength=places)
    # Each stretch meets all rows of its place; of the reader's, which may be several, the first is read into.
    stretch = np.repeat(np.arange(which.size), count[which])
    number = np.arange(stretch.size) - np.repeat(np.cumsum(count[which]) - count[which], count[which])
    target = by_place[first[which[stretch]] + number]
    own = np.flatnonzero(columns.rank[target] == reader[stretch])
    row = target[own[begins(stretch[own])]]
    others = np.flatnonzero(target != row[stretch])
    stretch, target = stretch[others], target[others]
    of, start, stop, turn = _in_rounds(read_start[stretch], read_stop[stretch], round_bytes)
    source, target = row[stretch][of], target[of]
    sender, receiver = columns.rank[source], columns.rank[target]
    reads = (reader, row, read_start, read_stop)
    return ExchangePlan(ranks, *reads, source, target, sender, receiver, start, stop, turn)


def _in_rounds(start: Column, stop: Column, round_bytes: int) -> tuple[Column, Column, Column, Column]:
    """Return transfers cut so that each round moves so many bytes, as (transfer, start, stop, round)."""
    # The transfers are laid end to end and cut every `round_bytes`: rounds are full, however the shards are sized.
    end = np.cumsum(stop - start)
    begin = end - (stop - start)
    pieces = -(-end // round_bytes) - begin // round_bytes
    of = np.repeat(np.arange(start.size), pieces)
    turn = (begin // round_bytes)[of] + np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    shift = start[of] - begin[of]
    return (
        of,
        np.maximum(turn * round_bytes, begin[of]) + shift,
        np.minimum((turn + 1) * round_bytes, end[of]) + shift,
        turn,
    )


def _stripes(
    rank: Column, ranks: int, place: Column, size: Column, stripe: Column
) -> tuple[Column, Column, Column, Column]:
    """Return who reads which bytes of which place, as (place, reader, start, stop); places of no bytes are left out."""
    held = find_holders(place, rank, size > 0)
    # What only one rank wants leaves no choice: it counts as load before the rest is shared out.
    alone = held.count == 1
    only, lone = held.rank[held.first[alone]], held.place[alone]
    load = _by_rank(ranks, only, size[lone])
    found = [(lone, only, np.zeros_like(lone), size[lone])]
    for places, holders in holder_sets(held):
        end = np.cumsum(size[places])
        begin = end - size[places]
        # The exact cuts, each moved to the nearest end of a shard or of a stripe in it.
        exact = np.cumsum(_level_parts(load[holders], int(end[-1])))[:-1]
        at = np.minimum(np.searchsorted(end, exact, side="right"), places.size - 1)
        step = stripe[places][at]
        striped = np.minimum(begin[at] + (exact - begin[at] + step // 2) // step * step, end[at])
        cut = np.where(end[at] - exact < np.abs(striped - exact), end[at], striped)
        edges = np.unique(np.concatenate([[0], cut, end]))
        which = np.searchsorted(end, edges[:-1], side="right")
        reader = holders[np.searchsorted(cut, edges[:-1], side="right")]
        load += _by_rank(ranks, reader, np.diff(edges))
        found.append((places[which], reader, edges[:-1] - begin[which], edges[1:] - begin[which]))
    which, reader, start, stop = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((start, which))
    return which[order], reader[order], start[order], stop[order]


def _level_parts(load: Column, total: int) -> Column:
    """Return how much of a total each of several loads gets, so that the smallest of them end up equal."""
    order = np.argsort(load, kind="stable")
    rising, filled = load[order], np.arange(1, load.size + 1)
    # The most loads of which filling all up to the largest takes no more than the total.
    spent = rising * filled - np.cumsum(rising)
    several = int(np.flatnonzero(spent <= total)[-1]) + 1
    level, rest = divmod(total + int(rising[:several].sum()), several)
    part = np.zeros_like(load)
    part[order[:several]] = level - rising[:several]
    part[order[:rest]] += 1
    return part


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
