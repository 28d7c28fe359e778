"""Which pair of ranks moves how many bytes in which step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...geometry import Column

# Amounts that pass two places each, and places with limited room.


def fill(amount: Column, one: Column, other: Column, room: Column, item: Column) -> Column:
    """Return how much of each amount goes through: the first get all that fits, then the next, as in a loop over them.

    Nothing that could go through is left: of what is left of an amount, not even one item fits at both of its places.
    All amounts that surely fit, since with everything before them they do, are taken at once, and then those that are
    the first at both of their places: so a few rounds do what a loop over the amounts would do.

    Args:
        amount: multiples of `item`, the most important first, int64 (amounts,).
        one: a place that it passes, int64 (amounts,).
        other: another place, int64 (amounts,).
        room: of each place, int64 (places,).
        item: what can't be divided, int64 (amounts,).

    Returns:
        int64 (amounts,), multiples of `item`.

    Examples:
        >>> two = np.array([2, 2, 2])
        >>> fill(np.array([6, 6, 6]), np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([9, 9, 9]), two).tolist()
        [6, 2, 2]
    """
    taken, room = np.zeros_like(amount), room.copy()
    live = np.flatnonzero(amount)
    while live.size:
        ends = np.stack([one[live], other[live]], axis=1)
        fits = (_running_sums(ends, amount[live]) <= room[ends]).all(axis=1)
        first = _first(ends, room.size) & ~fits
        taken[live[fits]] = amount[live[fits]]
        _use(room, ends[fits], amount[live[fits]])
        rows = live[first]  # nothing precedes them, and what fitted after them has left them their room
        least = room[ends[first]].min(axis=1)
        taken[rows] = np.minimum(amount[rows], least // item[rows] * item[rows])
        _use(room, ends[first], taken[rows])
        keeps = ~fits & ~first & (room[ends].min(axis=1) >= item[live])
        live = live[keeps]
    return taken


def _running_sums(ends: Column, amount: Column) -> Column:
    """Return, for both places of each amount, the sum of all amounts there up to and with it, int64 (amounts, 2)."""
    place = ends.ravel()
    order = np.argsort(place, kind="stable")
    total = np.cumsum(np.repeat(amount, 2)[order])
    begins = np.flatnonzero(np.diff(place[order], prepend=-1))
    before = np.repeat(total[begins] - np.repeat(amount, 2)[order][begins], np.diff(begins, append=place.size))
    sums = np.empty_like(total)
    sums[order] = total - before
    return sums.reshape(ends.shape)


def _first(ends: Column, places: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows are the first at both of their places."""
    number = np.arange(len(ends))
    first = np.full(places, len(ends))
    np.minimum.at(first, ends[:, 0], number)
    np.minimum.at(first, ends[:, 1], number)
    return np.asarray((first[ends] == number[:, None]).all(axis=1))


def _use(room: Column, ends: Column, amount: Column) -> None:
    np.subtract.at(room, ends[:, 0], amount)
    np.subtract.at(room, ends[:, 1], amount)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """What ranks have for each other, a row for each priority, sender and receiver.

    Attributes:
        priority: the lower, the earlier, int64 (pairs,).
        needs: ready when all that comes to the sender at priorities up to this has arrived, int64 (pairs,).
        one: the sender, in [0, ranks), int64 (pairs,).
        other: the receiver, in [0, ranks), int64 (pairs,).
        nbytes: int64 (pairs,).
        item: the largest element among them, in bytes, int64 (pairs,).
        ranks: how many there are.
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
        """How far the receiver is from the sender when both are numbered round a circle, int64 (pairs,).

        Relaying pairs have circles of their own. So all pairs at one distance have different ranks, and where ranks
        give to as many others, as trainers do to engines, each rank is in one of them.
        """
        distance = np.zeros_like(self.one)
        for chosen in (self.needs < 0, self.needs >= 0):
            senders, one = np.unique(self.one[chosen], return_inverse=True)
            receivers, other = np.unique(self.other[chosen], return_inverse=True)
            distance[chosen] = (other - one) % max(senders.size, receivers.size, 1)
        return distance


def pair_steps(pairs: Pairs, room: int) -> tuple[Column, Column, Column]:
    """Return in which step how many bytes of which pair move, so that no rank sends and gets more than there is room.

    Each step goes through the pairs that are ready and takes all that fits: by priority; at equal priority first those
    whose ranks have most left to do, in whole steps; among equals by distance, so that in one step different senders
    have different receivers. A rank that sends and receives divides its room between both, in proportion to what is
    left of each, and in a second pass all that still fits is taken.

    Args:
        pairs: what there is to move.
        room: bytes that a rank may send and get in a step, together; at least the largest item.

    Returns:
        ``(step, pair, nbytes)``, ordered by step, int64.

    Examples:
        >>> at = np.array([0, 1])
        >>> step, pair, nbytes = pair_steps(Pairs(at * 0, at * 0 - 1, at, 1 - at, at * 8 + 8, at * 0 + 4, 2), 16)
        >>> list(zip(step.tolist(), pair.tolist(), nbytes.tolist()))
        [(0, 0, 8), (0, 1, 8), (1, 1, 8)]
    """
    left, distance = pairs.nbytes.copy(), pairs.distance
    found: list[tuple[Column, Column, Column]] = []
    while left.any():
        amount = _one_step(pairs, distance, left, room)
        rows = np.flatnonzero(amount)
        found.append((np.full(rows.size, len(found)), rows, amount[rows]))
        left -= amount
    columns = [np.concatenate(column) for column in zip(*found, strict=True)] or [pairs.priority[:0]] * 3
    return columns[0], columns[1], columns[2]


def _one_step(pairs: Pairs, distance: Column, left: Column, room: int) -> Column:
    """Return how much of each pair moves in the next step."""
    rows = _ready(pairs, left)
    one, other, item, wanted = pairs.one[rows], pairs.other[rows], pairs.item[rows], left[rows]
    sends, gets = _sums(one, wanted, pairs.ranks), _sums(other, wanted, pairs.ranks)
    taken = np.zeros_like(left)
    # The last step, and the only one of small plans: nothing has to be chosen.
    if (sends + gets).max() <= room:
        taken[rows] = wanted
        return taken
    order = _order(pairs, distance, left, room, rows)
    rows, one, other, item, wanted = (column[order] for column in (rows, one, other, item, wanted))
    for_sending = _share(room, sends, sends + gets)
    halves = np.concatenate([for_sending, room - for_sending])
    first = fill(wanted, one, other + pairs.ranks, halves, item)
    rest = room - _sums(one, first, pairs.ranks) - _sums(other, first, pairs.ranks)
    taken[rows] = first + fill(wanted - first, one, other, rest, item)
    return taken


def _share(room: int, part: Column, whole: Column) -> Column:
    """Return about as much of the room as a part is of the whole: never more than it, however many bytes there are."""
    # Both are shifted until room * part fits an int64.
    shift = max(0, room.bit_length() + int(whole.max()).bit_length() - 63)
    return np.asarray(room * (part >> shift) // np.maximum(whole >> shift, 1))


def _ready(pairs: Pairs, left: Column) -> Column:
    """Return the pairs that have bytes left of which the sender has all."""
    comes = np.full(pairs.ranks, pairs.priority.max(initial=0))
    np.minimum.at(comes, pairs.other[left > 0], pairs.priority[left > 0])
    return np.flatnonzero((left > 0) & (pairs.needs < comes[pairs.one]))


def _order(pairs: Pairs, distance: Column, left: Column, room: int, rows: Column) -> Column:
    """Return in which order pairs are gone through."""
    load = _sums(pairs.one, left, pairs.ranks) + _sums(pairs.other, left, pairs.ranks)
    urgent = -(-(load[pairs.one[rows]] + load[pairs.other[rows]]) // room)
    return np.lexsort((pairs.one[rows], distance[rows], -urgent, pairs.needs[rows], pairs.priority[rows]))


def _sums(rank: Column, nbytes: Column, ranks: int) -> Column:
    """Return the bytes of each rank."""
    sums = np.zeros(ranks, dtype=np.int64)
    # Exact, unlike `bincount`, whose weights are floats.
    np.add.at(sums, rank, nbytes)
    return sums
