"""Which rank reads what for others, in rounds of bounded size; and other work grouped so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..geometry import Column, begins
from ..layouts import ShardColumns
from ._cells import MOST_CELLS, Cells, wanted_cells
from ._save import find_holders, holder_sets
from ._text import size_text, table_lines

# Shards that several ranks want are read once and passed on, in rounds of bounded size.

ROUND_BYTES = 64 * 1024 * 1024
"""The most bytes that all ranks together pass on in one round."""


STRIPE_BYTES = 1024 * 1024
"""Shards are cut between readers at multiples of this: whole requests, and few hashed blocks that two ranks read."""

_MOST_PASSES = 16


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExchangePlan:
    """Which rank reads which bytes, and to which ranks it sends them in which round. Its text is a table.

    Attributes:
        ranks: how many there are.
        cells: the parts of shards that are wanted whole; bytes are counted in a cell, row-major.
        reader: who reads, int64 (reads,).
        cell: of which it reads some, int64 (reads,).
        row: its own shard that has the cell, a row of all ranks' columns, int64 (reads,).
        read_start: first byte of the cell that is read, int64 (reads,).
        read_stop: one past the last, int64 (reads,).
        read: what is passed on: the number of a read, int64 (transfers,).
        target: the shard that gets it, a row of the columns, int64 (transfers,).
        sender: the rank of the reader, int64 (transfers,).
        receiver: the rank of the target, int64 (transfers,).
        start: first byte of the cell that is passed on, int64 (transfers,).
        stop: one past the last, int64 (transfers,).
        round: when, ascending, int64 (transfers,).
    """

    ranks: int
    cells: Cells
    reader: Column
    cell: Column
    row: Column
    read_start: Column
    read_stop: Column
    read: Column
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
        """How many bytes each rank sends to others, int64 (ranks,)."""
        return _by_rank(self.ranks, self.sender, self._moved)

    @property
    def bytes_received(self) -> Column:
        """How many bytes each rank is sent by others, int64 (ranks,)."""
        return _by_rank(self.ranks, self.receiver, self._moved)

    @property
    def _moved(self) -> Column:
        # Two shards of one rank may want the same: what it passes on to itself is copied, not sent.
        return np.where(self.sender == self.receiver, 0, self.stop - self.start)

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
    most_cells: int = MOST_CELLS,
    is_cut: bool = True,
) -> ExchangePlan:
    """Return the plan by which ranks that want the same elements read them once between them.

    Boxes that overlap are cut into cells along each other's edges. The cells that a set of ranks wants are laid end to
    end and cut into one range a rank, so that each rank reads as much as the others, whatever it reads alone or with
    other sets. Cuts lie between cells or at whole stripes: a rank is at most a stripe away from its part.

    Args:
        columns: the shards that all ranks want.
        ranks: how many ranks there are.
        round_bytes: the most that is passed on in one round.
        stripe_bytes: cells are cut at multiples of so many bytes.
        most_cells: that the boxes of a tensor are cut into, on average; if they would be more, these stay whole, and
            what they share is read more than once.
        is_cut: whether boxes and cells are cut; if not, equal shards are read whole by one rank, others by each.

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
    cells = wanted_cells(columns, is_cut=is_cut, most=most_cells)
    item = columns.item_size[cells.key]
    size = cells.elements * item
    stripe = -(-stripe_bytes // item) * item if is_cut else np.maximum(size, 1)
    rank = columns.rank[cells.row]
    cell, reader, read_start, read_stop = _stripes(rank, ranks, cells.cell, size, stripe)
    by_cell = np.argsort(cells.cell, kind="stable")
    count = np.bincount(cells.cell, minlength=size.size)
    first = np.cumsum(count) - count
    # Each read meets all rows that want its cell; of the reader's, which may be several, it goes to the first.
    read = np.repeat(np.arange(cell.size), count[cell])
    number = np.arange(read.size) - np.repeat(np.cumsum(count[cell]) - count[cell], count[cell])
    target = cells.row[by_cell[first[cell[read]] + number]]
    own = np.flatnonzero(columns.rank[target] == reader[read])
    row = target[own[begins(read[own])]]
    others = np.flatnonzero(target != row[read])
    read, target = read[others], target[others]
    of, start, stop, turn = _in_rounds(read_start[read], read_stop[read], round_bytes)
    read, target = read[of], target[of]
    reads = (reader, cell, row, read_start, read_stop)
    return ExchangePlan(ranks, cells, *reads, read, target, reader[read], columns.rank[target], start, stop, turn)


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
    sets = [*holder_sets(held)]
    planned = _level_shares(load, [(holders, int(size[places].sum())) for places, holders in sets])
    for (_, holders), part in zip(sets, planned, strict=True):
        load += _by_rank(ranks, holders, part)
    for (places, holders), part in zip(sets, planned, strict=True):
        end = np.cumsum(size[places])
        begin = end - size[places]
        # Levelled once more, since the sets before this one got whole stripes, a little more or less than planned.
        load -= _by_rank(ranks, holders, part)
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


def _level_shares(load: Column, sets: Sequence[tuple[Column, int]]) -> list[Column]:
    """Return how much each rank of several sets reads of what its set wants, so that ranks are level.

    Args:
        load: what each rank reads besides.
        sets: the ranks of each, and how much it wants.
    """
    total = load.copy()
    shares = [np.zeros_like(ranks) for ranks, _ in sets]
    # What one set reads leaves other sets' ranks more or less, so all are levelled again, until little moves.
    for _ in range(_MOST_PASSES):
        moved = 0
        for number, (ranks, wanted) in enumerate(sets):
            others = total[ranks] - shares[number]
            share = _level_parts(others, wanted)
            moved = max(moved, int(np.abs(share - shares[number]).max()))
            total[ranks], shares[number] = others + share, share
        if moved * 100 <= int(total.max(initial=0)):
            break
    return shares


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
