"""The policy by what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Literal

from ..errors import MetadataError, error_text
from ._policy import RetentionPolicy, sorted_steps, whole_number
from ._step import SavedStep


def keep_best(count: int, metric: str, *, mode: Literal["min", "max"] = "min") -> RetentionPolicy:
    """Return the policy that keeps the best steps by a metric, the newest step, and those that weren't measured.

    Of equally good ones the newer is better. A NaN is no measure of good: such a step is never among the best. A step
    without the metric can't be judged, as before its evaluation, and stays.

    Args:
        count: how many of the best.
        metric: its name among a step's metrics.
        mode: whether the smallest or the largest is best.

    Raises:
        MetadataError: there is no such mode, or that is no number of steps.

    Examples:
        >>> losses = {1: 0.5, 2: 0.3, 3: 0.4, 4: 0.9}
        >>> steps = [SavedStep(number, metrics={"loss": loss}) for number, loss in losses.items()]
        >>> sorted(keep_best(2, "loss")(steps)), sorted(keep_best(1, "loss", mode="max")(steps))
        ([2, 3, 4], [4])
        >>> sorted(keep_best(1, "loss")([SavedStep(0), *steps]))
        [0, 2, 4]
    """
    whole_number("keep_best", "a number of steps", count, least=0)
    _check_mode(metric, mode)

    def choose(steps: Sequence[SavedStep]) -> set[int]:
        unmeasured = [step for step in steps if metric not in step.metrics]
        best = _ranked(steps, metric, mode)[:count]
        return {step.number for step in (*best, *unmeasured, *sorted_steps(steps)[-1:])}

    name = f"keep_best({count}, {metric!r})" if mode == "min" else f"keep_best({count}, {metric!r}, mode='max')"
    return RetentionPolicy(name, choose)


def best_step(steps: Sequence[SavedStep], metric: str, *, mode: Literal["min", "max"] = "min") -> SavedStep | None:
    """Return the best step by a metric, the newer one of equals; None if none was measured, or all that were gave NaN.

    Args:
        steps: the listing.
        metric: its name among a step's metrics.
        mode: whether the smallest or the largest is best.

    Raises:
        MetadataError: there is no such mode.

    Examples:
        >>> best_step([SavedStep(1, metrics={"loss": 0.5}), SavedStep(2, metrics={"loss": 0.7})], "loss").number
        1
    """
    _check_mode(metric, mode)
    return next(iter(_ranked(sorted_steps(steps), metric, mode)), None)


def _ranked(steps: Sequence[SavedStep], metric: str, mode: str) -> list[SavedStep]:
    """Return the steps that were measured, the best first."""
    sign = 1.0 if mode == "min" else -1.0
    judged = [step for step in steps if metric in step.metrics and not isnan(step.metrics[metric])]
    return sorted(judged, key=lambda step: (sign * step.metrics[metric], -step.number))


def _check_mode(metric: object, mode: object) -> None:
    if not isinstance(metric, str) or mode not in ("min", "max"):
        found, expected = f"{metric!r}, mode={mode!r}"[:200], "a metric's name and mode='min' or 'max'"
        raise MetadataError(error_text("best in what?", found=found, expected=expected))
