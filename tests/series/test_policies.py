"""Retention policies: what they keep of any listing, and what no removal may ever do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shardtree.retention import (
    RetentionPolicy,
    SavedStep,
    best_step,
    keep_all,
    keep_any,
    keep_best,
    keep_every,
    keep_every_seconds,
    keep_for,
    keep_last,
    keep_steps,
    kept_steps,
)

losses = some.one_of(some.floats(-2, 2), some.sampled_from([0.0, math.inf, -math.inf, math.nan]))
metrics = some.dictionaries(some.sampled_from(["loss", "accuracy"]), losses)


@some.composite
def listings(draw: some.DrawFn) -> list[SavedStep]:
    """Draw a run's steps, later ones saved later, in any order."""
    numbers = draw(some.lists(some.integers(0, 40), unique=True, max_size=12))
    gaps = iter(draw(some.lists(some.integers(0, 50), min_size=len(numbers), max_size=len(numbers))))
    time, found = 1000.0, []
    for number in sorted(numbers):
        time += next(gaps)
        found.append(SavedStep(number, time, draw(metrics), draw(some.integers(0, 4)) == 0))
    return draw(some.permutations(found))


single = some.one_of(
    some.builds(keep_last, some.integers(0, 5)),
    some.builds(keep_every, some.integers(1, 7)),
    some.builds(keep_for, some.integers(0, 120)),
    some.builds(keep_for, some.integers(0, 120), now=some.integers(1000, 1400)),
    some.builds(keep_every_seconds, some.integers(0, 90)),
    some.builds(
        keep_best, some.integers(0, 3), some.sampled_from(["loss", "accuracy"]), mode=some.sampled_from(["min", "max"])
    ),
    some.builds(keep_steps, some.lists(some.integers(0, 40), max_size=4)),
    some.just(keep_all()),
)
policies = some.one_of(single, some.builds(lambda several: keep_any(*several), some.lists(single, max_size=3)))

Policy = Callable[[Sequence[SavedStep]], object]


def numbers(steps: Sequence[SavedStep]) -> set[int]:
    return {step.number for step in steps}


def stays(policy: Policy, steps: Sequence[SavedStep]) -> list[SavedStep]:
    kept = kept_steps(policy, steps)
    return [step for step in steps if step.number in kept]


Decide = Callable[[Policy, Sequence[SavedStep]], dict[int, tuple[str, ...]]]


def check_never_goes(decide: Decide, policy: Policy, steps: Sequence[SavedStep]) -> None:
    kept = decide(policy, steps)
    must = {step.number for step in steps if step.pinned} | ({max(numbers(steps))} if steps else set())
    assert must <= kept.keys() <= numbers(steps)
    assert all(kept.values()), "each step that stays has a reason"
    assert list(kept) == sorted(kept)


@given(policies, listings())
def test_the_newest_and_pinned_steps_stay_and_none_that_is_not_there(policy: Policy, steps: list[SavedStep]) -> None:
    check_never_goes(kept_steps, policy, steps)


def as_the_policy_says(policy: Policy, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
    """The planted fault: nothing stays but what the policy keeps."""
    return dict.fromkeys(sorted(policy(steps)), ("policy",))


@pytest.mark.parametrize("steps", [[SavedStep(1), SavedStep(2)], [SavedStep(1, pinned=True), SavedStep(2)]])
def test_the_law_catches_a_decision_that_forgets_them(steps: list[SavedStep]) -> None:
    with pytest.raises(AssertionError):
        check_never_goes(as_the_policy_says, keep_steps([2] if steps[0].pinned else []), steps)


def check_order(policy: Policy, steps: Sequence[SavedStep], shuffled: Sequence[SavedStep]) -> None:
    assert set(policy(steps)) == set(policy(shuffled))


@given(policies, listings(), some.randoms(use_true_random=False))
def test_the_order_of_a_listing_makes_no_difference(policy: Policy, steps: list[SavedStep], random: object) -> None:
    check_order(policy, steps, random.sample(steps, len(steps)))


def test_the_law_of_order_catches_a_policy_that_takes_the_end_of_the_list() -> None:
    with pytest.raises(AssertionError):
        check_order(
            lambda steps: {step.number for step in steps[-1:]},
            [SavedStep(1), SavedStep(2)],
            [SavedStep(2), SavedStep(1)],
        )


def check_again(policy: Policy, steps: Sequence[SavedStep]) -> None:
    once = stays(policy, steps)
    assert stays(policy, once) == once


@given(policies, listings())
def test_a_second_removal_finds_nothing_to_remove(policy: Policy, steps: list[SavedStep]) -> None:
    check_again(policy, steps)


def every_second(steps: Sequence[SavedStep]) -> set[int]:
    """The planted fault: a policy that counts places and not steps."""
    return {step.number for step in sorted(steps, key=lambda step: step.number)[::2]}


def test_the_law_catches_a_policy_that_thins_out_what_is_left() -> None:
    with pytest.raises(AssertionError):
        check_again(every_second, [SavedStep(number) for number in range(6)])


def check_goes_on(policy: Policy, steps: Sequence[SavedStep], newer: SavedStep) -> None:
    assert set(policy([*steps, newer])) & numbers(steps) <= set(policy(steps))


@given(policies, listings(), some.integers(0, 90), metrics)
def test_what_a_policy_let_go_it_does_not_want_back(
    policy: Policy, steps: list[SavedStep], later: int, measured: dict[str, float]
) -> None:
    newest = max(steps, key=lambda step: step.number, default=SavedStep(0, 1000.0))
    check_goes_on(policy, steps, SavedStep(newest.number + 1, newest.time + later, measured))


def test_the_law_catches_a_policy_that_wants_old_steps_back() -> None:
    with pytest.raises(AssertionError):
        check_goes_on(lambda steps: {1} if len(steps) > 2 else set(), [SavedStep(1), SavedStep(2)], SavedStep(3))


@given(some.lists(policies, max_size=3), listings())
def test_a_union_keeps_the_union(several: list[Policy], steps: list[SavedStep]) -> None:
    check_union(keep_any, several, steps)


by_time = some.one_of(
    some.builds(keep_for, some.integers(0, 120)),
    some.builds(keep_for, some.integers(0, 120), now=some.integers(1000, 1400)),
    some.builds(keep_every_seconds, some.integers(0, 90)),
)


def check_wrong_clock(policy: Policy, steps: Sequence[SavedStep], odd: SavedStep) -> None:
    others = [step for step in steps if step.number != odd.number]
    ahead = replace(odd, time=max(step.time for step in steps) + 86_400.0)
    kept = set(policy([*others, ahead]))
    assert kept - {odd.number} == set(policy(others)), "the other steps' times are what they were"
    assert odd.number in kept, "its true time is not known"


@given(by_time, listings().filter(lambda steps: len(steps) > 1), some.data())
def test_a_step_saved_by_a_clock_ahead_takes_no_other_with_it(
    policy: Policy, steps: list[SavedStep], data: some.DataObject
) -> None:
    older = sorted(steps, key=lambda step: step.number)[:-1]
    check_wrong_clock(policy, steps, data.draw(some.sampled_from(older)))


def before_the_latest_time(steps: Sequence[SavedStep]) -> set[int]:
    """The planted fault: a minute before the latest time, whichever step has it."""
    return {step.number for step in steps if max(step.time for step in steps) - step.time <= 60}


def test_the_law_of_clocks_catches_the_latest_time_taken_for_the_newest_step() -> None:
    steps = [SavedStep(number, time=1000.0 + number) for number in range(4)]
    with pytest.raises(AssertionError, match="other steps"):
        check_wrong_clock(before_the_latest_time, steps, steps[1])


def test_a_series_with_one_step_of_tomorrow_keeps_the_last_hour() -> None:
    steps = [SavedStep(number, time=600.0 * number) for number in range(12)]
    steps[9] = replace(steps[9], time=steps[9].time + 86_400)
    assert keep_for(3600)(steps) == {5, 6, 7, 8, 9, 10, 11}
    assert keep_for(3600)([]) == frozenset()


def check_union(join: Callable[..., Policy], several: Sequence[Policy], steps: Sequence[SavedStep]) -> None:
    assert join(*several)(steps) == frozenset().union(*(policy(steps) for policy in several))


def all_of(*several: Policy) -> RetentionPolicy:
    """The planted fault: what every policy keeps."""
    return RetentionPolicy("all_of", lambda steps: frozenset.intersection(*(policy(steps) for policy in several)))


def test_the_law_catches_a_union_that_is_an_intersection() -> None:
    with pytest.raises(AssertionError):
        check_union(all_of, [keep_last(1), keep_steps([1])], [SavedStep(1), SavedStep(2)])


@given(listings(), some.integers(0, 15))
def test_the_last_few_are_as_many_as_there_are(steps: list[SavedStep], count: int) -> None:
    kept = keep_last(count)(steps)
    assert len(kept) == min(count, len(steps))
    assert all(number > other for number in kept for other in numbers(steps) - kept)


@given(listings(), some.integers(0, 5), some.sampled_from(["min", "max"]))
def test_the_best_are_as_good_as_any_that_goes(steps: list[SavedStep], count: int, mode: str) -> None:
    check_best(keep_best(count, "loss", mode=mode), steps, count, mode)


def check_best(policy: Policy, steps: Sequence[SavedStep], count: int, mode: str) -> None:
    kept = policy(steps)
    judged = [step for step in steps if not math.isnan(step.metrics.get("loss", math.nan))]
    sign = 1 if mode == "min" else -1
    best = sorted(sign * step.metrics["loss"] for step in judged)[:count]
    assert sorted(sign * step.metrics["loss"] for step in judged if step.number in kept)[:count] == best
    assert {step.number for step in steps if "loss" not in step.metrics} <= kept


def test_the_law_of_the_best_catches_the_other_end() -> None:
    steps = [SavedStep(number, metrics={"loss": float(number)}) for number in range(4)]
    with pytest.raises(AssertionError):
        check_best(keep_best(1, "loss", mode="max"), steps, 1, "min")


def test_ties_go_to_the_newer_step_and_nan_is_never_best() -> None:
    steps = [
        SavedStep(number, metrics={"loss": loss}) for number, loss in ((1, 0.5), (2, 0.5), (3, math.nan), (4, 0.9))
    ]
    assert keep_best(1, "loss")(steps) == {2, 4}
    assert keep_best(4, "loss")(steps) == {1, 2, 4}
    assert best_step(steps, "loss") == steps[1]
    assert best_step(steps, "loss", mode="max") == steps[3]
    assert best_step(steps, "accuracy") is None
    assert best_step([replace(steps[2])], "loss") is None


def test_a_policy_shows_how_it_was_made() -> None:
    policy = keep_any(keep_last(3), keep_best(1, "loss", mode="max"), keep_for(60, now=5.0), the_first)
    assert repr(policy) == "keep_any(keep_last(3), keep_best(1, 'loss', mode='max'), keep_for(60, now=5.0), the_first)"


def the_first(steps: Sequence[SavedStep]) -> list[int]:
    return [7, *sorted(step.number for step in steps)[:1]]


def test_any_function_of_a_listing_is_a_policy() -> None:
    steps = [SavedStep(1), SavedStep(2), SavedStep(3)]
    assert kept_steps(the_first, steps) == {1: ("the_first",), 3: ("the newest",)}
    measured_only = keep_best(1, "loss")
    assert kept_steps(
        lambda steps: measured_only([step for step in steps if "loss" in step.metrics]), steps
    ).keys() == {3}
