"""Plans of shared reads: the rank that reads each byte, and the reshard that passes it on.

Wanted shards are cut along each other's edges into cells: boxes that each shard contains whole or not at all. So one
rank can read a cell for all ranks that want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.geometry import (
    Column,
    Mask,
    aligned_boxes,
    distinct,
    first_rows,
    grid_cells,
    group_sums,
    rows_of,
    shared_groups,
    span_numbers,
)
from ...core.layouts import ShardColumns, select_rows, shard_boxes
from ...core.plans import HeldLine, Holders, Parts, deal_out, find_holders, held_places, holder_sets
from ...errors import size_text, table_lines
from . import ReshardPlan, plan_reshard

# The division of wanted shards into cells.

MOST_CELLS = 16
"""Upper bound of the cells per wanted box, averaged over a tensor; a tensor with more keeps its shards whole."""


@dataclass(frozen=True, slots=True, eq=False)
class WantedCells:
    """The wanted shards of all ranks, cut into cells: boxes that each shard contains whole or not at all.

    The shards of a tensor stay whole if they would have too many cells. Where they overlap, they then get separate
    tensor keys, so that cells of one tensor never overlap.

    Attributes:
        targets: The wanted shards.
        shards: The cells as shards, one per row. The rank of a cell is that of one of the shards that contain it.
        row: Row in `targets` of the shard in each pair of a shard and one of its cells, int64 (pairs,).
        cell: Row in `shards` of the cell in each of these pairs, int64 (pairs,).
    """

    targets: ShardColumns
    shards: ShardColumns
    row: Column
    cell: Column


def wanted_cells(columns: ShardColumns, *, is_cut: bool = True, most: int = MOST_CELLS) -> WantedCells:
    """Return the cells of shards: equal shards have the same cells; overlapping ones are cut along each other's edges.

    Args:
        columns: Wanted shards of all ranks; shards without elements have no cell.
        is_cut: Whether shards are cut; if not, cells are whole shards.
        most: Upper bound of the cells per wanted box, averaged over a tensor; a tensor with more keeps its shards
            whole.

    Examples:
        >>> import torch, shardtree as st
        >>> rows = [st.ShardedTensor("w", None, torch.int8, (2,), (3,), (at,), None) for at in (0, 1)]
        >>> cells = wanted_cells(st.layouts.shard_columns(rows))
        >>> cells.shards.offset.tolist(), cells.shards.shape.tolist(), cells.row.tolist(), cells.cell.tolist()
        ([[0], [1], [2]], [[1], [1], [1]], [0, 0, 1, 1], [0, 1, 1, 2])
    """
    place, places = held_places(columns)
    kept_row = first_rows(place, places)  # equal shards are cut alike: one at each place represents the others
    shards = select_rows(columns, kept_row)
    boxes = shard_boxes(shards.offset, shards.shape, shards.start, shards.stop)
    overlapping = shared_groups(shards.key[boxes.shard], boxes.offset, boxes.shape)
    overlaps = np.flatnonzero(np.isin(shards.key, overlapping)[boxes.shard] & (boxes.shape > 0).all(axis=1))
    key, offset, shape = shards.key[boxes.shard[overlaps]], boxes.offset[overlaps], boxes.shape[overlaps]
    many = np.bincount(key, grid_cells(key, offset, shape), len(columns.keys)) > most * np.bincount(
        key, minlength=len(columns.keys)
    )
    whole = many[key] if is_cut else np.ones(key.size, dtype=np.bool_)
    targets = _as_own_tensors(columns, place, distinct(boxes.shard[overlaps[whole]]))
    cut = overlaps[~whole]
    parts = aligned_boxes(key[~whole], offset[~whole], shape[~whole])
    is_whole = np.ones(places, dtype=np.bool_)
    is_whole[boxes.shard[cut]] = False
    uncut = np.flatnonzero(is_whole & (shards.elements > 0))
    first = first_rows(parts.number, int(parts.number.max(initial=-1)) + 1)
    cells = select_rows(targets, kept_row[np.concatenate([uncut, boxes.shard[cut[parts.row[first]]]])])
    cells.offset[uncut.size :], cells.shape[uncut.size :] = parts.offset[first], parts.shape[first]
    cells.start[uncut.size :], cells.stop[uncut.size :] = -1, -1
    # Cells belong to places so far; give them to all shards at these places.
    of = np.concatenate([uncut, boxes.shard[cut[parts.row]]])
    order = np.argsort(of, kind="stable")
    number = np.concatenate([np.arange(uncut.size), uncut.size + parts.number])[order]
    first, count = np.searchsorted(of[order], place), np.bincount(of, minlength=places)[place]
    row, at = span_numbers(first, count)
    return WantedCells(targets, cells, row, number[at])


def _as_own_tensors(columns: ShardColumns, place: Column, alone: Column) -> ShardColumns:
    """Return the shards with some boxes moved to tensor keys of their own, so that the moved boxes overlap no others.

    Args:
        columns: Shards of all ranks.
        place: Number of each shard's box, equal for equal boxes of a tensor, int64 (shards,).
        alone: Values in `place` of the boxes to move, ascending.
    """
    if not alone.size:
        return columns
    key = columns.key.copy()
    at = np.minimum(np.searchsorted(alone, place), alone.size - 1)
    mine = alone[at] == place
    key[mine] = len(columns.keys) + at[mine]
    of = np.zeros(alone.size, dtype=np.int64)
    of[at[mine]] = columns.key[mine]
    names = [*columns.keys, *(columns.keys[tensor] for tensor in of.tolist())]
    # All copies are numbered: a key with a number behind it might be another tensor's.
    keys = tuple(f"{number}: {name}" for number, name in enumerate(names))
    return replace(
        columns, keys=keys, kinds=(*columns.kinds, *(columns.kinds[tensor] for tensor in of.tolist())), key=key
    )


# The division of cells among readers.

STRIPE_BYTES = 1024 * 1024
"""Shards are cut between readers at multiples of this size, so that requests are whole and few hashed blocks are read
by two ranks."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SharedReads:
    """The bytes of wanted shards that each rank reads, for itself and for other ranks. Its `repr` is a table.

    Attributes:
        ranks: Number of ranks.
        targets: Wanted shards of all ranks. Shards that overlap but are read whole have tensor keys of their own.
        reads: Reads of all ranks, as shards of the tensors in `targets`.
        row: Row in `targets` for each read: the reader's first shard that contains the read, int64 (reads,).
        first: Row in `targets` at which each rank's shards begin, int64 (ranks,).
        is_whole: Whether each read covers the whole shard in `row`, bool (reads,).
        bytes_sent: Bytes that each rank sends to others, int64 (ranks,).
        bytes_received: Bytes that each rank receives from others, int64 (ranks,).
    """

    ranks: int
    targets: ShardColumns
    reads: ShardColumns
    row: Column
    first: Column
    is_whole: Mask
    bytes_sent: Column
    bytes_received: Column

    @property
    def bytes_read(self) -> Column:
        """Bytes that each rank reads, int64 (ranks,)."""
        return group_sums(self.reads.rank, self.reads.nbytes, self.ranks)

    def __repr__(self) -> str:
        columns = (self.bytes_read.tolist(), self.bytes_sent.tolist(), self.bytes_received.tolist())
        rows = [(str(rank), *map(size_text, row)) for rank, row in enumerate(zip(*columns, strict=True))]
        return "\n".join(table_lines([("rank", "reads", "sends", "receives"), *rows]))


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """The bytes that each rank reads, and the plan that passes them on to the other ranks that want them.

    Attributes:
        shared: Reads of all ranks.
        passed_on: Plan from the reads to the wanted shards, without elements that are read directly into them.
        element: Index of the element at which each read begins in the data of its shard (`shared.row`), int64 (reads,);
            -1 if the read isn't contiguous there.
    """

    shared: SharedReads
    passed_on: ReshardPlan
    element: Column


def plan_exchange(
    columns: ShardColumns,
    ranks: int,
    *,
    stripe_bytes: int = STRIPE_BYTES,
    most_cells: int = MOST_CELLS,
    is_cut: bool = True,
) -> ExchangePlan:
    """Return the plan for ranks that want the same elements: one rank reads them and passes them on to the others.

    The reads are those of `plan_reads`.

    Args:
        columns: Wanted shards of all ranks, ordered by rank.
        ranks: Number of ranks.
        stripe_bytes: Granularity in bytes of cuts between readers, rounded up to whole elements.
        most_cells: Argument of `plan_reads`: upper bound of the boxes into which a wanted box is cut, on average.
        is_cut: Whether different ranks may read parts of one shard, as for `plan_reads`.

    Examples:
        >>> import torch, shardtree as st
        >>> tree = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(1024))]
        >>> plan = plan_exchange(st.core.layouts.tree_columns([tree, tree]), 2, stripe_bytes=1024)
        >>> plan.shared.reads.rank.tolist(), plan.shared.reads.start.tolist(), plan.passed_on.links
        ([0, 1], [0, 512], {(0, 1): 2048, (1, 0): 2048})
    """
    shared = plan_reads(columns, ranks, stripe_bytes=stripe_bytes, most_cells=most_cells, is_cut=is_cut)
    plan = plan_reshard(shared.reads, shared.targets)
    transfers = plan.transfers
    # A read goes into its own shard, the first of its rank that wants it; the rank's other shards get copies.
    local = np.flatnonzero((transfers.from_rank == transfers.to_rank) & (transfers.hop == 0))
    local = local[transfers.target[local] == shared.row[transfers.source[local]]]
    source, shift = transfers.source[local], (transfers.target_element - transfers.source_element)[local]
    element = np.full(len(shared.reads), -1)
    element[source] = shift
    alike = ((transfers.source_stride == transfers.target_stride) | (transfers.shape == 1)).all(axis=1)
    element[source[~alike[local] | (shift != element[source])]] = -1
    remaining = np.delete(np.arange(len(transfers)), local[element[source] >= 0])
    return ExchangePlan(shared, replace(plan, transfers=rows_of(transfers, remaining)), element)


def plan_reads(
    columns: ShardColumns,
    ranks: int,
    *,
    stripe_bytes: int = STRIPE_BYTES,
    most_cells: int = MOST_CELLS,
    is_cut: bool = True,
    alike: Sequence[Column] | None = None,
) -> SharedReads:
    """Return the reads of each rank; elements that several ranks want are read once for all of them.

    Shards that overlap are cut along each other's edges into cells: boxes that each shard contains whole or not at all.
    The cells that a set of ranks wants are laid end to end and cut into one range per rank. A rank that has more to
    read elsewhere (cells that it alone wants, or ranges of other sets' cells) gets a shorter range, so that all ranks
    read about as much in total. Cuts lie between cells or at whole stripes, so a rank's share differs from an equal
    share by a stripe at most. With `alike`, ranks that want the same shards are described once, so the cost doesn't
    grow with the number of replicas.

    Args:
        columns: Wanted shards of all ranks, ordered by rank.
        ranks: Number of ranks.
        stripe_bytes: Size of a stripe: cells are cut between readers only at multiples of these bytes, rounded up to
            whole elements.
        most_cells: Upper bound of the cells per wanted box, averaged over a tensor. A tensor with more keeps its shards
            whole, and elements that they share are read more than once.
        is_cut: Whether different ranks may read parts of one shard. If False, a shard that several ranks want is read
            whole by one of them; shards that merely overlap are read separately.
        alike: Sets of ranks that want the same shards. ``columns.rank`` then has indices into this sequence, and each
            entry has the ranks of one set, ascending. None if ``columns.rank`` has ranks.

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
    number = np.zeros(ranks, dtype=np.int64)
    for stand_in, members in enumerate(alike):
        number[members] = stand_in
    cells = wanted_cells(columns, is_cut=is_cut, most=most_cells)
    item_size = cells.shards.item_size[cells.shards.key]
    size, holder = cells.shards.elements * item_size, columns.rank[cells.row]
    holders = find_holders(cells.cell, holder, size > 0)
    parts = _deal(holders, alike, size, -(-stripe_bytes // item_size) * item_size * is_cut, ranks)
    reads = _as_reads(cells.shards, parts, item_size, size)
    # Each rank counts once, however many of its shards want a cell: it receives a cell once and copies it to the
    # others.
    of, who = np.repeat(holders.place, holders.count), holders.rank
    wanting = group_sums(of, np.array([members.size for members in alike], dtype=np.int64)[who], size.size)
    length = parts.end - parts.begin
    bytes_sent = group_sums(parts.sender, length * (wanting[parts.item] - 1), ranks)
    bytes_received = group_sums(who, size[of], len(alike))[number] - group_sums(parts.sender, length, ranks)
    pair, part_pair = cells.cell * len(alike) + holder, parts.item * len(alike) + number[parts.sender]
    order = np.argsort(pair, kind="stable")
    row = cells.row[order[np.searchsorted(pair[order], part_pair)]]
    shard = select_rows(cells.targets, row)
    whole = (reads.offset == shard.offset).all(axis=1) & (reads.shape == shard.shape).all(axis=1)
    whole &= (reads.start == shard.start) & (reads.stop == shard.stop)
    first = np.searchsorted(columns.rank, number)
    return SharedReads(ranks, cells.targets, reads, row, first, whole, bytes_sent, bytes_received)


def _as_reads(cells: ShardColumns, parts: Parts, item_size: Column, size: Column) -> ShardColumns:
    """Return parts of cells as shards, each on the rank that reads it.

    A part that is a whole cell becomes a shard with the cell's box. Any smaller part becomes a flat range of this box.

    Args:
        cells: Cells as shards, one per row.
        parts: Byte ranges of cells, each with its reader.
        item_size: Bytes of an element of each cell, int64 (cells,).
        size: Size of each cell in bytes, int64 (cells,).
    """
    reads, item = select_rows(cells, parts.item), item_size[parts.item]
    cut = (parts.begin > 0) | (parts.end < size[parts.item])
    base = np.maximum(reads.start, 0)
    start = np.where(cut, base + parts.begin // item, reads.start)
    stop = np.where(cut, base + parts.end // item, reads.stop)
    return replace(reads, start=start, stop=stop, rank=parts.sender, main=np.ones_like(cut))


def _deal(holders: Holders, alike: Sequence[Column], size: Column, row: Column, ranks: int) -> Parts:
    """Divide cells (boxes of wanted elements) among readers; return byte ranges of cells, ordered by cell and byte.

    Args:
        holders: Sets of ranks that want each cell, as indices into `alike`. Cells without bytes are left out.
        alike: Sets of ranks that want the same shards, each in ascending order.
        size: Size of each cell in bytes, int64 (cells,).
        row: Granularity of each cell's cuts in bytes; 0 for a cell that must stay whole, int64 (cells,).
        ranks: Number of ranks.
    """
    # A cell that only one rank wants leaves no choice: it counts as load before the others are shared out.
    of_one = np.array([each.size == 1 for each in alike], dtype=np.bool_)
    only = holders.rank[holders.first]
    alone = (holders.count == 1) & of_one[only]
    reader = np.array([each[0] for each in alike], dtype=np.int64)[only[alone]]
    lone = holders.place[alone]
    lines = [HeldLine(places, size[places], row[places], members) for places, members in _rank_sets(holders, alike)]
    parts = deal_out(Parts(lone, np.zeros_like(lone), size[lone], reader), lines, np.zeros(ranks, dtype=np.int64), 1)
    return rows_of(parts, np.lexsort((parts.begin, parts.item)))


def _rank_sets(holders: Holders, alike: Sequence[Column]) -> list[tuple[Column, Column]]:
    """Return a pair ``(cells, ranks)`` for each set of several ranks: the cells wanted by exactly these ranks.

    Smaller sets come first.

    Args:
        holders: Sets of ranks that want each cell, as indices into `alike`.
        alike: Sets of ranks that want the same shards, each in ascending order.
    """
    sets = [*holder_sets(holders)]
    if all(each.size == 1 for each in alike):
        return [(places, np.concatenate([alike[each] for each in members])) for places, members in sets]
    of_one = np.where(holders.count == 1, holders.rank[holders.first], -1)
    sets += [(holders.place[of_one == each], np.array([each])) for each in distinct(of_one[of_one >= 0])]
    ranks = [(places, np.sort(np.concatenate([alike[each] for each in members]))) for places, members in sets]
    # Sets are ordered by their ranks, whatever stands for them, so that the plan doesn't depend on the description.
    return sorted((one for one in ranks if one[1].size > 1), key=lambda one: (one[1].size, one[1].tolist()))
