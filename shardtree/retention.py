"""Retention: which steps of a series of checkpoints are kept, as pure functions over an immutable listing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Literal

from .errors import MetadataError, error_text

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
    """A finished checkpoint of a series, as far as a listing tells.

    Attributes:
        number: of the training step, 0 or more.
        time: when it was saved, in seconds since 1970.
        metrics: what was measured of it, by name.
        pinned: whether it is kept whatever a policy says.
        folder: its name under the series' root.

    Examples:
        >>> SavedStep(100, metrics={"loss": 0.5})
        SavedStep(number=100, time=0.0, metrics={'loss': 0.5}, pinned=False, folder='')
    """

    number: int
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    folder: str = ""


# What a policy is, and the policies that don't look at a step: all, some by number, any of several.

Choose = Callable[[Sequence[SavedStep]], Iterable[int]]
"""From a listing to the numbers of the steps to keep."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A pure function from a listing to the steps to keep, that shows how it was made.

    Any function of that form is a policy; this one has a name for the dry run, and tells the members of a union apart.

    Attributes:
        name: the Python that makes it.
        choose: the function.
        members: of a union, its policies.

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
    """Return the policy that keeps steps by their numbers, those that are there.

    Raises:
        MetadataError: one is no step's number.

    Examples:
        >>> policy = keep_steps([1, 5])
        >>> policy, sorted(policy([SavedStep(1), SavedStep(2)]))
        (keep_steps([1, 5]), [1])
    """
    wanted = frozenset(whole_number("keep_steps", "a step", number, least=0) for number in numbers)
    return RetentionPolicy(
        f"keep_steps({sorted(wanted)})", lambda steps: {step.number for step in steps if step.number in wanted}
    )


def keep_any(*policies: Choose) -> RetentionPolicy:
    """Return the policy that keeps what any of several keeps; without any, it keeps nothing by itself.

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
    """Return what a policy is called in a dry run."""
    return policy.name if isinstance(policy, RetentionPolicy) else getattr(policy, "__name__", type(policy).__name__)


def sorted_steps(steps: Iterable[SavedStep]) -> tuple[SavedStep, ...]:
    """Return the steps of a listing in the order of their numbers, the newest last.

    Raises:
        MetadataError: it isn't a listing.

    Examples:
        >>> [step.number for step in sorted_steps([SavedStep(7), SavedStep(2)])]
        [2, 7]
    """
    try:
        return tuple(sorted(steps, key=lambda step: step.number))
    except (AttributeError, TypeError):
        found, fix = type(steps).__name__, "Pass what `CheckpointSeries.steps()` returns."
        raise MetadataError(error_text("not a listing", found=found, expected="SavedStep values", fix=fix)) from None


def whole_number(policy: str, what: str, value: object, *, least: int) -> int:
    """Return a policy's argument, once it is known to be an int of at least so much.

    Raises:
        MetadataError: it isn't.
    """
    if type(value) is int and value >= least:
        return value
    found = repr(value)[:200]
    raise MetadataError(error_text(f"{policy}: {what} isn't one", found=found, expected=f"an int, {least} at least"))


def duration(policy: str, value: object) -> float:
    """Return a policy's argument, once it is known to be a number of seconds, 0 at least.

    Raises:
        MetadataError: it isn't.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    expected = "a number, 0 at least"
    raise MetadataError(error_text(f"{policy}: no number of seconds", found=repr(value)[:200], expected=expected))


# Policies by number: the last few steps, and every so manieth.


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


# Policies by time, which is what the listing says: none of them looks at a clock.


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


# The policy by what was measured.


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


# What a policy comes to on a listing, and why: the decision that a removal runs.

NEWEST, PINNED = "the newest", "pinned"


def kept_steps(policy: Choose, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
    """Return the numbers of the steps that stay, in order, each with all that keeps it.

    The newest step and pinned ones stay whatever a policy says. Numbers of steps that aren't there count for nothing.

    Args:
        policy: from a listing to the numbers to keep; of a union, each member is a reason of its own.
        steps: the listing.

    Raises:
        MetadataError: that is no policy.

    Examples:
        >>> from shardtree.retention import keep_any, keep_every, keep_last
        >>> steps = [SavedStep(number, pinned=number == 150) for number in (100, 150, 190, 200)]
        >>> kept_steps(keep_any(keep_last(1), keep_every(100)), steps)
        {100: ('keep_every(100)',), 150: ('pinned',), 200: ('the newest', 'keep_last(1)', 'keep_every(100)')}
    """
    listing = sorted_steps(steps)
    wishes = [(policy_name(member), _wanted(member, listing)) for member in _members(policy)]
    reasons = {step.number: tuple(_reasons(step, listing, wishes)) for step in listing}
    return {number: found for number, found in reasons.items() if found}


def _wanted(policy: Choose, listing: Sequence[SavedStep]) -> frozenset[int]:
    wanted: object = policy(listing) if callable(policy) else None
    if isinstance(wanted, Iterable):
        numbers = tuple(wanted)
        if all(type(number) is int for number in numbers):
            return frozenset(numbers)
    found = f"{policy_name(policy)}, which returns {wanted!r}" if callable(policy) else repr(policy)
    expected = "a function from a listing to the numbers of the steps to keep, such as keep_last(3)"
    raise MetadataError(error_text("series: not a policy", found=found[:200], expected=expected))


def _members(policy: Choose) -> Iterator[Choose]:
    """Yield the policies that a union comes to."""
    if isinstance(policy, RetentionPolicy) and policy.members:
        for member in policy.members:
            yield from _members(member)
    else:
        yield policy


def _reasons(
    step: SavedStep, listing: Sequence[SavedStep], wishes: Sequence[tuple[str, frozenset[int]]]
) -> Iterator[str]:
    if step.number == listing[-1].number:
        yield NEWEST
    if step.pinned:
        yield PINNED
    for name, wanted in wishes:
        if step.number in wanted:
            yield name
