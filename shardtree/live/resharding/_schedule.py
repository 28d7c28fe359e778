"""Schedule: a plan's transfers in steps, so that each rank's bytes in flight stay bounded; and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core import limits
from ...core.deferred import notebook_html
from ...core.geometry import Column, Mask, group_sums, integer, refuse, row_numbers, rows_of
from ...errors import MetadataError, plural, size_text
from ._summary import steps_table
from ._transfers import Transfers

# Priorities let a relaying rank send before it has received everything.

_WAVES = 8
"""Number of parts into which a relaying rank's bytes are divided; it begins to send when the first has arrived."""


def priorities(transfers: Transfers) -> tuple[Column, Column]:
    """Return the priority of each transfer, and the priority of the transfers that its sender must await.

    Args:
        transfers: Transfers between ranks, ordered as in a plan.

    Returns:
        ``(priority, needs)``, int64 (transfers,): lower priorities go first. A transfer is ready when all transfers to
        its sender with priorities up to `needs` have arrived; at once if `needs` is -1.
    """
    first, later = (np.flatnonzero(transfers.hop == hop) for hop in (0, 1))
    passes_on = np.concatenate([transfers.target[first], transfers.source[later]])
    rows = np.concatenate([first, later])
    number, boxes = row_numbers((passes_on, *transfers.offset[rows].T, *transfers.shape[rows].T))
    arrival = np.full(boxes, -1)
    arrival[number[: first.size]] = first
    origin = arrival[number[first.size :]]
    if rows.size < len(transfers) or (origin < 0).any():  # a user's plan may pass on other boxes than arrived
        return transfers.hop, transfers.hop - 1
    priority, needs = np.full(len(transfers), _WAVES), np.full(len(transfers), -1)
    relays = first[np.isin(first, origin)]
    priority[relays] = _waves(transfers.to_rank[relays], transfers.nbytes[relays])
    priority[later], needs[later] = _WAVES + 1, priority[origin]
    return priority, needs


def _waves(rank: Column, nbytes: Column) -> Column:
    """Return the number of each transfer's wave, 0 to 7, which contains its first byte.

    All bytes to one receiver, in the order of its transfers, are divided into eight equal waves.

    Args:
        rank: Receiver of each transfer, ascending, int64 (transfers,).
        nbytes: Size of each transfer in bytes, int64 (transfers,).
    """
    end = np.cumsum(nbytes)
    begins = np.flatnonzero(np.diff(rank, prepend=-1))
    count = np.diff(begins, append=rank.size)
    before = np.repeat((end - nbytes)[begins], count)
    total = np.repeat(np.add.reduceat(nbytes, begins), count) if begins.size else end
    return np.asarray((end - nbytes - before) * _WAVES // np.maximum(total, 1))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Schedule:
    """The pieces of transfers that move in each step, one per row; transfers within a rank are left out.

    A piece is the range [start, stop) of the elements of a transfer's box, in row-major order.

    Attributes:
        step: Number of the step, ascending, int64 (pieces,).
        transfer: Row in the plan's transfers, int64 (pieces,).
        start: First element in the transfer's box, int64 (pieces,).
        stop: End of the elements in the transfer's box, exclusive, int64 (pieces,).
        from_rank: Sender, int64 (pieces,).
        to_rank: Receiver, int64 (pieces,).
        nbytes: Size in bytes, int64 (pieces,).
        max_bytes_in_flight: Upper bound of the bytes that a rank sends and receives together in one step.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(5))}
        >>> print(st.plan_reshard({0: whole}, {1: whole}).schedule(max_bytes_in_flight=12))
        2 steps, 2 pieces: 20 B move, at most 12 B per rank at once
        step  moves  fullest rank
           0   12 B  rank 0: 12 B
           1    8 B   rank 0: 8 B
    """

    step: Column
    transfer: Column
    start: Column
    stop: Column
    from_rank: Column
    to_rank: Column
    nbytes: Column
    max_bytes_in_flight: int

    def __len__(self) -> int:
        return len(self.step)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.step[-1]) + 1 if self.step.size else 0

    def __repr__(self) -> str:
        return f"Schedule({plural(self.steps, 'step')}, {plural(len(self), 'piece')})"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __str__(self) -> str:
        counts = f"{plural(self.steps, 'step')}, {plural(len(self), 'piece')}"
        total, most = size_text(int(self.nbytes.sum())), size_text(self.max_bytes_in_flight)
        table = steps_table(self.step, self.from_rank, self.to_rank, self.nbytes) if self.steps else []
        return "\n".join([f"{counts}: {total} move, at most {most} per rank at once", *table])


def schedule_transfers(
    transfers: Transfers, item_size: Column, *, max_bytes_in_flight: int = limits.RESHARD_BYTES
) -> Schedule:
    """Return transfers in steps in which each rank sends and receives, together, a bounded number of bytes.

    Transfers may be cut between elements. Every rank computes the same schedule. Relayed bytes leave a rank in a later
    step than they reach it. Ready data waits for a later step only if its sender or receiver has no room left.

    This rule bounds the number of steps. Let L be the largest total of bytes that a rank sends and receives, and R the
    fewest bytes that fill a rank's step: ``max_bytes_in_flight`` less the largest element, plus 1. There are at most
    ``1 + 2 L / R`` steps, or ``2 + 3 L / R`` with relays. No schedule has fewer than ``L / max_bytes_in_flight``; on
    random plans this one has as many as that, rounded up, or one or two more.

    Args:
        transfers: Transfers; those within a rank are left out.
        item_size: Bytes of an element of each transfer, int64 (transfers,).
        max_bytes_in_flight: Upper bound of a rank's bytes in one step; at least the size of the largest element.

    Raises:
        MetadataError: An element is larger than the bound.

    Examples:
        >>> from shardtree import plans
        >>> at, ones = np.arange(2), np.ones((2, 1), dtype=np.int64)
        >>> columns = [at * 0, at, at, at, at[::-1], at * 0, at[:, None] * 10, ones * 10, at * 0 + 40]
        >>> swap = plans.Transfers(*columns, at * 0, ones, at * 0, ones)  # ten elements each way
        >>> schedule = schedule_transfers(swap, np.array([4, 4]), max_bytes_in_flight=50)
        >>> list(zip(*(c.tolist() for c in (schedule.step, schedule.from_rank, schedule.start, schedule.stop))))
        [(0, 0, 0, 6), (0, 1, 0, 6), (1, 0, 6, 10), (1, 1, 6, 10)]
    """
    moving = np.flatnonzero((transfers.from_rank != transfers.to_rank) & (transfers.nbytes > 0))
    most = _check_bound(max_bytes_in_flight, int(item_size[moving].max(initial=1)))
    ranks, place = np.unique(np.stack([transfers.from_rank, transfers.to_rank])[:, moving], return_inverse=True)
    (sender, receiver), (priority, needs) = place.reshape(2, -1), priorities(rows_of(transfers, moving))
    # Large elements come first: a cut at a multiple of a pair's largest element then never falls inside a smaller one.
    order = np.lexsort((-item_size[moving], receiver, sender, needs, priority))
    moving, columns = moving[order], np.stack([priority, needs, sender, receiver])[:, order]
    first = np.flatnonzero(np.any(np.diff(columns, prepend=-2) != 0, axis=0))
    nbytes = np.add.reduceat(transfers.nbytes[moving], first) if first.size else first
    priority, needs, sender, receiver = columns[:, first]
    pairs = RankPairs(priority, needs, sender, receiver, nbytes, item_size[moving][first], ranks.size)
    step, pair, amount = pair_steps(pairs, most)
    return _pieces(transfers, item_size, most, moving, pairs, step, pair, amount)


def _check_bound(value: Any, largest: int) -> int:
    """Return the value of `max_bytes_in_flight`, after checking that an element of `largest` bytes fits into a step."""
    what, field = "schedule", "max_bytes_in_flight"
    most = integer(what, field, value)
    if most < largest:
        expected = f"at least {plural(largest, 'byte')}, the largest element"
        refuse(what, field, most, expected, "Give each step room for one element.", error=MetadataError)
    return most


def _pieces(
    transfers: Transfers,
    item_size: Column,
    most: int,
    moving: Column,
    pairs: RankPairs,
    step: Column,
    pair: Column,
    amount: Column,
) -> Schedule:
    """Return the schedule, in which a transfer that takes several steps is cut into a piece for each step.

    `item_size` has the element size of each transfer; `most` is only copied to the result; `moving` has the rows of the
    transfers, in the order of `pairs`, several rows for a pair; `step`, `pair` and `amount` come from `pair_steps`.
    """
    in_turn = np.lexsort((step, pair))
    end, chunk_end = np.cumsum(transfers.nbytes[moving]), np.cumsum(amount[in_turn])
    stop = np.sort(np.concatenate([end, chunk_end]), kind="stable")  # union1d is much slower: it hashes
    # Ends of transfers and of a pair's bytes in a step often coincide, and an empty piece would be an empty message.
    stop = stop[np.flatnonzero(np.diff(stop, prepend=0))]
    begin = np.concatenate([stop[:0], [0], stop[:-1]])[: stop.size]
    row, chunk = np.searchsorted(end, begin, side="right"), np.searchsorted(chunk_end, begin, side="right")
    transfer, chunk = moving[row], in_turn[chunk]
    size, base = item_size[transfer], (end - transfers.nbytes[moving])[row]
    order = np.lexsort((begin, pairs.one[pair[chunk]], pairs.distance[pair[chunk]], step[chunk]))
    return Schedule(
        step=step[chunk][order],
        transfer=transfer[order],
        start=((begin - base) // size)[order],
        stop=((stop - base) // size)[order],
        from_rank=transfers.from_rank[transfer][order],
        to_rank=transfers.to_rank[transfer][order],
        nbytes=(stop - begin)[order],
        max_bytes_in_flight=most,
    )


# Amounts that pass two places each, through places with limited room.


def fill(amount: Column, one: Column, other: Column, room: Column, item: Column) -> Column:
    """Return the part of each amount that fits at both of its places; earlier amounts take precedence.

    A place stands for a rank, or for a rank as sender or receiver, and has limited room. The result is that of a loop
    over the amounts, which takes as many items of each amount as still fit at both places. Here, a few rounds do the
    work of the loop. A round takes every amount that fits at both of its places together with all earlier amounts
    there. It also takes, as far as it fits, every amount that is the first at both of its places.

    Args:
        amount: Bytes to move, multiples of `item`, the most important first, int64 (amounts,).
        one: First place of each amount, int64 (amounts,).
        other: Second place of each amount, int64 (amounts,).
        room: Capacity of each place, int64 (places,).
        item: Indivisible unit of each amount, int64 (amounts,).

    Returns:
        Bytes of each amount that fit, int64 (amounts,), multiples of `item`.

    Examples:
        >>> two = np.array([2, 2, 2])
        >>> fill(np.array([6, 6, 6]), np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([9, 9, 9]), two).tolist()
        [6, 2, 2]
    """
    flow, room = np.zeros_like(amount), room.copy()
    live = np.flatnonzero(amount)
    while live.size:
        ends = np.stack([one[live], other[live]], axis=1)
        fits = (_running_sums(ends, amount[live]) <= room[ends]).all(axis=1)
        first = _first(ends, room.size) & ~fits
        flow[live[fits]] = amount[live[fits]]
        _use(room, ends[fits], amount[live[fits]])
        rows = live[first]  # nothing precedes these, and earlier amounts have left them their room
        least = room[ends[first]].min(axis=1)
        flow[rows] = np.minimum(amount[rows], least // item[rows] * item[rows])
        _use(room, ends[first], flow[rows])
        keeps = ~fits & ~first & (room[ends].min(axis=1) >= item[live])
        live = live[keeps]
    return flow


def _running_sums(ends: Column, amount: Column) -> Column:
    """Return the running sum of the amounts of bytes at each amount's first and second place, int64 (amounts, 2).

    `ends` has the two places of each amount, int64 (amounts, 2). A place stands for a rank, as in `fill`.
    """
    place = ends.ravel()
    order = np.argsort(place, kind="stable")
    total = np.cumsum(np.repeat(amount, 2)[order])
    begins = np.flatnonzero(np.diff(place[order], prepend=-1))
    before = np.repeat(total[begins] - np.repeat(amount, 2)[order][begins], np.diff(begins, append=place.size))
    sums = np.empty_like(total)
    sums[order] = total - before
    return sums.reshape(ends.shape)


def _first(ends: Column, places: int) -> Mask:
    """Return a mask of the amounts of bytes that come first at both of their places. A place stands for a rank.

    `ends` has the two places of each amount, int64 (amounts, 2), and `places` is the number of places.
    """
    number = np.arange(len(ends))
    first = np.full(places, len(ends))
    np.minimum.at(first, ends[:, 0], number)
    np.minimum.at(first, ends[:, 1], number)
    return np.asarray((first[ends] == number[:, None]).all(axis=1))


def _use(room: Column, ends: Column, amount: Column) -> None:
    np.subtract.at(room, ends[:, 0], amount)
    np.subtract.at(room, ends[:, 1], amount)


@dataclass(frozen=True, slots=True, eq=False)
class RankPairs:
    """The bytes that ranks send to each other: a row for each distinct sender, receiver, priority and `needs`.

    Attributes:
        priority: Priority of the bytes; lower ones go earlier, int64 (pairs,).
        needs: Priority up to which all transfers to the sender must have arrived, int64 (pairs,).
        one: Index of the sender, in [0, ranks), int64 (pairs,).
        other: Index of the receiver, in [0, ranks), int64 (pairs,).
        nbytes: Number of bytes, int64 (pairs,).
        item: Size of the largest tensor element among the bytes, int64 (pairs,).
        ranks: Number of ranks.
    """

    priority: Column
    needs: Column
    one: Column
    other: Column
    nbytes: Column
    item: Column
    ranks: int

    @property
    def distance(self) -> Column:
        """Number of the receiver minus that of the sender, modulo the larger of their counts, int64 (pairs,).

        Senders and receivers are numbered separately, and again for pairs that pass on received bytes. Pairs with equal
        distance, `priority` and `needs` share no sender and no receiver.
        """
        distance = np.zeros_like(self.one)
        for mask in (self.needs < 0, self.needs >= 0):
            senders, one = np.unique(self.one[mask], return_inverse=True)
            receivers, other = np.unique(self.other[mask], return_inverse=True)
            distance[mask] = (other - one) % max(senders.size, receivers.size, 1)
        return distance


def pair_steps(pairs: RankPairs, room: int) -> tuple[Column, Column, Column]:
    """Return the bytes of each pair that move in each step, so that no rank exceeds its room.

    A pair is ready if its sender has received all that it needs. Each step goes through the ready pairs, and takes as
    many bytes of each as fit. Lower priorities come first; then pairs whose ranks need the most further steps; then
    lower `RankPairs.distance`, so that different senders have different receivers in a step. A rank that both sends and
    receives divides its room in proportion to the bytes left in each direction. A second pass takes everything that
    still fits.

    Args:
        pairs: Bytes to move.
        room: Bytes that a rank may send and receive together in a step; at least the largest item.

    Returns:
        Columns ``(step, pair, nbytes)``, int64, ordered by step; `pair` is a row of `pairs`.

    Examples:
        >>> at = np.array([0, 1])
        >>> step, pair, nbytes = pair_steps(RankPairs(at * 0, at * 0 - 1, at, 1 - at, at * 8 + 8, at * 0 + 4, 2), 16)
        >>> list(zip(step.tolist(), pair.tolist(), nbytes.tolist()))
        [(0, 0, 8), (0, 1, 8), (1, 1, 8)]
    """
    left, distance = pairs.nbytes.copy(), pairs.distance
    steps: list[tuple[Column, Column, Column]] = []
    while left.any():
        amount = _one_step(pairs, distance, left, room)
        rows = np.flatnonzero(amount)
        steps.append((np.full(rows.size, len(steps)), rows, amount[rows]))
        left -= amount
    columns = [np.concatenate(column) for column in zip(*steps, strict=True)] or [pairs.priority[:0]] * 3
    return columns[0], columns[1], columns[2]


def _one_step(pairs: RankPairs, distance: Column, left: Column, room: int) -> Column:
    """Return the bytes of each pair that move in the next step, int64 (pairs,).

    `distance` is that of `pairs`; `left` has the bytes that each pair must still move; `room` is a rank's limit.
    """
    rows = _ready(pairs, left)
    sender, receiver, item, amount = pairs.one[rows], pairs.other[rows], pairs.item[rows], left[rows]
    sends, gets = group_sums(sender, amount, pairs.ranks), group_sums(receiver, amount, pairs.ranks)
    flow = np.zeros_like(left)
    # This is the last step, and the only one of small plans: everything fits.
    if (sends + gets).max() <= room:
        flow[rows] = amount
        return flow
    order = _order(pairs, distance, left, room, rows)
    rows, sender, receiver, item, amount = (column[order] for column in (rows, sender, receiver, item, amount))
    for_sending = _share(room, sends, sends + gets)
    halves = np.concatenate([for_sending, room - for_sending])
    first = fill(amount, sender, receiver + pairs.ranks, halves, item)
    left_room = room - group_sums(sender, first, pairs.ranks) - group_sums(receiver, first, pairs.ranks)
    flow[rows] = first + fill(amount - first, sender, receiver, left_room, item)
    return flow


def _share(room: int, part: Column, whole: Column) -> Column:
    """Return ``room * part / whole``, rounded down; inexact for large numbers, so that no product overflows."""
    # Both are shifted until room * part fits an int64.
    shift = max(0, room.bit_length() + int(whole.max()).bit_length() - 63)
    return np.asarray(room * (part >> shift) // np.maximum(whole >> shift, 1))


def _ready(pairs: RankPairs, left: Column) -> Column:
    """Return the rows of pairs that have bytes left and whose sender has received all that it needs for them."""
    comes = np.full(pairs.ranks, pairs.priority.max(initial=0))
    np.minimum.at(comes, pairs.other[left > 0], pairs.priority[left > 0])
    return np.flatnonzero((left > 0) & (pairs.needs < comes[pairs.one]))


def _order(pairs: RankPairs, distance: Column, left: Column, room: int, rows: Column) -> Column:
    """Return indices that sort `rows` of pairs as described in `pair_steps`; the arguments are those of `_one_step`."""
    load = group_sums(pairs.one, left, pairs.ranks) + group_sums(pairs.other, left, pairs.ranks)
    urgent = -(-(load[pairs.one[rows]] + load[pairs.other[rows]]) // room)
    return np.lexsort((pairs.one[rows], distance[rows], -urgent, pairs.needs[rows], pairs.priority[rows]))
