"""The union of ranks' common trees, and what of it is a rank's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.trees import comparable, deepest, unite, united
from shardtree.trees import HOLE, Record, diff, restrict
from tests.core.trees.samples import KEYS, TENSORS, assert_caught

RANKS = 3
Unite = Callable[[Mapping[int, Any]], tuple[Any, Any]]
VALUES = st.one_of(
    st.none(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, float("nan"), "a", True]),
    TENSORS,
    st.just([1, {"a": 2}]),
)
TREES = st.dictionaries(
    KEYS, st.recursive(VALUES, lambda of: st.dictionaries(KEYS, of, min_size=1, max_size=3), max_leaves=8), min_size=1
)
SHARES = st.lists(st.sets(st.integers(0, RANKS - 1), min_size=1), min_size=1, max_size=5)
"""Which ranks hold a value, for each value in turn."""


def shared_out(tree: Mapping[str, Any], shares: Sequence[set[int]]) -> list[dict[str, Any]]:
    """Return what each rank holds of a tree: each value is on the ranks of its share, or, in some trees, a hole."""
    turn = 0

    def on_ranks(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
        nonlocal turn
        found: list[dict[str, Any]] = [{} for _ in range(RANKS)]
        for key, child in tree.items():
            if isinstance(child, dict):
                for rank, part in enumerate(on_ranks(child)):
                    if part:
                        found[rank][key] = part
            else:
                for rank in shares[turn % len(shares)]:
                    found[rank][key] = child
                turn += 1
        return found

    return on_ranks(tree)


def gives_the_tree(unite_: Unite, tree: dict[str, Any], shares: Sequence[set[int]]) -> None:
    parts = dict(enumerate(shared_out(tree, shares)))
    for ranks in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        union, conflicts = unite_({rank: parts[rank] for rank in ranks})
        assert not conflicts and not diff(union, tree)


@given(TREES, SHARES)
def test_the_union_of_restrictions_is_the_tree(tree: dict[str, Any], shares: list[set[int]]) -> None:
    gives_the_tree(unite, tree, shares)


def test_the_law_catches() -> None:
    def shallow(parts: Mapping[int, Any]) -> tuple[Any, Any]:
        return {key: child for part in parts.values() for key, child in part.items()}, {}

    assert_caught(gives_the_tree, shallow, TREES, SHARES)


@given(TREES, SHARES)
def test_each_rank_gets_its_own_back(tree: dict[str, Any], shares: list[set[int]]) -> None:
    for part in shared_out(tree, shares):
        assert not diff(restrict(tree, part), part or tree)  # all, where it names nothing


def keeps_what_is_named(restrict_: Callable[..., Any], tree: dict[str, Any], shares: list[set[int]]) -> None:
    """Each rank gets all of its own, what all ranks have, and nothing else of a dict of which it names own keys."""
    parts = shared_out(tree, shares)
    at = united(parts)
    for part in parts:
        got = restrict_(tree, part, at)
        lost = diff(part, got)
        assert not lost.only_left and not lost.mismatch and not diff(restrict_(tree, {}, at), tree)
        for path, shared in at.items():
            (mine, depth), (found, found_depth) = deepest(part, path), deepest(got, path)
            if depth == found_depth == len(path) and isinstance(mine, dict) and mine.keys() - shared:
                assert found.keys() == mine.keys() | shared


@given(TREES, SHARES)
def test_each_rank_gets_its_own_and_what_all_have(tree: dict[str, Any], shares: list[set[int]]) -> None:
    keeps_what_is_named(restrict, tree, shares)


def test_the_law_of_united_dicts_catches_a_load_of_the_whole_union() -> None:
    assert_caught(keeps_what_is_named, lambda tree, part, at: tree, TREES, SHARES)


def tells_conflicts(unite_: Unite, tree: dict[str, Any], shares: list[set[int]], values: list[Any]) -> None:
    """A key that is on some ranks with any values beside the rest is a conflict if and only if they differ."""
    ranks, parts = shares[0], dict(enumerate(shared_out(tree, shares)))
    held = {rank: values[rank] for rank in ranks}
    for rank in ranks:
        parts[rank] = {**parts[rank], "other": {"key": held[rank]}}
    conflicts = unite_(parts)[1]
    differ = any(diff(one, other) for one in held.values() for other in held.values())
    assert conflicts.keys() == ({("other", "key")} if differ else set())
    assert all(told.keys() == set(held) for told in conflicts.values())


VALUES_OF_RANKS = st.lists(VALUES, min_size=RANKS, max_size=RANKS)


@given(TREES, SHARES, VALUES_OF_RANKS)
def test_conflicts_are_told_with_their_ranks(tree: dict[str, Any], shares: list[set[int]], values: list[Any]) -> None:
    tells_conflicts(unite, tree, shares, values)


def test_the_law_of_conflicts_catches_one_that_is_left_out() -> None:
    def equal(parts: Mapping[int, Any]) -> tuple[Any, Any]:
        union, conflicts = unite(parts)
        return union, {path: told for path, told in conflicts.items() if 0.0 not in told.values()}

    def first_rank(parts: Mapping[int, Any]) -> tuple[Any, Any]:
        union, conflicts = unite(parts)
        return union, {path: dict(list(told.items())[:1]) for path, told in conflicts.items()}

    simple = st.lists(st.sampled_from([0.0, -0.0, 1]), min_size=RANKS, max_size=RANKS)
    for fault in (equal, first_rank):
        assert_caught(tells_conflicts, fault, TREES, SHARES, simple)


def test_holes_and_empty_containers_agree_with_anything() -> None:
    parts = {0: {"a": HOLE, "b": [], "c": {}, "d": [HOLE, 1]}, 1: {"a": 1, "b": {"x": 1}, "c": (2,), "d": [[], 1]}}
    union, conflicts = unite(parts)
    assert not conflicts and union == {"a": 1, "b": {"x": 1}, "c": (2,), "d": [HOLE, 1]}
    assert unite({0: {"a": HOLE}, 1: {"a": HOLE}}) == ({"a": HOLE}, {}) and comparable(union) == comparable(parts[1])
    assert unite({0: {"x": []}, 1: {"y": 1}})[0] == {"x": [], "y": 1}


def test_lists_must_be_the_same_and_are_told_whole() -> None:
    _, conflicts = unite({0: {"groups": [{"lr": 1}]}, 1: {"groups": [{"lr": 1, "wd": 0}]}, 2: {}})
    assert conflicts == {("groups",): {0: [{"lr": 1}], 1: [{"lr": 1, "wd": 0}]}}
    assert list(unite({0: {"a": {"b": 1}}, 1: {"a": 1}})[1]) == [("a",)]
    assert list(unite({0: {"t": torch.zeros(1)}, 5: {"t": -torch.zeros(1)}})[1]) == [("t",)]


def test_records_are_compared_by_field_bit_for_bit() -> None:
    def parts(one: float, other: float, kind: str = "optim.State") -> dict[int, Any]:
        pair = zip(("optim.State", kind), (one, other), strict=True)
        return {
            rank: {"o": Record(name, {"mu": torch.tensor(value), "n": 1})} for rank, (name, value) in enumerate(pair)
        }

    assert not unite(parts(float("nan"), float("nan")))[1]
    assert list(unite(parts(0.0, -0.0))[1]) == list(unite(parts(0.0, 0.0, "another.State"))[1]) == [("o",)]
    left, right = parts(0.0, -0.0).values()
    assert diff(left, right).mismatch == (("o", "mu"),)


def test_what_a_target_names_nothing_of_stays_whole() -> None:
    tree = {"optim": {"a": 1, "b": 2}, "rest": [1, {"c": 3}], "empty": {}, "step": 3}
    assert restrict(tree, {"optim": {"b": 0, "new": 1}}) == {"optim": {"b": 2}, "empty": {}}
    assert restrict(tree, {"optim": {}, "rest": [{}]}) == {
        "optim": {"a": 1, "b": 2},
        "rest": [1, {"c": 3}],
        "empty": {},
    }
    assert restrict(tree, {"new": 1}) == restrict(tree, []) == restrict(tree, {}) == tree
