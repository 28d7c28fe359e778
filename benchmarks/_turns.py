"""Actions that take turns: round by round, in another order each time, the fastest of a few tries in a row."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from random import Random
from statistics import median
from typing import Any

Seconds = dict[str, list[float]]
"""Of each round, by action."""


def in_turns(actions: Mapping[str, Callable[[], Any]], *, rounds: int, tries: int) -> Seconds:
    """Return how long each action takes; what it returns is let go of outside of the timed part."""
    seconds: Seconds = {name: [] for name in actions}
    for number in range(rounds):
        for name in Random(number).sample([*actions], len(actions)):
            gc.collect()  # what the action before left isn't this one's to clear away
            seconds[name].append(min(_timed(actions[name]) for _ in range(tries)))
    return seconds


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = action()
    taken = time.perf_counter() - start
    del result
    return taken


def ratio(seconds: Seconds, ours: str, other: str) -> float:
    """Return the median of the rounds' ratios."""
    return median(one / two for one, two in zip(seconds[ours], seconds[other], strict=True))
