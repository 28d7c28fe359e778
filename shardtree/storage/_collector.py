"""A pause of Python's garbage collector, for steps that make many objects which all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no search for garbage begin until the block ends, and then search as before; what was made counts as old.

    The collector looks at all objects again each time their number has grown by a quarter. A step that makes a few for
    each of 100,000 tensors, and lets go of none, would wait for that as long as it takes itself. Only for steps that
    neither read nor write: what other threads drop meanwhile stays until they end. Where several threads are in such a
    step, the one that turned it off turns it on again, maybe before the others are done.

    Examples:
        >>> with collector_paused():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    was_on = gc.isenabled()
    if was_on:  # else it stays as whoever turned it off leaves it: simulated ranks are threads, and end in any order
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            try:
                _take_as_old()
            finally:
                gc.enable()


_MANY = 10_000
"""Objects. Fewer are looked at in no time."""

_MOST_UNSEEN = 1_000_000
"""Objects that are taken as old before there is a look at everything: else cycles among them would stay for good."""

_unseen = {"objects": 0, "full collections": 0}


def _take_as_old() -> None:
    """Have many new objects taken as old ones without a look: else they would soon bring one at everything."""
    made, full = gc.get_count()[0], gc.get_stats()[2]["collections"]
    if made <= _MANY or gc.get_freeze_count():  # what a program has frozen stays so
        return
    if full != _unseen["full collections"]:
        _unseen.update({"objects": 0, "full collections": full})
    if _unseen["objects"] > _MOST_UNSEEN:
        gc.collect()
        return
    _unseen["objects"] += made
    try:
        gc.freeze()
    finally:
        gc.unfreeze()
