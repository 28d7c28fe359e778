"""In which order transfers take their turns, so that what is passed on needn't wait for all that comes."""

from __future__ import annotations

import numpy as np

from ...geometry import Column
from ._alike import numbered_rows
from ._transfers import Transfers

_WAVES = 8
"""Into so many parts is divided what comes to a rank that passes it on: it begins when the first part is there."""


def turns(transfers: Transfers) -> tuple[Column, Column]:
    """Return each transfer's turn, and for which turns of what comes to its sender it waits.

    Args:
        transfers: between ranks, ordered as in a plan.

    Returns:
        ``(turn, needs)``, int64 (transfers,): lower turns are taken first; and a transfer is ready when all that comes
        to its sender at turns up to `needs` has arrived, at once where that is -1.
    """
    first, later = (np.flatnonzero(transfers.hop == hop) for hop in (0, 1))
    passes_on = np.concatenate([transfers.target[first], transfers.source[later]])
    rows = np.concatenate([first, later])
    number, _ = numbered_rows(np.column_stack([passes_on, transfers.offset[rows], transfers.shape[rows]]))
    came = np.full(number.max(initial=-1) + 1, -1)
    came[number[: first.size]] = first
    origin = came[number[first.size :]]
    if rows.size < len(transfers) or (origin < 0).any():  # what is passed on isn't what came, box by box
        return transfers.hop, transfers.hop - 1
    turn, needs = np.full(len(transfers), _WAVES), np.full(len(transfers), -1)
    relays = first[np.isin(first, origin)]
    turn[relays] = _waves(transfers.to_rank[relays], transfers.nbytes[relays])
    turn[later], needs[later] = _WAVES + 1, turn[origin]
    return turn, needs


def _waves(rank: Column, nbytes: Column) -> Column:
    """Return in which part of all that its rank gets each transfer is; ranks are ascending."""
    end = np.cumsum(nbytes)
    begins = np.flatnonzero(np.diff(rank, prepend=-1))
    count = np.diff(begins, append=rank.size)
    before = np.repeat((end - nbytes)[begins], count)
    total = np.repeat(np.add.reduceat(nbytes, begins), count) if begins.size else end
    return np.asarray((end - nbytes - before) * _WAVES // np.maximum(total, 1))
