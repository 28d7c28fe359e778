"""Where ranks' common states differ: every path, every value, and all the ranks that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.layouts import common_problems
from shardtree.layouts import Problem
from shardtree.trees import HOLE
from tests.core.trees.samples import assert_caught

VALUES = st.sampled_from([0, 1, 2.5, "a", None])
STATES = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)
Check = Callable[[Sequence[Any]], tuple[Problem, ...]]


def paths_and_ranks_are_told(check: Check, states: Sequence[dict[str, Any]]) -> None:
    """Each key whose values aren't all one is told, with the ranks of each of its values."""
    nothing = object()
    found = {problem.key: problem.what for problem in check(states)}
    for key in "abc":
        values = [state.get(key, nothing) for state in states]
        if all(value == values[0] for value in values):
            assert (key,) not in found
            continue
        for value in values:
            ranks = [rank for rank, other in enumerate(values) if other == value]
            shown = "nothing" if value is nothing else repr(value)
            told = next(part for part in found[(key,)].split(", rank") if part.endswith(f" {shown}"))
            spelled = told.removeprefix("rank").removeprefix("s").strip().split(" ha")[0]
            assert expanded(spelled) == ranks


def expanded(text: str) -> list[int]:
    """Return the ranks of a text like `0, 2-5`."""
    ends = [list(map(int, part.split("-"))) for part in text.split(", ")]
    return [rank for part in ends for rank in range(part[0], part[-1] + 1)]


@given(st.lists(STATES, min_size=1, max_size=6))
def test_every_path_that_differs_is_told_with_all_values_and_ranks(states: list[dict[str, Any]]) -> None:
    paths_and_ranks_are_told(common_problems, states)


def test_the_law_catches_a_comparison_with_the_first_other_rank_alone() -> None:
    def first_two(states: Sequence[Any]) -> tuple[Problem, ...]:
        return common_problems(states[:2])

    assert_caught(paths_and_ranks_are_told, first_two, st.lists(STATES, min_size=1, max_size=6))


def told(*states: Any) -> list[str]:
    return list(map(str, common_problems(states)))


def test_ranks_that_differ_alike_are_told_together() -> None:
    assert told({"n": {"step": 7}}, *[{"n": {"step": 8}}] * 3) == ["tree['n']['step']: rank 0 has 7, ranks 1-3 have 8"]


def test_few_numbers_are_shown_and_many_only_described() -> None:
    assert told({"t": torch.tensor([1, 2])}, {"t": torch.tensor([1, 3])}) == [
        "tree['t']: rank 0 has Tensor (2,) int64 [1, 2], rank 1 has Tensor (2,) int64 [1, 3]"
    ]
    assert told({"t": np.zeros(9)}, {"t": np.ones(9)}) == [
        "tree['t']: rank 0 has ndarray (9,) float64, rank 1 has another ndarray (9,) float64"
    ]
    (long,) = told({"s": "a" * 100}, {"s": "b"})
    assert len(long) < 120


def test_holes_in_dicts_are_no_difference() -> None:
    assert told({"w": HOLE, "step": 1}, {"step": 1}) == []
    assert told({"list": [HOLE, 1]}, {"list": [1]}) != []


def test_trees_of_different_kinds_differ_at_the_root() -> None:
    assert told([1], {"a": 1}) == ["tree: rank 0 has list, rank 1 has dict"]
