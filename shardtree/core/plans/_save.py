"""Choice of the rank that writes each shard, and balanced division of bytes among the ranks that hold them.

A place is a pair of key and box (or flat range of a box). All replicas of a shard have the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..geometry import Column, Mask, begins, distinct, joined_rows, row_numbers
from ..layouts import ShardColumns, check_columns


def main_writes(columns: ShardColumns) -> Mask:
    """Choose the shards to write if ranks don't know each other's layouts: all main replicas.

    Returns:
        Flags of the chosen shards, bool (shards,).

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=replica) for replica in (0, 1)]
        >>> main_writes(st.layouts.shard_columns(shards)).tolist()
        [True, False]
    """
    check_columns("main_writes", columns)
    return columns.main


def level_writes(columns: ShardColumns, ranks: int) -> Mask:
    """Choose the replica of each shard to write, so that all ranks write balanced numbers of bytes.

    Every rank must know the layouts of all ranks. Shards with the same set of holding ranks are sorted by size,
    largest first, and assigned to these ranks in snake order (0 1 2 2 1 0), beginning with the rank that has least to
    write so far. Within a set, no rank then writes more than the mean plus the largest shard. Sets with fewer ranks
    come first, since they leave less choice. Ties are broken by key, then by box, so that every rank computes the same
    result from the same columns.

    Args:
        columns: Shards of all ranks; a shard without any main replica isn't written.
        ranks: Number of ranks.

    Returns:
        Flags, bool (shards,): true for exactly one replica of each shard that has a main replica on some rank.

    Examples:
        >>> import torch, shardtree as st
        >>> def held_by(rank):
        ...     shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(4), replica_id=rank) for key in "ab"]
        ...     return st.layouts.shard_columns(shards, rank)
        >>> columns = st.layouts.join_columns([held_by(0), held_by(1)])
        >>> [(columns.keys[key], rank) for key, rank in zip(columns.key[level_writes(columns, 2)], (0, 1))]
        [('a', 0), ('b', 1)]
    """
    check_columns("level_writes", columns)
    place, places = held_places(columns)
    is_wanted = np.bincount(place[columns.main], minlength=places) > 0
    return balanced_rows(columns, ranks, place, is_wanted)


def balanced_rows(columns: ShardColumns, ranks: int, place: Column, is_wanted: Mask) -> Mask:
    """Choose one replica of each wanted shard, so that the chosen bytes are balanced over the ranks.

    Args:
        columns: Shards of all ranks.
        ranks: Number of ranks.
        place: Number of each shard's place (key and box), from `held_places`, int64 (shards,).
        is_wanted: Whether a replica of each place must be chosen, bool (places,).

    Returns:
        Flags of the chosen shards, bool (shards,).
    """
    size = np.zeros(is_wanted.size, dtype=np.int64)
    size[place] = columns.nbytes
    writer = np.full(is_wanted.size, -1, dtype=np.int64)
    holders = find_holders(place, columns.rank, is_wanted)
    # Places with a single holder leave no choice: their bytes count as load before the others are assigned.
    alone = holders.count == 1
    only = holders.rank[holders.first[alone]]
    writer[holders.place[alone]] = only
    # Weights are floats, exact up to 2**53 bytes; beyond that the balance is a little off, alike on every rank.
    load = np.bincount(only, weights=size[holders.place[alone]], minlength=ranks).astype(np.int64)
    for places, members in holder_sets(holders):
        order = members[np.argsort(load[members], kind="stable")]
        by_size = places[np.argsort(-size[places], kind="stable")]
        # Snake order goes back and forth over the ranks.
        turn, position = np.divmod(np.arange(by_size.size), order.size)
        writer[by_size] = order[np.where(turn % 2 == 0, position, order.size - 1 - position)]
        np.add.at(load, writer[by_size], size[by_size])
    return _first_row_of(place, columns.rank, writer)


def held_places(columns: ShardColumns) -> tuple[Column, int]:
    """Number the distinct places of shards; replicas of a shard get the same number.

    Places are numbered in the order of key, then box, so that all ranks number them alike.

    Returns:
        The number of each shard's place, int64 (shards,), and the count of places.
    """
    boxes = (*columns.offset.T, *columns.shape.T)
    return row_numbers((columns.key, *boxes, columns.start, columns.stop))


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """The ranks that hold a replica of each place (key and box), called its holders.

    Attributes:
        place: Numbers of the places, ascending, int64 (places,).
        count: Number of holders of each place, int64 (places,).
        first: Index in `rank` of each place's first holder, int64 (places,).
        rank: Holders of the first place, ascending, then those of the second place, and so on, int64 (holders,).
    """

    place: Column
    count: Column
    first: Column
    rank: Column


def find_holders(place: Column, rank: Column, is_wanted: Mask) -> Holders:
    ranks = int(rank.max(initial=0)) + 1
    # Place and rank, packed in one integer, sort many times faster than as two columns.
    pairs = distinct((place * ranks + rank)[is_wanted[place]])
    of = pairs // ranks
    first = np.flatnonzero(begins(of))
    return Holders(of[first], np.diff(first, append=of.size), first, pairs - of * ranks)


def holder_sets(holders: Holders) -> Iterator[tuple[Column, Column]]:
    """Yield ``(places, ranks)`` for each set of two or more ranks: the places that exactly these ranks hold.

    Both are int64 columns: the numbers of the places, and the ranks. Smaller sets come first.
    """
    for count in distinct(holders.count[holders.count > 1]).tolist():
        numbers = np.flatnonzero(holders.count == count)
        members = holders.rank[holders.first[numbers][:, None] + np.arange(count)]
        number, sets = row_numbers(members.T)
        order = np.argsort(number, kind="stable")
        ends = np.cumsum(np.bincount(number, minlength=sets))[:-1]
        for part in np.split(order, ends):
            yield holders.place[numbers[part]], members[part[0]]


def _first_row_of(place: Column, rank: Column, writer: Column) -> Mask:
    rows = np.flatnonzero(writer[place] == rank)
    # A rank may hold two replicas of a place, and must write only one of them.
    _, first = np.unique(place[rows], return_index=True)
    writes = np.zeros(place.size, dtype=np.bool_)
    writes[rows[first]] = True
    return writes


# Division of bytes that several ranks could read or send: each rank takes a part, so that their loads are balanced.

_SWEEPS = 8
_MANY_SETS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class HeldLine:
    """Items of data that one set of ranks holds, laid end to end as a line of bytes to divide among these ranks.

    Attributes:
        item: Number of each item, int64 (items,).
        size: Size of each item in bytes, int64 (items,).
        row: Row size of each item in bytes, int64 (items,). An item may be cut between rows; 0 if it must stay whole.
        holders: Ranks that hold the items, ascending, int64 (holders,).
    """

    item: Column
    size: Column
    row: Column
    holders: Column


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of items, each with the rank that sends or reads it.

    Attributes:
        item: Number of the item, int64 (parts,).
        begin: Offset of the part's first byte in the item, int64 (parts,).
        end: Offset after the part's last byte in the item, int64 (parts,).
        sender: Rank that sends or reads the part, int64 (parts,).
    """

    item: Column
    begin: Column
    end: Column
    sender: Column


def deal_out(alone: Parts, lines: list[HeldLine], load: Column, shortest_cut: int) -> Parts:
    """Divide items of data among the ranks that hold them, so that the bytes to send or read are balanced over ranks.

    Args:
        alone: Parts of items that only one rank can take; the result has them too.
        lines: Items to divide, grouped by the set of ranks that hold them.
        load: Number of further bytes that each rank sends or reads, int64 (ranks,).
        shortest_cut: Smallest distance in bytes between a cut and the ends of the item that it divides.

    Examples:
        >>> none, one = np.zeros(0, dtype=np.int64), np.array([100])
        >>> line = HeldLine(one * 0, one, one // 50, np.arange(2))
        >>> parts = deal_out(Parts(*[none] * 4), [line], np.array([20, 0]), 1)
        >>> parts.sender.tolist(), parts.begin.tolist(), parts.end.tolist()
        ([0, 1], [0, 40], [40, 100])
    """
    load = _add_load(load, alone, 1)
    assignments: list[Parts] = []
    for line in lines:
        assignments.append(_assign_line(line, load[line.holders], shortest_cut))
        load = _add_load(load, assignments[-1], 1)
    # The first pass knows only the loads of earlier lines. Sweeps assign each line again, given the loads of all other
    # lines, until nothing changes. With very many lines they would take long.
    for _ in range(_SWEEPS if 1 < len(lines) <= _MANY_SETS else 0):
        before = load
        for number, line in enumerate(lines):
            load = _add_load(load, assignments[number], -1)
            assignments[number] = _assign_line(line, load[line.holders], shortest_cut)
            load = _add_load(load, assignments[number], 1)
        if np.array_equal(before, load):
            break
    return joined_rows([alone, *assignments])


def _add_load(load: Column, parts: Parts, sign: int) -> Column:
    load = load.copy()
    np.add.at(load, parts.sender, sign * (parts.end - parts.begin))
    return load


def _assign_line(line: HeldLine, load: Column, shortest_cut: int) -> Parts:
    """Divide items of data among the ranks that hold them: each gets an interval of bytes, longer if its load is lower.

    Args:
        line: Items, laid end to end as a line of bytes, and the ranks that hold them.
        load: Number of other bytes that each of these ranks sends or reads, int64 (holders,).
        shortest_cut: Smallest distance in bytes between a cut and the ends of the item that it divides.
    """
    end = np.cumsum(line.size)
    begin = end - line.size
    bounds = np.cumsum(_shares(load, int(end[-1])))[:-1]
    inside = np.searchsorted(begin, bounds, side="right") - 1
    cuts = snap(bounds, begin[inside], line.size[inside], line.row[inside], shortest_cut)
    edges = np.sort(np.concatenate([begin, cuts[cuts < end[-1]]]))
    edges = edges[np.append(True, edges[1:] > edges[:-1])]
    item = np.searchsorted(begin, edges, side="right") - 1
    sender = line.holders[np.searchsorted(cuts, edges, side="right")]
    stops = np.append(edges[1:], end[-1])
    return Parts(line.item[item], edges - begin[item], stops - begin[item], sender)


def snap(bounds: Column, begin: Column, size: Column, row: Column, shortest_cut: int) -> Column:
    """Return an allowed cut near each intended cut of a line of bytes, int64 (cuts,).

    The line consists of items of data, laid end to end. A cut is allowed between two items. It is also allowed between
    two rows of an item, unless it is too close to an end of the item.

    Args:
        bounds: Intended cuts, as offsets in the line, int64 (cuts,).
        begin: Offset of the item that contains each intended cut, int64 (cuts,).
        size: Size of that item in bytes, int64 (cuts,).
        row: Row size of that item in bytes, 0 if the item must stay whole, int64 (cuts,).
        shortest_cut: Smallest distance in bytes between a cut and the ends of the item that it divides.
    """
    at = bounds - begin
    whole = np.where(2 * at > size, size, 0)
    rows = np.maximum(row, 1)
    cut = (at + rows // 2) // rows * rows
    cut = np.where(cut < shortest_cut, 0, np.where(size - cut < shortest_cut, size, cut))
    return begin + np.where(row > 0, cut, whole)


def _shares(load: Column, total: int) -> Column:
    """Divide a number of bytes among ranks, so that the highest of the resulting loads is as low as possible.

    Args:
        load: Number of bytes that each rank has already, int64 (ranks,).
        total: Number of bytes to divide.

    Returns:
        Each rank's share of the total, int64 (ranks,).
    """
    order = np.argsort(load, kind="stable")
    above = load[order] - load.min()
    need = above * np.arange(load.size) - (np.cumsum(above) - above)
    count = int(np.searchsorted(need, total, side="right"))
    level, more = divmod(total + int(above[:count].sum()), count)
    share = np.zeros_like(load)
    share[order[:count]] = level - above[:count] + (np.arange(count) < more)
    return share
