"""A pause of Python's garbage collector, for steps that make many objects which all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no search for garbage begin until the block ends, and then search as before.

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
            _take_as_old()
            gc.enable()


def _take_as_old() -> None:
    """Have all objects taken as old ones without a look: else those just made would soon bring one at everything."""
    if gc.get_freeze_count() == 0:  # what a program has frozen stays so
        gc.freeze()
        gc.unfreeze()
