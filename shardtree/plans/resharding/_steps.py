"""Which pair of ranks moves how many bytes in which step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...geometry import Column
from ._fill import fill


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """What ranks have for each other, a row for each turn, sender and receiver.

    Attributes:
        turn: the lower, the sooner, int64 (pairs,).
        needs: it is ready when all that comes to the sender at turns up to this has arrived, int64 (pairs,).
        one: the sender, in [0, ranks), int64 (pairs,).
        other: the receiver, in [0, ranks), int64 (pairs,).
        nbytes: int64 (pairs,).
        item: the largest element among them, in bytes, int64 (pairs,).
        ranks: how many there are.
    """

    turn: Column
    needs: Column
    one: Column
    other: Column
    nbytes: Column
    item: Column
    ranks: int

    @property
    def distance(self) -> Column:
        """How many places further the receiver is, when senders stand in a circle and receivers too, int64 (pairs,).

        Those who pass on have circles of their own. So all pairs at one distance have different ranks, and where ranks
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

    Each step goes through the pairs that are ready and takes all that fits: by turn; at the same one first of those
    whose ranks have most left to do, in whole steps; among equals by distance, so that
    in one step different senders have different receivers. A rank that sends and gets divides its room between both,
    as what is left of each asks for, and in a second pass whatever still fits is taken.

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
    columns = [np.concatenate(column) for column in zip(*found, strict=True)] or [pairs.turn[:0]] * 3
    return columns[0], columns[1], columns[2]


def _one_step(pairs: Pairs, distance: Column, left: Column, room: int) -> Column:
    """Return how much of each pair moves in the next step."""
    rows = _ready(pairs, left)
    one, other, item, wanted = pairs.one[rows], pairs.other[rows], pairs.item[rows], left[rows]
    sends, gets = _sums(one, wanted, pairs.ranks), _sums(other, wanted, pairs.ranks)
    taken = np.zeros_like(left)
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
    # room * part has to be an int64.
    shift = max(0, room.bit_length() + int(whole.max()).bit_length() - 63)
    return np.asarray(room * (part >> shift) // np.maximum(whole >> shift, 1))


def _ready(pairs: Pairs, left: Column) -> Column:
    """Return the pairs that have bytes left of which the sender has all."""
    comes = np.full(pairs.ranks, pairs.turn.max(initial=0))
    np.minimum.at(comes, pairs.other[left > 0], pairs.turn[left > 0])
    return np.flatnonzero((left > 0) & (pairs.needs < comes[pairs.one]))


def _order(pairs: Pairs, distance: Column, left: Column, room: int, rows: Column) -> Column:
    """Return in which order pairs are gone through."""
    load = _sums(pairs.one, left, pairs.ranks) + _sums(pairs.other, left, pairs.ranks)
    urgent = -(-(load[pairs.one[rows]] + load[pairs.other[rows]]) // room)
    return np.lexsort((pairs.one[rows], distance[rows], -urgent, pairs.needs[rows], pairs.turn[rows]))


def _sums(rank: Column, nbytes: Column, ranks: int) -> Column:
    """Return the bytes of each rank: exact, as weights of a bincount, which are floats, wouldn't be."""
    sums = np.zeros(ranks, dtype=np.int64)
    np.add.at(sums, rank, nbytes)
    return sums
