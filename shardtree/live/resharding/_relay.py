"""Relays: elements that several ranks want leave the sources once, and the receivers pass them on among themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...core.geometry import (
    Column,
    aligned_boxes,
    check_type,
    first_rows,
    group_sums,
    integer,
    joined_rows,
    row_numbers,
    rows_of,
    volumes,
)
from ...core.plans import snap
from ._plan import SHORTEST_CUT, ReshardPlan
from ._transfers import Routes, Transfers, as_transfers

# The parts that each receiver gets from the sources.


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Parts of boxes. A part is a whole box, or a range of indices along the box's longest axis.

    Attributes:
        box: Index of the box, int64 (parts,).
        axis: Longest axis of the box, int64 (parts,).
        begin: First index of the part along that axis, within the box, int64 (parts,).
        size: Number of indices along that axis, int64 (parts,).
        member: Index of the receiver among the ranks that want the box, int64 (parts,).
    """

    box: Column
    axis: Column
    begin: Column
    size: Column
    member: Column


def relay_parts(shape: Column, item: Column, ranks: Column, senders: Column, shortest_cut: int) -> Parts:
    """Return parts of the boxes that several ranks want, each assigned to one of these ranks.

    Boxes form a group if the same ranks want them and would get them from the same senders. The boxes of a group are
    laid end to end in a line, so that few of them are cut. The line is divided into about equal intervals, one for each
    of these ranks. If they can't be quite equal, the ranks with the fewest bytes so far get the longest ones.

    Args:
        shape: Shape of each box, without zeros, int64 (boxes, axes).
        item: Bytes of an element of each box, int64 (boxes,).
        ranks: Ranks that want each box, equally many for all boxes, int64 (boxes, members).
        senders: Rank that would send the box to each of `ranks`, int64 (boxes, members).
        shortest_cut: Lower bound of the size of a cut box's parts, in bytes.

    Examples:
        >>> ones = np.ones((1, 2), dtype=np.int64)
        >>> parts = relay_parts(np.array([[8, 3]]), np.array([4]), ones * [1, 2], ones * 0, 1)
        >>> parts.begin.tolist(), parts.size.tolist(), parts.member.tolist()
        ([0, 4], [4, 4], [0, 1])
    """
    members = ranks.shape[1]
    group, groups = row_numbers((*ranks.T, *senders.T))
    first = first_rows(group, groups)
    line = np.argsort(group, kind="stable")
    group, axis = group[line], shape[line].argmax(axis=1)
    size = (volumes(shape) * item)[line]
    row = size // shape[line, axis]
    end = np.cumsum(size)
    begin = end - size
    # Boxes that are too short to cut go whole to one receiver: a row of 0 bytes marks them.
    cuts = _cuts(group, begin, end, np.where(size >= 2 * shortest_cut, row, 0), members, shortest_cut)
    edges = np.sort(np.concatenate([begin, cuts]), kind="stable")  # union1d is much slower
    edges = edges[(np.diff(edges, prepend=-1) > 0) & (edges < end[-1])]
    place = np.searchsorted(begin, edges, side="right") - 1
    length = np.append(edges[1:], end[-1]) - edges
    interval = np.searchsorted(cuts, edges, side="right") - group[place] * (members - 1)
    intervals = group_sums((group[place], interval), length, (groups, members))
    member = _assign(intervals, ranks[first])[group[place], interval]
    return Parts(line[place], axis[place], (edges - begin[place]) // row[place], length // row[place], member)


def _cuts(group: Column, begin: Column, end: Column, row: Column, members: int, shortest_cut: int) -> Column:
    """Return the byte offsets at which lines of boxes are cut into intervals, ascending.

    The boxes of a group, laid end to end, are a line. Lines are laid end to end too, and offsets count from the first.

    Args:
        group: Number of each box's group, ascending, int64 (boxes,).
        begin: Offset of each box's first byte, int64 (boxes,).
        end: Offset after each box's last byte, int64 (boxes,).
        row: Granularity of each box's cuts in bytes; 0 for a box that must stay whole, int64 (boxes,).
        members: Number of intervals in each line.
        shortest_cut: Lower bound of the size of a cut box's parts, in bytes.
    """
    first = np.flatnonzero(np.diff(group, prepend=-1))
    last = np.append(first[1:], group.size) - 1
    total = end[last] - begin[first]
    bounds = (begin[first][:, None] + total[:, None] * np.arange(1, members) // members).ravel()
    inside = np.searchsorted(begin, bounds, side="right") - 1
    return snap(bounds, begin[inside], (end - begin)[inside], row[inside], shortest_cut)


def _assign(intervals: Column, ranks: Column) -> Column:
    """Return the rank that gets each interval, as an index into its group's `ranks`, int64 (groups, members).

    In each group, the longest interval goes to the rank with the fewest bytes so far, counted over all groups of the
    same ranks. So two ranks' totals differ at most by the largest difference between two intervals of one group.

    Args:
        intervals: Sizes of each group's intervals in bytes, int64 (groups, members).
        ranks: Ranks that want each group's boxes, int64 (groups, members).
    """
    number, sets = row_numbers(ranks.T)
    load, member = np.zeros((sets, ranks.shape[1]), dtype=np.int64), np.empty_like(intervals)
    for group, (lengths, together) in enumerate(zip(intervals, number.tolist(), strict=True)):
        longest, least = np.argsort(-lengths, kind="stable"), np.argsort(load[together], kind="stable")
        member[group, longest] = least
        load[together, least] += lengths[longest]
    return member


def with_relays(plan: ReshardPlan, *, shortest_cut: int = SHORTEST_CUT) -> ReshardPlan:
    """Return a plan in which sources send each element only once, even if several ranks want it.

    The elements that k ranks lack are divided into k parts: each rank receives one part from the sources (hop 0), and
    passes it on to the k - 1 others (hop 1). So each rank receives as many bytes as before, a k-th of them from the
    sources, and sends its part k - 1 times. In total no more bytes move. If different sources would have sent to these
    ranks, they share the sending. Elements that one rank wants move as before. Boxes that overlap and differ are cut,
    so that their common elements are a separate box. Parts are only about equal: a box is cut between two indices of
    its longest axis, and into parts of at least `shortest_cut` bytes.

    Args:
        plan: Plan without relays.
        shortest_cut: Lower bound of the size of a cut box's parts, in bytes.

    Raises:
        MetadataError: `plan` isn't a plan, or `shortest_cut` isn't an integer.

    Examples:
        >>> import torch, shardtree as st
        >>> def whole(rank): return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2**20), replica_id=rank)}
        >>> plan = st.plan_reshard({0: whole(0)}, {rank: whole(rank) for rank in range(1, 5)})
        >>> once = with_relays(plan)
        >>> plan.leaving([0]), once.leaving([0]), once.bytes_moved
        (16777216, 4194304, 16777216)
    """
    check_type("with_relays", "plan", plan, ReshardPlan, "Pass the result of `plan_reshard`.")
    shortest = max(1, integer("with_relays", "shortest_cut", shortest_cut))
    # Relays are added to any plan, not made by the planner: whether they pay depends on links that a plan doesn't know,
    # and the result can be printed, checked and scheduled like the plan itself.
    every = plan.transfers
    # Later hops and copies within a rank use no link from the sources.
    moving = np.flatnonzero((every.hop == 0) & (every.from_rank != every.to_rank) & (every.nbytes > 0))
    boxes = aligned_boxes(every.key[moving], every.offset[moving], every.shape[moving])
    row = moving[boxes.row]
    several = _wanted_by_several(boxes.number, every.to_rank[row])
    shared, cut = np.zeros(row.size, dtype=np.bool_), np.zeros(len(every), dtype=np.bool_)
    shared[several], cut[row[several]] = True, True
    stays, relayed = np.flatnonzero(~cut), np.flatnonzero(cut[row] & ~shared)
    pieces = Routes(every.hop[row], every.source[row], every.target[row], boxes.offset, boxes.shape)
    wholes = Routes(every.hop, every.source, every.target, every.offset, every.shape)
    others = [rows_of(wholes, stays), rows_of(pieces, relayed)]
    relays = _relay_routes(plan, rows_of(pieces, several), boxes.number[several], shortest)
    routes = joined_rows([*others, *relays])
    return replace(plan, transfers=_order_local_copies(as_transfers(plan.source, plan.target, routes)))


def _wanted_by_several(number: Column, to_rank: Column) -> Column:
    """Return the rows of boxes that several ranks want, ordered by box number, then rank.

    If one rank wants a box several times, only the first of these rows is returned.

    Args:
        number: Number of each row's box, the same for equal boxes, int64 (rows,).
        to_rank: Rank that wants each row's box, int64 (rows,).
    """
    order = np.lexsort((to_rank, number))
    first = order[np.any(np.diff(np.stack([number, to_rank])[:, order], prepend=-1) != 0, axis=0)]
    ranks = np.bincount(number[first])
    return np.asarray(first[ranks[number[first]] > 1])


def _relay_routes(plan: ReshardPlan, pieces: Routes, number: Column, shortest_cut: int) -> list[Routes]:
    """Return the routes that bring boxes, in two hops, to the ranks that want them.

    Args:
        plan: Plan without relays.
        pieces: Direct routes in `plan` of these boxes, one to each rank that wants a box, ordered by `number`, then by
            receiving rank.
        number: Number of each route's box, the same for equal boxes, int64 (pieces,).
        shortest_cut: Lower bound of the size of a cut box's parts, in bytes.
    """
    _, first, count = np.unique(number, return_index=True, return_counts=True)
    routes: list[Routes] = []
    for size in np.unique(count).tolist():
        member = first[count == size][:, None] + np.arange(size)  # (boxes, members)
        box = rows_of(pieces, member[:, 0])
        item = plan.target.item_size[plan.target.key[box.target]]
        ranks, senders = plan.target.rank[pieces.target[member]], plan.source.rank[pieces.source[member]]
        parts = relay_parts(box.shape, item, ranks, senders, shortest_cut)
        routes += _both_hops(pieces, member[parts.box], parts)
    return routes


def _both_hops(pieces: Routes, member: Column, parts: Parts) -> list[Routes]:
    """Return the routes of parts in two hops: from the source to one rank, and from this rank to the others.

    Args:
        pieces: Direct routes of the boxes that are divided into parts.
        member: Rows in `pieces`, int64 (parts, members). Entry [i, j] is the direct route of the box of part i to the
            j-th rank that wants the box.
        parts: Parts of the boxes.

    Returns:
        The routes of the first hop; then those of the second hop, one `Routes` for each of the other ranks.
    """
    row = np.arange(len(member))
    first = rows_of(pieces, member[row, parts.member])
    offset, shape = first.offset.copy(), first.shape.copy()
    offset[row, parts.axis] += parts.begin
    shape[row, parts.axis] = parts.size
    # Members are rotated, so that in each round of the second hop every rank sends to a different one.
    others = [(parts.member + turn) % member.shape[1] for turn in range(1, member.shape[1])]
    targets = [pieces.target[member[row, other]] for other in others]
    onwards = [Routes(np.ones_like(first.hop), first.target, target, offset, shape) for target in targets]
    return [Routes(first.hop, first.source, first.target, offset, shape), *onwards]


def _order_local_copies(transfers: Transfers) -> Transfers:
    """Return the transfers in an order in which a rank copies out of a target shard only after the shard is filled."""
    own = (transfers.from_rank == transfers.to_rank) & (transfers.hop > 0)
    if not own.any():
        return transfers
    late = np.isin(transfers.source, transfers.target[(transfers.hop == 1) & ~own])
    # Such a copy had hop 1, when its source was filled at hop 0. Now parts of that source arrive at hop 1 as well.
    later = replace(transfers, hop=np.where(own & late, 2, transfers.hop))
    order = np.argsort(later.hop, kind="stable")
    return rows_of(later, order)
