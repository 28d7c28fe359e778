"""Policies by number: the last few steps, and every so manieth."""

from __future__ import annotations

from collections.abc import Sequence

from ._policy import RetentionPolicy, sorted_steps, whole_number
from ._step import SavedStep


def keep_last(count: int) -> RetentionPolicy:
    """Return the policy that keeps the newest steps, by number.

    Args:
        count: how many.

    Raises:
        MetadataError: that is no number of steps.

    Examples:
        >>> sorted(keep_last(2)([SavedStep(number) for number in (10, 20, 30)]))
        [20, 30]
    """
    whole_number("keep_last", "a number of steps", count, least=0)

    def choose(steps: Sequence[SavedStep]) -> set[int]:
        return {step.number for step in sorted_steps(steps)[max(len(steps) - count, 0) :]}

    return RetentionPolicy(f"keep_last({count})", choose)


def keep_every(count: int) -> RetentionPolicy:
    """Return the policy that keeps the steps whose number is a multiple of another one.

    Args:
        count: the other one.

    Raises:
        MetadataError: that is no number of steps.

    Examples:
        >>> sorted(keep_every(100)([SavedStep(number) for number in (0, 50, 100, 150)]))
        [0, 100]
    """
    whole_number("keep_every", "a number of steps", count, least=1)
    return RetentionPolicy(
        f"keep_every({count})", lambda steps: {step.number for step in steps if step.number % count == 0}
    )
