"""Policies by time, which is what the listing says: none of them looks at a clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ._policy import RetentionPolicy, duration
from ._step import SavedStep


def keep_for(seconds: float, *, now: float | None = None) -> RetentionPolicy:
    """Return the policy that keeps steps for a time.

    Args:
        seconds: how long, from when a step was saved.
        now: the time that it ends at, in seconds since 1970; None for when the newest step was saved, so that a run
            that stands still loses nothing.

    Raises:
        MetadataError: that is no number of seconds.

    Examples:
        >>> steps = [SavedStep(1, time=100.0), SavedStep(2, time=160.0), SavedStep(3, time=200.0)]
        >>> sorted(keep_for(60)(steps)), sorted(keep_for(60, now=250.0)(steps))
        ([2, 3], [3])
    """
    length = duration("keep_for", seconds)
    end = None if now is None else duration("keep_for", now)

    def choose(steps: Sequence[SavedStep]) -> set[int]:
        latest = max((step.time for step in steps), default=0.0) if end is None else end
        return {step.number for step in steps if latest - step.time <= length}

    return RetentionPolicy(f"keep_for({seconds})" if now is None else f"keep_for({seconds}, now={now})", choose)


def keep_every_seconds(seconds: float) -> RetentionPolicy:
    """Return the policy that keeps the first step, and then each that was saved so long after the one kept before it.

    Args:
        seconds: how long.

    Raises:
        MetadataError: that is no number of seconds.

    Examples:
        >>> steps = [SavedStep(number, time=float(number)) for number in (0, 30, 60, 90, 130)]
        >>> sorted(keep_every_seconds(60)(steps))
        [0, 60, 130]
    """
    length = duration("keep_every_seconds", seconds)
    return RetentionPolicy(f"keep_every_seconds({seconds})", lambda steps: set(_spaced(steps, length)))


def _spaced(steps: Sequence[SavedStep], length: float) -> Iterator[int]:
    before: float | None = None
    for step in sorted(steps, key=lambda step: (step.time, step.number)):
        if before is None or step.time - before >= length:
            before = step.time
            yield step.number
