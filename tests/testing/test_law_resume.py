"""The comparison of two gathered states of a job: every planted fault is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.testing._law_resume import JobState, Reading, ResumeProblem, gathered, report
from shardtree.testing._law_resume_causes import Known, state_problems

NAMES = ("a", "b", "head", "q")
TIED = frozenset({("embed", "head")})


def state_at(step: int) -> JobState:
    """Return a state whose values are all different, and change with each step."""
    values: dict[tuple[str, str], Any] = {}
    for number, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(100 * step + number)
        for state in ("weight", "exp_avg", "exp_avg_sq", "master"):
            values[name, state] = torch.randn(6, 4, generator=generator)
        values[name, "step"] = torch.tensor(float(step))
        values[name, "group['lr']"] = 0.1 if name in ("a", "b") else 0.01
    values["rope", "buffer"] = torch.arange(6.0) + 1
    values["rng", "generator"] = torch.Generator().manual_seed(step).get_state()
    values["data", "position"] = 8 * step
    return JobState(values, ties=TIED, ranks=2)


SAVED = state_at(5)
FRESH = state_at(0)
KNOWN = Known(SAVED, FRESH, {offset: state_at(5 + offset) for offset in (-2, -1, 1, 2)})


def other_values(changes: Mapping[tuple[str, str], Any]) -> JobState:
    return replace(SAVED, values={**SAVED.values, **changes})


def without(*places: tuple[str, str]) -> JobState:
    return replace(SAVED, values={place: value for place, value in SAVED.values.items() if place not in places})


def swapped(one: tuple[str, str], other: tuple[str, str]) -> JobState:
    return other_values({one: SAVED.values[other], other: SAVED.values[one]})


def on_rank(place: tuple[str, str], value: Any) -> JobState:
    return replace(SAVED, others={place: {1: value}})


def at(place: tuple[str, str], change: Callable[[Any], Any]) -> JobState:
    return other_values({place: change(SAVED.values[place])})


FAULTS: dict[str, tuple[JobState, tuple[str, ...], str, str]] = {
    "a lost step count": (at(("a", "step"), torch.zeros_like), ("a",), "step", "not restored"),
    "a step count that is missing": (without(("a", "step"), ("b", "step")), ("a", "b"), "step", "not restored"),
    "moments of another parameter": (
        swapped(("a", "exp_avg"), ("b", "exp_avg")),
        ("a",),
        "exp_avg",
        "swapped with that of 'b'",
    ),
    "moments in each other's place": (
        swapped(("a", "exp_avg"), ("a", "exp_avg_sq")),
        ("a",),
        "exp_avg",
        "swapped with exp_avg_sq",
    ),
    "a save of an older step": (state_at(3), ("a",), "weight", "stale by 2 steps"),
    "an asynchronous save that wrote later": (state_at(6), ("a",), "weight", "ahead by 1 step"),
    "another group's settings": (
        at(("a", "group['lr']"), lambda _: 0.01),
        ("a",),
        "group['lr']",
        "another group's settings",
    ),
    "rows permuted": (at(("q", "weight"), lambda w: w[[0, 2, 4, 1, 3, 5]]), ("q",), "weight", "permuted along axis 0"),
    "elements permuted": (at(("q", "weight"), lambda w: w.T.reshape(6, 4)), ("q",), "weight", "permuted"),
    "a lost buffer": (at(("rope", "buffer"), torch.zeros_like), ("rope",), "buffer", "not restored"),
    "a generator not restored": (
        other_values({("rng", "generator"): FRESH.values["rng", "generator"]}),
        ("rng",),
        "generator",
        "not restored",
    ),
    "data from the beginning": (at(("data", "position"), lambda _: 0), ("data",), "position", "not restored"),
    "data repeated": (at(("data", "position"), lambda _: 32), ("data",), "position", "stale by 1 step"),
    "data skipped": (at(("data", "position"), lambda _: 48), ("data",), "position", "ahead by 1 step"),
    "a replica that is stale": (
        on_rank(("b", "weight"), state_at(4).values["b", "weight"]),
        ("b",),
        "weight",
        "replicas differ: stale by 1 step",
    ),
    "masters rounded": (
        at(("a", "master"), lambda w: w.bfloat16().float()),
        ("a",),
        "master",
        "rounded to bfloat16",
    ),
    "masters in another dtype": (at(("a", "master"), torch.Tensor.bfloat16), ("a",), "master", "rounded to bfloat16"),
    "a tied weight untied": (replace(SAVED, ties=frozenset()), ("embed", "head"), "tie", "untied"),
    "a moment scaled by the data-parallel size": (
        at(("a", "exp_avg"), lambda moment: moment * 4),
        ("a",),
        "exp_avg",
        "scaled by 4",
    ),
    "a moment divided by it": (at(("a", "exp_avg"), lambda moment: moment / 8), ("a",), "exp_avg", "scaled by 1/8"),
    "half of a tensor is not restored": (
        at(("a", "weight"), lambda w: torch.cat([w[:3], FRESH.values["a", "weight"][3:]])),
        ("a",),
        "weight",
        "not restored",
    ),
    "another shape": (at(("a", "weight"), lambda w: w[:3]), ("a",), "weight", "another shape"),
    "an unknown change": (at(("a", "weight"), lambda w: w + 1), ("a",), "weight", "other values"),
    "a state too many": (
        other_values({("a", "max_exp_avg_sq"): torch.ones(2)}),
        ("a",),
        "max_exp_avg_sq",
        "unexpected",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    found, keys, state, cause = FAULTS[fault]
    problems = state_problems(found, KNOWN)
    named = {(key, problem.state): problem.cause for problem in problems for key in problem.keys}
    assert all(named[key, state] == cause for key in keys), named
    changed = {
        place
        for place in found.values
        if place in SAVED.values and st.trees.diff(found.values[place], SAVED.values[place])
    }
    assert all(
        place in changed or place not in found.values or state in ("tie", "max_exp_avg_sq") or found.others
        for place in named
    )


def test_what_is_restored_has_no_problem() -> None:
    assert state_problems(state_at(5), KNOWN) == []
    assert state_problems(other_values({("a", "max"): torch.zeros(2), ("a", "buf"): None}), KNOWN) == []


def test_ranks_own_values_are_compared_rank_by_rank() -> None:
    """A rank's generator is no replica of another's; on another number of ranks nobody knows what it should be."""
    place = ("rng", "generator")
    saved = replace(SAVED, others={place: {1: torch.Generator().manual_seed(9).get_state()}})
    assert state_problems(saved, replace(KNOWN, saved=saved)) == []
    assert state_problems(replace(state_at(5), ranks=3), replace(KNOWN, saved=saved)) == []
    [problem] = state_problems(state_at(5), replace(KNOWN, saved=saved))
    assert (problem.keys, problem.state, problem.ranks) == (("rng",), "generator", (1,))


def test_a_rank_that_differs_is_named() -> None:
    [problem] = state_problems(FAULTS["a replica that is stale"][0], KNOWN)
    assert problem.ranks == (1,)
    assert str(problem).startswith("'b': weight on rank 1: replicas differ: stale by 1 step; 24 of 24 elements differ")


def test_copies_of_a_part_that_differ_are_found() -> None:
    def shard(rank: int, value: float) -> st.ShardedTensor:
        return st.ShardedTensor.from_rank_offsets("w", torch.full((2,), value), (0, rank // 2, 2), replica_id=rank % 2)

    readings = [Reading({("w", "weight"): (shard(rank, value),)}) for rank, value in enumerate([1.0, 1.0, 2.0, 3.0])]
    state = gathered(readings)
    assert state.values["w", "weight"].tolist() == [1, 1, 2, 2]
    assert {rank: whole.tolist() for rank, whole in state.others["w", "weight"].items()} == {3: [1, 1, 3, 3]}
    with pytest.raises(AssertionError, match=r"2 of 4 elements of 'w' \(weight\) are on no rank"):
        gathered(readings[:2])


def test_the_report_says_what_to_do() -> None:
    text = report([ResumeProblem(("w",), "step", "not restored", "found 0, expected 3", layouts="2 ranks → 4 ranks")])
    assert text.splitlines()[1:] == [
        "  2 ranks → 4 ranks: 'w': step: not restored; found 0, expected 3",
        "  Not restored: store this state, and load it after the job is built, over what `make` has set.",
    ]
