"""What a policy is, and the policies that don't look at a step: all, some by number, any of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import MetadataError, error_text
from ._step import SavedStep

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
