"""What a policy comes to on a listing, and why: the decision that a removal runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..errors import MetadataError, error_text
from ._policy import Choose, RetentionPolicy, policy_name, sorted_steps
from ._step import SavedStep

NEWEST, PINNED = "the newest", "pinned"


def retained(policy: Choose, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
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
        >>> retained(keep_any(keep_last(1), keep_every(100)), steps)
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
