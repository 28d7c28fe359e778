"""Retention policies: pure functions from an immutable listing of checkpoints to the steps to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isnan
from numbers import Real
from operator import index
from typing import Literal

from ..errors import MetadataError, error_text

__all__ = [
    "RetentionPolicy",
    "SavedStep",
    "best_step",
    "keep_all",
    "keep_any",
    "keep_best",
    "keep_every",
    "keep_every_seconds",
    "keep_for",
    "keep_last",
    "keep_steps",
    "kept_steps",
]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A finished checkpoint of a series, as a listing describes it.

    Attributes:
        number: Number of the training step, 0 or more.
        time: Time of the save, in seconds since 1970.
        metrics: Measured metrics, by name.
        pinned: Whether every policy keeps it.
        folder: Name of its folder under the series' root.

    Examples:
        >>> SavedStep(100, metrics={"loss": 0.5})
        SavedStep(number=100, time=0.0, metrics={'loss': 0.5}, pinned=False, folder='')
    """

    number: int
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    folder: str = ""


# Policies, and the simplest: all steps, given steps, and unions.

Choose = Callable[[Sequence[SavedStep]], Iterable[int]]
"""Function from a listing to the numbers of the steps to keep."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A policy with a name: a pure function from a sequence of steps to the numbers of those to keep.

    Plain functions of this kind are policies too. The class adds a name for dry runs.

    Attributes:
        name: Python expression that makes the policy, such as ``keep_last(3)``.
        choose: The function.
        members: Policies that `keep_any` combined; empty for other policies.

    Examples:
        >>> policy = RetentionPolicy("keep_first()", lambda steps: {steps[0].number})
        >>> policy, sorted(policy([SavedStep(1), SavedStep(2)]))
        (keep_first(), [1])
    """

    name: str
    choose: Choose = field(compare=False)
    members: tuple[Choose, ...] = field(default=(), compare=False)

    def __call__(self, steps: Sequence[SavedStep]) -> frozenset[int]:
        """Return the numbers of the steps to keep."""
        return frozenset(self.choose(steps))

    def __repr__(self) -> str:
        return self.name


def keep_all() -> RetentionPolicy:
    """Return the policy that keeps every step.

    Examples:
        >>> sorted(keep_all()([SavedStep(1), SavedStep(2)]))
        [1, 2]
    """
    return RetentionPolicy("keep_all()", lambda steps: {step.number for step in steps})


def keep_steps(numbers: Iterable[int]) -> RetentionPolicy:
    """Return the policy that keeps steps by their numbers, if they exist.

    Raises:
        MetadataError: A number isn't a valid step number.

    Examples:
        >>> policy = keep_steps([1, 5])
        >>> policy, sorted(policy([SavedStep(1), SavedStep(2)]))
        (keep_steps([1, 5]), [1])
    """
    wanted = frozenset(whole_number("keep_steps", "step number", number, least=0) for number in numbers)
    return RetentionPolicy(
        f"keep_steps({sorted(wanted)})", lambda steps: {step.number for step in steps if step.number in wanted}
    )


def keep_any(*policies: Choose) -> RetentionPolicy:
    """Return the policy that keeps each step that at least one of several policies keeps; without policies, none.

    Examples:
        >>> policy = keep_any(keep_steps([1]), keep_steps([3]))
        >>> policy, sorted(policy([SavedStep(1), SavedStep(2), SavedStep(3)]))
        (keep_any(keep_steps([1]), keep_steps([3])), [1, 3])
    """
    name = f"keep_any({', '.join(map(policy_name, policies))})"
    return RetentionPolicy(
        name, lambda steps: frozenset(number for policy in policies for number in policy(steps)), policies
    )


def policy_name(policy: Choose) -> str:
    """Return the name that a dry run shows for a policy."""
    return policy.name if isinstance(policy, RetentionPolicy) else getattr(policy, "__name__", type(policy).__name__)


def sorted_steps(steps: Iterable[SavedStep]) -> tuple[SavedStep, ...]:
    """Return the steps of a listing in the order of their numbers, the newest last.

    Raises:
        MetadataError: The argument isn't an iterable of SavedStep values.

    Examples:
        >>> [step.number for step in sorted_steps([SavedStep(7), SavedStep(2)])]
        [2, 7]
    """
    try:
        return tuple(sorted(steps, key=lambda step: step.number))
    except (AttributeError, TypeError):
        found, expected = type(steps).__name__, "the result of `CheckpointSeries.steps()`"
        raise MetadataError(error_text("retention: unusable value of steps=", found=found, expected=expected)) from None


def whole_number(policy: str, what: str, value: object, *, least: int) -> int:
    """Return an argument of a policy as an int of at least `least`; errors show `policy` and the argument, `what`.

    Raises:
        MetadataError: The argument has another type or is too small.
    """
    with suppress(TypeError):  # from `operator.index`, which takes NumPy's integers, but not floats and texts
        if (number := int(index(value))) >= least and not isinstance(value, bool):  # type: ignore[arg-type]
            return number
    found = repr(value)[:200]
    raise MetadataError(error_text(f"{policy}: invalid {what}", found=found, expected=f"an int, {least} at least"))


def duration(policy: str, value: object) -> float:
    """Return a policy's number of seconds as a float of at least 0; errors show the name `policy`.

    Raises:
        MetadataError: The argument has another type or is too small.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0:
        return float(value)
    expected = "a number, 0 at least"
    raise MetadataError(error_text(f"{policy}: invalid number of seconds", found=repr(value)[:200], expected=expected))


# Policies by number: the last few steps, and every n-th.


def keep_last(count: int) -> RetentionPolicy:
    """Return the policy that keeps the newest steps, by number.

    Args:
        count: Number of steps to keep.

    Raises:
        MetadataError: The argument isn't a number of steps.

    Examples:
        >>> sorted(keep_last(2)([SavedStep(number) for number in (10, 20, 30)]))
        [20, 30]
    """
    count = whole_number("keep_last", "number of steps", count, least=0)
    return RetentionPolicy(
        f"keep_last({count})", lambda steps: {step.number for step in sorted_steps(steps)[max(len(steps) - count, 0) :]}
    )


def keep_every(count: int) -> RetentionPolicy:
    """Return the policy that keeps every n-th step: those whose number is a multiple of n.

    Args:
        count: The number n.

    Raises:
        MetadataError: The argument isn't a number of steps.

    Examples:
        >>> sorted(keep_every(100)([SavedStep(number) for number in (0, 50, 100, 150)]))
        [0, 100]
    """
    count = whole_number("keep_every", "number of steps", count, least=1)
    return RetentionPolicy(
        f"keep_every({count})", lambda steps: {step.number for step in steps if step.number % count == 0}
    )


# Policies by time, computed from the listing alone: none of them reads a clock.


def keep_for(seconds: float, *, now: float | None = None) -> RetentionPolicy:
    """Return the policy that keeps steps up to a maximum age.

    Args:
        seconds: Maximum age, in seconds since the step was saved.
        now: Time at which ages are measured, in seconds since 1970; None for the time of the step with the largest
            number, so that a paused run loses nothing. Steps with later times, from clocks that ran ahead, are kept.

    Raises:
        MetadataError: The argument isn't a number of seconds.

    Examples:
        >>> steps = [SavedStep(1, time=100.0), SavedStep(2, time=160.0), SavedStep(3, time=200.0)]
        >>> sorted(keep_for(60)(steps)), sorted(keep_for(60, now=250.0)(steps))
        ([2, 3], [3])
    """
    length = duration("keep_for", seconds)
    end = None if now is None else duration("keep_for", now)

    def choose(steps: Sequence[SavedStep]) -> set[int]:
        until = end if end is not None else max(steps, key=lambda step: step.number).time if steps else 0.0
        return {step.number for step in steps if until - step.time <= length}

    return RetentionPolicy(f"keep_for({seconds})" if now is None else f"keep_for({seconds}, now={now})", choose)


def keep_every_seconds(seconds: float) -> RetentionPolicy:
    """Return the policy that keeps the first step, and each step saved at least `seconds` after the last kept one.

    Args:
        seconds: Minimum time between kept steps.

    Raises:
        MetadataError: The argument isn't a number of seconds.

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


# Policies by metric.


def keep_best(count: int, metric: str, *, mode: Literal["min", "max"] = "min") -> RetentionPolicy:
    """Return the policy that keeps the best steps by a metric, the newest step, and those without the metric.

    Of equal steps the newer is better. A step with NaN is never among the best. A step without the metric, for example
    before its evaluation, stays.

    Args:
        count: Number of the best steps to keep.
        metric: Name of the metric.
        mode: "min" if the smallest is best, "max" if the largest is.

    Raises:
        MetadataError: There is no such mode, or the count isn't a number of steps.

    Examples:
        >>> losses = {1: 0.5, 2: 0.3, 3: 0.4, 4: 0.9}
        >>> steps = [SavedStep(number, metrics={"loss": loss}) for number, loss in losses.items()]
        >>> sorted(keep_best(2, "loss")(steps)), sorted(keep_best(1, "loss", mode="max")(steps))
        ([2, 3, 4], [4])
        >>> sorted(keep_best(1, "loss")([SavedStep(0), *steps]))
        [0, 2, 4]
    """
    count = whole_number("keep_best", "number of steps", count, least=0)
    _check_mode(metric, mode)

    def choose(steps: Sequence[SavedStep]) -> set[int]:
        # A step that is evaluated after its save would otherwise be removed before it is measured.
        unmeasured = [step for step in steps if metric not in step.metrics]
        best = _ranked(steps, metric, mode)[:count]
        return {step.number for step in (*best, *unmeasured, *sorted_steps(steps)[-1:])}

    name = f"keep_best({count}, {metric!r})" if mode == "min" else f"keep_best({count}, {metric!r}, mode='max')"
    return RetentionPolicy(name, choose)


def best_step(steps: Sequence[SavedStep], metric: str, *, mode: Literal["min", "max"] = "min") -> SavedStep | None:
    """Return the best step by a metric, the newer one of equals; None if no step has the metric, or all have NaN.

    Args:
        steps: Listing of steps.
        metric: Name of the metric.
        mode: "min" if the smallest is best, "max" if the largest is.

    Raises:
        MetadataError: There is no such mode.

    Examples:
        >>> best_step([SavedStep(1, metrics={"loss": 0.5}), SavedStep(2, metrics={"loss": 0.7})], "loss").number
        1
    """
    _check_mode(metric, mode)
    return next(iter(_ranked(sorted_steps(steps), metric, mode)), None)


def _ranked(steps: Sequence[SavedStep], metric: str, mode: str) -> list[SavedStep]:
    """Return the steps in which the metric is present and not NaN, the best first."""
    sign = 1.0 if mode == "min" else -1.0
    judged = [step for step in steps if metric in step.metrics and not isnan(step.metrics[metric])]
    return sorted(judged, key=lambda step: (sign * step.metrics[metric], -step.number))


def _check_mode(metric: object, mode: object) -> None:
    if not isinstance(metric, str) or mode not in ("min", "max"):
        found, expected = f"{metric!r}, mode={mode!r}"[:200], "a metric's name and mode='min' or 'max'"
        raise MetadataError(error_text("invalid metric or mode", found=found, expected=expected))


# A policy's decision on a listing, with reasons, which a removal executes.

NEWEST, PINNED = "the newest", "pinned"


def kept_steps(policy: Choose, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
    """Return the numbers of the steps to keep, in ascending order, each with all reasons for keeping it.

    The newest step and pinned ones stay regardless of the policy. Numbers of steps that don't exist are ignored.

    Args:
        policy: Function from a listing to the numbers to keep. The members of a `keep_any` are separate reasons.
        steps: Listing of steps.

    Raises:
        MetadataError: The argument isn't a policy.

    Examples:
        >>> steps = [SavedStep(number, pinned=number == 150) for number in (100, 150, 190, 200)]
        >>> kept_steps(keep_any(keep_last(1), keep_every(100)), steps)
        {100: ('keep_every(100)',), 150: ('pinned',), 200: ('the newest', 'keep_last(1)', 'keep_every(100)')}
    """
    # A policy is a user's function, and steps that it leaves out are deleted: the newest step is never its decision.
    listing = sorted_steps(steps)
    wanted_by = [(policy_name(member), _wanted(member, listing)) for member in _members(policy)]
    reasons = {step.number: tuple(_reasons(step, listing, wanted_by)) for step in listing}
    return {number: found for number, found in reasons.items() if found}


def _wanted(policy: Choose, listing: Sequence[SavedStep]) -> frozenset[int]:
    wanted: object = getattr(policy, "choose", policy)(listing) if callable(policy) else None  # not yet a set
    if isinstance(wanted, Iterable):
        with suppress(MetadataError):
            return frozenset(whole_number("series", "step number", number, least=-(10**18)) for number in wanted)
    found = (f"{policy_name(policy)}, which returns {wanted!r}" if callable(policy) else repr(policy))[:200]
    expected = "a function that returns the numbers of the steps to keep, such as keep_last(3)"
    raise MetadataError(error_text("series: invalid policy", found=found, expected=expected))


def _members(policy: Choose) -> Iterator[Choose]:
    """Yield the policies that a `keep_any` combines, at any depth; or only the policy itself if it combines none."""
    if isinstance(policy, RetentionPolicy) and policy.members:
        for member in policy.members:
            yield from _members(member)
    else:
        yield policy


def _reasons(
    step: SavedStep, listing: Sequence[SavedStep], wanted_by: Sequence[tuple[str, frozenset[int]]]
) -> Iterator[str]:
    if step.number == listing[-1].number:
        yield NEWEST
    if step.pinned:
        yield PINNED
    for name, wanted in wanted_by:
        if step.number in wanted:
            yield name
