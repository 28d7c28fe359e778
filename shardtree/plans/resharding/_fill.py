"""How much of each of many amounts goes through, when each passes two places that have only so much room."""

from __future__ import annotations

import numpy as np

from ...geometry import Column


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
        rows = live[first]  # nothing stands before them, and what fitted behind them has left room for them
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
