"""Which rank reads what for others, and passes it on in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..geometry import Column, begins, distinct
from ..layouts import ShardColumns
from ._cells import MOST_CELLS, Cells, wanted_cells
from ._save import Holders, find_holders, holder_sets
from ._text import size_text, table_lines

# Shards that several ranks want are read once and passed on, in rounds of bounded size.

ROUND_BYTES = 64 * 1024 * 1024
"""The most bytes that all ranks together pass on in one round."""


STRIPE_BYTES = 1024 * 1024
"""Shards are cut between readers at multiples of this: whole requests, and few hashed blocks that two ranks read."""

_MOST_PASSES = 16


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SharedReads:
    """Which rank reads which bytes of what several ranks want. Its text is a table.

    Attributes:
        ranks: how many there are.
        cells: the parts of shards that are wanted whole; bytes are counted in a cell, row-major.
        holder: who wants each cell, in the order of `cells.cell`: a rank, or a number of alike ones, int64 (wants,).
        alike: for each such number, the ranks that want the same, ascending; a rank is in one of them.
        size: of each cell in bytes, int64 (cells,).
        reader: who reads, int64 (reads,).
        cell: of which it reads some, int64 (reads,).
        row: its own shard that has the cell, a row of all ranks' columns, int64 (reads,).
        read_start: first byte of the cell that is read, int64 (reads,).
        read_stop: one past the last, int64 (reads,).
        bytes_sent: how many bytes each rank sends to others, int64 (ranks,).
        bytes_received: how many bytes each rank is sent by others, int64 (ranks,).
    """

    ranks: int
    cells: Cells
    holder: Column
    alike: Sequence[Column]
    size: Column
    reader: Column
    cell: Column
    row: Column
    read_start: Column
    read_stop: Column
    bytes_sent: Column
    bytes_received: Column

    @property
    def bytes_read(self) -> Column:
        """How many bytes each rank reads, int64 (ranks,)."""
        return _by_rank(self.ranks, self.reader, self.read_stop - self.read_start)

    @property
    def bytes_wanted(self) -> Column:
        """How many bytes each rank asks for, int64 (ranks,)."""
        return _by_rank(len(self.alike), self.holder, self.size[self.cells.cell])[self.number]

    @property
    def number(self) -> Column:
        """Which of `alike` each rank is in, int64 (ranks,)."""
        return _numbers_of(self.alike, self.ranks)

    def __repr__(self) -> str:
        columns = (self.bytes_read.tolist(), self.bytes_sent.tolist(), self.bytes_received.tolist())
        rows = [(str(rank), *map(size_text, row)) for rank, row in enumerate(zip(*columns, strict=True))]
        return "\n".join(table_lines([("rank", "reads", "sends", "receives"), *rows]))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExchangePlan(SharedReads):
    """Which rank reads which bytes, and to which ranks it sends them in which round. Its text is a table.

    Attributes:
        read: what is passed on: the number of a read, int64 (transfers,).
        target: the shard that gets it, a row of the columns, int64 (transfers,).
        sender: the rank of the reader, int64 (transfers,).
        receiver: the rank of the target, int64 (transfers,).
        start: first byte of the cell that is passed on, int64 (transfers,).
        stop: one past the last, int64 (transfers,).
        round: when, ascending, int64 (transfers,).
    """

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
    shared = plan_reads(columns, ranks, stripe_bytes=stripe_bytes, most_cells=most_cells, is_cut=is_cut)
    cells, cell = shared.cells, shared.cell
    by_cell = np.argsort(cells.cell, kind="stable")
    count = np.bincount(cells.cell, minlength=shared.size.size)
    first = np.cumsum(count) - count
    # Each read meets all rows that want its cell, but the one of the reader that it is read into.
    read = np.repeat(np.arange(cell.size), count[cell])
    number = np.arange(read.size) - np.repeat(np.cumsum(count[cell]) - count[cell], count[cell])
    target = cells.row[by_cell[first[cell[read]] + number]]
    others = np.flatnonzero(target != shared.row[read])
    read, target = read[others], target[others]
    of, start, stop, turn = _in_rounds(shared.read_start[read], shared.read_stop[read], round_bytes)
    read, target = read[of], target[of]
    return ExchangePlan(
        **{name: getattr(shared, name) for name in SharedReads.__slots__},
        read=read,
        target=target,
        sender=shared.reader[read],
        receiver=columns.rank[target],
        start=start,
        stop=stop,
        round=turn,
    )


def plan_reads(
    columns: ShardColumns,
    ranks: int,
    *,
    stripe_bytes: int = STRIPE_BYTES,
    most_cells: int = MOST_CELLS,
    is_cut: bool = True,
    alike: Sequence[Column] | None = None,
    besides: Column | None = None,
) -> SharedReads:
    """Return what each rank reads by `plan_exchange`, and how much it sends and receives, without the transfers.

    There are as many of these as ranks that want a cell times those that read some of it. Ranks that want the same
    are described once: what this takes doesn't grow with the replicas.

    Args:
        columns: the shards that all ranks want.
        ranks: how many ranks there are.
        stripe_bytes: as in `plan_exchange`.
        most_cells: likewise.
        is_cut: likewise.
        alike: the ranks, ascending, that each number in ``columns.rank`` stands for; None if these are ranks.
        besides: how many bytes each rank reads of what no other wants, if that isn't in the columns, int64 (ranks,).

    Examples:
        >>> import torch, shardtree as st
        >>> shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(1024))
        >>> plan_reads(st.layouts.shard_columns([shard]), 4, stripe_bytes=1024, alike=[np.arange(4)])
        rank   reads   sends  receives
           0  1.0 kB  3.1 kB    3.1 kB
           1  1.0 kB  3.1 kB    3.1 kB
           2  1.0 kB  3.1 kB    3.1 kB
           3  1.0 kB  3.1 kB    3.1 kB
    """
    alike = list(np.arange(ranks)[:, None]) if alike is None else alike
    number = _numbers_of(alike, ranks)
    cells = wanted_cells(columns, is_cut=is_cut, most=most_cells)
    item = columns.item_size[cells.key]
    size = cells.elements * item
    stripe = -(-stripe_bytes // item) * item if is_cut else np.maximum(size, 1)
    holder = columns.rank[cells.row]
    cell, reader, start, stop = _stripes(
        holder, alike, cells.cell, size, stripe, np.zeros(ranks, dtype=np.int64) if besides is None else besides
    )
    # Who wants which cell, each pair once: with its first row, and how many rows of that holder want it.
    pair = cells.cell * len(alike) + holder
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first = np.flatnonzero(begins(pair))
    rows, pair, row = np.diff(first, append=pair.size), pair[first], cells.row[order[first]]
    at = np.searchsorted(pair, cell * len(alike) + number[reader])
    of, who = np.divmod(pair, max(len(alike), 1))
    wanted = np.zeros(size.size, dtype=np.int64)
    np.add.at(wanted, of, rows * np.array([each.size for each in alike], dtype=np.int64)[who])
    # Two shards of one rank may want the same: what it passes on to itself is copied, not sent.
    sent = _by_rank(ranks, reader, (stop - start) * (wanted[cell] - rows[at]))
    own = _by_rank(ranks, reader, (stop - start) * rows[at])
    received = _by_rank(len(alike), who, size[of] * rows)[number] - own
    return SharedReads(ranks, cells, holder, alike, size, reader, cell, row[at], start, stop, sent, received)


def _numbers_of(alike: Sequence[Column], ranks: int) -> Column:
    """Return which of several lists of ranks each rank is in."""
    number = np.zeros(ranks, dtype=np.int64)
    for each, members in enumerate(alike):
        number[members] = each
    return number


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
    holder: Column, alike: Sequence[Column], place: Column, size: Column, stripe: Column, besides: Column
) -> tuple[Column, Column, Column, Column]:
    """Return who reads which bytes of which place, as (place, reader, start, stop); places of no bytes are left out."""
    held = find_holders(place, holder, size > 0)
    # What only one rank wants leaves no choice: it counts as load before the rest is shared out.
    lone, only = _alone(held, alike)
    ranks = besides.size
    load = besides + _by_rank(ranks, only, size[lone])
    found = [(lone, only, np.zeros_like(lone), size[lone])]
    sets = _rank_sets(held, alike)
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


def _alone(held: Holders, alike: Sequence[Column]) -> tuple[Column, Column]:
    """Return the places that only one rank holds, and which one does."""
    first = np.array([each[0] for each in alike], dtype=np.int64)
    is_one = np.array([each.size == 1 for each in alike], dtype=np.bool_)
    holder = held.rank[held.first]
    alone = (held.count == 1) & is_one[holder]
    return held.place[alone], first[holder[alone]]


def _rank_sets(held: Holders, alike: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Return the places that each set of several ranks holds, and those ranks, ascending; smaller sets first."""
    sets = [*holder_sets(held)]
    if all(each.size == 1 for each in alike):
        return [(places, np.concatenate([alike[each] for each in holders])) for places, holders in sets]
    of_one = np.where(held.count == 1, held.rank[held.first], -1)
    sets += [(held.place[of_one == each], np.array([each])) for each in distinct(of_one[of_one >= 0])]
    ranks = [(places, np.sort(np.concatenate([alike[each] for each in holders]))) for places, holders in sets]
    # In the order of the sets of ranks, whatever stands for them: one plan, however ranks are described.
    return sorted((one for one in ranks if one[1].size > 1), key=lambda one: (one[1].size, one[1].tolist()))


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
