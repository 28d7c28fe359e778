"""Pausing Python's garbage collector, in this place alone: in steps that make many objects and free none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Turn off the garbage collector until the block ends; what was made in the block counts as old afterwards.

    Only for steps that neither read nor write: garbage of other threads stays in memory until the step ends. Where
    several threads are in such a step, the one that turned the collector off turns it on again, maybe before the others
    are done.

    Examples:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    # The collector scans all objects each time their number has grown by a quarter. A step that makes a few for each of
    # 100,000 tensors, and frees none, would spend as much time in these scans as in its own work.
    was_on = gc.isenabled()
    if was_on:  # else another thread turned it off, and turns it on again: simulated ranks end in any order
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            try:
                _mark_as_old()
            finally:
                gc.enable()


_MANY = 10_000
"""Fewer new objects than this are scanned in no time."""

_FEW_FROZEN = 1_000
"""Python 3.12 freezes some hundred objects itself as it starts; a program that freezes, freezes many more."""

_MOST_UNSEEN = 1_000_000
"""How many objects are marked as old before a full collection: without one, cycles among them would never be freed."""

_unseen = {"objects": 0, "full collections": 0}


def _mark_as_old() -> None:
    """Move many new objects to the oldest generation without scanning them.

    A pause alone would only put the work off: the next collection would scan everything, 0.13 s in a load of 20,000
    tensors that takes 0.4 s.
    """
    made, full = gc.get_count()[0], gc.get_stats()[2]["collections"]
    if made <= _MANY or gc.get_freeze_count() > _FEW_FROZEN:  # a program's own frozen objects must stay frozen
        return
    if full != _unseen["full collections"]:
        _unseen.update({"objects": 0, "full collections": full})
    if _unseen["objects"] > _MOST_UNSEEN:
        gc.collect()
        return
    # freeze and unfreeze together move all objects to the oldest generation; Python has no direct call for that.
    _unseen["objects"] += made
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
