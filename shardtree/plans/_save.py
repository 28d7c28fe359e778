"""Who writes what: replicas of a shard are written once, the work spread over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..geometry import Column
from ..layouts import ShardColumns

Rows = np.ndarray[tuple[int], np.dtype[np.bool_]]


def main_writes(columns: ShardColumns) -> Rows:
    """Return which shards are written when no rank knows the others' layouts: the main replicas, all of them.

    Returns:
        bool (shards,).

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=replica) for replica in (0, 1)]
        >>> main_writes(st.shard_columns(shards)).tolist()
        [True, False]
    """
    return columns.main


def level_writes(columns: ShardColumns, ranks: int) -> Rows:
    """Return which shards are written when every rank knows all layouts, so that bytes per writer are level.

    Shards that lie on the same set of ranks are sorted by size and dealt to these ranks to and fro ("snake order"), so
    that within a set no rank writes more than the mean plus the largest shard. Sets with fewer ranks, which leave
    less choice, come first; each begins with the rank that has least to write so far. Ties break by key, then place:
    every rank computes the same answer from the same columns.

    Args:
        columns: the shards of all ranks; those without any main replica aren't written.
        ranks: how many ranks there are.

    Returns:
        bool (shards,): exactly one row is true for each shard that has a main replica somewhere.

    Examples:
        >>> import torch, shardtree as st
        >>> def held_by(rank):
        ...     shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(4), replica_id=rank) for key in "ab"]
        ...     return st.shard_columns(shards, rank)
        >>> columns = st.join_columns([held_by(0), held_by(1)])
        >>> [(columns.keys[key], rank) for key, rank in zip(columns.key[level_writes(columns, 2)], (0, 1))]
        [('a', 0), ('b', 1)]
    """
    place, places = held_places(columns)
    wanted = np.bincount(place[columns.main], minlength=places) > 0
    return deal_rows(columns, ranks, place, wanted)


def deal_rows(columns: ShardColumns, ranks: int, place: Column, wanted: Rows) -> Rows:
    """Return one row for each wanted place, chosen so that the bytes of each rank's rows are level.

    Args:
        columns: the shards of all ranks.
        ranks: how many ranks there are.
        place: where each shard lies, as `held_places` numbers it, int64 (shards,).
        wanted: which places need a row, bool (places,).
    """
    size = np.zeros(wanted.size, dtype=np.int64)
    size[place] = columns.elements * columns.item_size[columns.key]
    chosen = np.full(wanted.size, -1, dtype=np.int64)
    load = np.zeros(ranks, dtype=np.int64)
    for places, holders in _holder_sets(place, columns.rank, wanted):
        order = holders[np.argsort(load[holders], kind="stable")]
        dealt = places[np.argsort(-size[places], kind="stable")]
        chosen[dealt] = order[_snake(dealt.size, order.size)]
        load += np.bincount(chosen[dealt], weights=size[dealt], minlength=ranks).astype(np.int64)
    return _first_row_of(place, columns.rank, chosen)


def held_places(columns: ShardColumns) -> tuple[Column, int]:
    """Return where each shard lies, as a number that replicas share, and how many places there are.

    Places are numbered by key, then box, so that all ranks number them alike.

    Returns:
        int64 (shards,), and the count.
    """
    parts = (columns.key[:, None], columns.offset, columns.shape, columns.start[:, None], columns.stop[:, None])
    rows = np.ascontiguousarray(np.concatenate(parts, axis=1))
    order = np.lexsort(rows.T[::-1])
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.cumsum(new) - 1
    return place, int(new.sum())


def _holder_sets(place: Column, rank: Column, wanted: Rows) -> Iterator[tuple[Column, Column]]:
    """Yield (places, holders) for each set of ranks that holds places, smaller sets first."""
    pairs = np.unique(np.stack([place, rank], axis=1)[wanted[place]], axis=0)
    if not pairs.size:
        return
    places, first, holders = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    for count in np.unique(holders).tolist():
        chosen = holders == count
        members = pairs[first[chosen][:, None] + np.arange(count), 1]
        sets, number = np.unique(members, axis=0, return_inverse=True)
        order = np.argsort(number.reshape(-1), kind="stable")
        ends = np.cumsum(np.bincount(number.reshape(-1), minlength=len(sets)))
        for holder_set, part in zip(sets, np.split(places[chosen][order], ends[:-1]), strict=True):
            yield part, holder_set


def _snake(count: int, ranks: int) -> Column:
    turn, position = np.divmod(np.arange(count), ranks)
    return np.where(turn % 2 == 0, position, ranks - 1 - position)


def _first_row_of(place: Column, rank: Column, writer: Column) -> Rows:
    rows = np.flatnonzero(writer[place] == rank)
    _, first = np.unique(place[rows], return_index=True)
    writes = np.zeros(place.size, dtype=np.bool_)
    writes[rows[first]] = True
    return writes
