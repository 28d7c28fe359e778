"""Schedule: a plan's transfers in steps, so that each rank's bytes in flight stay bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import MetadataError, plural
from ...geometry import Column, integer, refuse
from .._text import size_text
from ._senders import numbered_rows
from ._steps import Pairs, pair_steps
from ._summary import steps_table
from ._transfers import Transfers, select_transfers

# Priorities: what is passed on needn't wait for everything that its rank receives.

_WAVES = 8
"""What comes to a relaying rank is divided into so many parts; it begins to send when the first has arrived."""


def priorities(transfers: Transfers) -> tuple[Column, Column]:
    """Return each transfer's priority, and for which priorities of what comes to its sender it waits.

    Args:
        transfers: between ranks, ordered as in a plan.

    Returns:
        ``(priority, needs)``, int64 (transfers,): lower ones go first; and a transfer is ready when all that comes
        to its sender at priorities up to `needs` has arrived; at once where that is -1.
    """
    first, later = (np.flatnonzero(transfers.hop == hop) for hop in (0, 1))
    passes_on = np.concatenate([transfers.target[first], transfers.source[later]])
    rows = np.concatenate([first, later])
    number, _ = numbered_rows(np.column_stack([passes_on, transfers.offset[rows], transfers.shape[rows]]))
    came = np.full(number.max(initial=-1) + 1, -1)
    came[number[: first.size]] = first
    origin = came[number[first.size :]]
    if rows.size < len(transfers) or (origin < 0).any():  # a user's plan may pass on other boxes than came
        return transfers.hop, transfers.hop - 1
    priority, needs = np.full(len(transfers), _WAVES), np.full(len(transfers), -1)
    relays = first[np.isin(first, origin)]
    priority[relays] = _waves(transfers.to_rank[relays], transfers.nbytes[relays])
    priority[later], needs[later] = _WAVES + 1, priority[origin]
    return priority, needs


def _waves(rank: Column, nbytes: Column) -> Column:
    """Return in which part of all that its rank gets each transfer is; ranks are ascending."""
    end = np.cumsum(nbytes)
    begins = np.flatnonzero(np.diff(rank, prepend=-1))
    count = np.diff(begins, append=rank.size)
    before = np.repeat((end - nbytes)[begins], count)
    total = np.repeat(np.add.reduceat(nbytes, begins), count) if begins.size else end
    return np.asarray((end - nbytes - before) * _WAVES // np.maximum(total, 1))


BYTES_IN_FLIGHT = 256 * 1024 * 1024
"""What a rank sends and gets in one step by default. A bound this high leaves a schedule few steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """In which step which elements of which transfer move; transfers within a rank aren't in it.

    A piece is the range [start, stop) of the elements of a transfer's box, in row-major order.

    Attributes:
        step: when, ascending, int64 (pieces,).
        transfer: the row in the plan's transfers, int64 (pieces,).
        start: first element, int64 (pieces,).
        stop: one past the last, int64 (pieces,).
        from_rank: int64 (pieces,).
        to_rank: int64 (pieces,).
        nbytes: int64 (pieces,).
        max_bytes_in_flight: what a rank sends and gets in one step is together at most so much.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(5))}
        >>> print(st.plan_reshard({0: whole}, {1: whole}).schedule(max_bytes_in_flight=12))
        2 steps, 2 pieces: 20 B move, of a rank at most 12 B at once
        step  moves  fullest rank
           0   12 B     0 of 12 B
           1    8 B      0 of 8 B
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
        """How many steps there are."""
        return int(self.step[-1]) + 1 if self.step.size else 0

    def __str__(self) -> str:
        counts = f"{plural(self.steps, 'step')}, {plural(len(self), 'piece')}"
        moved, most = size_text(int(self.nbytes.sum())), size_text(self.max_bytes_in_flight)
        table = steps_table(self.step, self.from_rank, self.to_rank, self.nbytes) if self.steps else []
        return "\n".join([f"{counts}: {moved} move, of a rank at most {most} at once", *table])


def schedule_transfers(
    transfers: Transfers, item_size: Column, *, max_bytes_in_flight: int = BYTES_IN_FLIGHT
) -> Schedule:
    """Return transfers in steps in which each rank sends and gets, together, at most so many bytes.

    Transfers are cut, between elements, where that helps. Every rank computes the same schedule. What a rank passes on
    leaves in later steps than it arrives in, and no two ranks that both have room left have data ready for each other.

    From that follows a bound. Let L be the most that one rank sends and gets in all, and R what it can at least have
    in a step that is full: `max_bytes_in_flight`, less one element, plus 1. Then there are at most ``1 + 2 L / R``
    steps, or ``2 + 3 L / R`` where something is passed on, and no schedule has fewer than
    ``L / max_bytes_in_flight``. On random plans this one has as many as that, rounded up, or one or two more.

    Args:
        transfers: those that stay on their rank are left out.
        item_size: bytes that an element of each transfer takes, int64 (transfers,).
        max_bytes_in_flight: at least the largest element.

    Raises:
        MetadataError: an element is larger than that.

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
    most = _checked_bound(max_bytes_in_flight, int(item_size[moving].max(initial=1)))
    ranks, place = np.unique(np.stack([transfers.from_rank, transfers.to_rank])[:, moving], return_inverse=True)
    (one, other), (priority, needs) = place.reshape(2, -1), priorities(select_transfers(transfers, moving))
    # Large elements first: a cut at a multiple of a pair's largest element then never falls inside a smaller one.
    order = np.lexsort((-item_size[moving], other, one, needs, priority))
    moving, columns = moving[order], np.stack([priority, needs, one, other])[:, order]
    first = np.flatnonzero(np.any(np.diff(columns, prepend=-2) != 0, axis=0))
    nbytes = np.add.reduceat(transfers.nbytes[moving], first) if first.size else first
    priority, needs, one, other = columns[:, first]
    pairs = Pairs(priority, needs, one, other, nbytes, item_size[moving][first], ranks.size)
    step, pair, amount = pair_steps(pairs, most)
    return _pieces(transfers, item_size, most, moving, pairs, step, pair, amount)


def _checked_bound(value: Any, largest: int) -> int:
    """Return the bound, if an element fits."""
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
    pairs: Pairs,
    step: Column,
    pair: Column,
    amount: Column,
) -> Schedule:
    """Return transfers cut where they end, or a pair's bytes of one step do: both are laid one after the other."""
    in_turn = np.lexsort((step, pair))
    end, chunk_end = np.cumsum(transfers.nbytes[moving]), np.cumsum(amount[in_turn])
    stop = np.sort(np.concatenate([end, chunk_end]), kind="stable")  # union1d is much slower: it hashes
    # Ends of transfers and of a pair's bytes in a step often coincide, and an empty piece would be a message of no
    # bytes.
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
