"""Patterns of keys: what matches, what stands for the stars, and that filling in undoes matching."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree as sharded
from shardtree.core.trees import fill_key, key_matcher, match_key, match_keys, shell_differences, stars
from tests.core.trees.samples import assert_caught

NAMES = st.sampled_from(["a", "b", "ab", "X", "0"])
KEYS = st.lists(NAMES, min_size=1, max_size=5).map(".".join)
# One ** at most: with two, which of them stands for what isn't told by the key alone.
PARTS = st.lists(NAMES | st.just("*"), max_size=3)
PATTERNS = (
    st.tuples(PARTS, st.sampled_from([[], ["**"]]), PARTS)
    .map(lambda parts: [*parts[0], *parts[1], *parts[2]])
    .filter(bool)
)

Match = Callable[[str, str], tuple[str, ...] | None]


def by_parts(pattern: Sequence[str], key: Sequence[str]) -> tuple[str, ...] | None:
    """Return what stands for each star, told part by part."""
    if not pattern:
        return None if key else ()
    if pattern[0] == "**":
        lengths = range(len(key), -1, -1)
        rests = ((length, by_parts(pattern[1:], key[length:])) for length in lengths)
        return next(((".".join(key[:length]), *rest) for length, rest in rests if rest is not None), None)
    if not key or pattern[0] not in ("*", key[0]):
        return None
    rest = by_parts(pattern[1:], key[1:])
    return None if rest is None else (*key[:1], *rest) if pattern[0] == "*" else rest


def matches_part_by_part(match: Match, pattern: list[str], key: str) -> None:
    assert match(".".join(pattern), key) == by_parts(pattern, key.split("."))


@given(PATTERNS, KEYS)
def test_a_star_is_one_part_and_two_are_any_number(pattern: list[str], key: str) -> None:
    matches_part_by_part(match_key, pattern, key)


def test_a_star_is_one_part_catches_globs() -> None:
    assert_caught(
        matches_part_by_part, lambda pattern, key: () if fnmatch.fnmatchcase(key, pattern) else None, PATTERNS, KEYS
    )


# A star beside other characters: any of that part's, also none.

WORDS = st.text("ab", min_size=1, max_size=3)
GLOBS = st.lists(st.text("ab*", min_size=1, max_size=4).filter(lambda part: "**" not in part), min_size=1, max_size=3)


def part_by_part(match: Match, pattern: list[str], key: list[str]) -> None:
    fits = len(pattern) == len(key) and all(map(fnmatch.fnmatchcase, key, pattern))
    assert (match(".".join(pattern), ".".join(key)) is not None) is fits


@given(GLOBS, st.lists(WORDS, min_size=1, max_size=3))
def test_within_a_part_a_star_is_a_shells(pattern: list[str], key: list[str]) -> None:
    part_by_part(match_key, pattern, key)


def test_within_a_part_catches_stars_that_want_a_character() -> None:
    def greedy(pattern: str, key: str) -> tuple[str, ...] | None:
        return () if re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), key) else None

    assert_caught(part_by_part, greedy, GLOBS, st.lists(WORDS, min_size=1, max_size=3))


def test_a_pattern_fits_the_same_keys_everywhere() -> None:
    """The state of the reported case, by each function that takes patterns of keys."""
    keys = ["w.exp_avg", "w.exp_avg_sq", "w.exp", "h.w.exp_avg", "exp_avg"]
    expected = {"w.exp_avg", "w.exp_avg_sq", "h.w.exp_avg", "exp_avg"}
    pattern, tree = "**.exp_avg*", {key: sharded.ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in keys}
    spec = sharded.layouts.specs_by_pattern({pattern: sharded.P("tp")}, default=sharded.P())
    storage, other = sharded.storage.MemoryStorage(), sharded.storage.MemoryStorage()
    sharded.save(tree, storage)
    report = sharded.convert(storage, other, backend="safetensors", leave_out=[pattern])
    renamed = sharded.transforms.partial_rename(tree, {pattern: "new.**.a*"})
    found = {
        "specs_by_pattern": {key for key in keys if spec(key, None) == sharded.P("tp")},
        "convert": set(report.left_out),
        "partial_rename": {key for key in keys if renamed[key].key != key},
        "select": set(sharded.select({"x": list(tree.values())}, pattern)["x"]) - {sharded.trees.HOLE},
        "cast": {
            key for key, one in sharded.cast(tree, torch.float16, keys=[pattern]).items() if one.dtype != torch.float32
        },
        "key_matcher": {*filter(key_matcher([pattern]), keys)},
    }
    found["select"] = {shard.key for shard in found["select"]}
    assert {name: sorted(one) for name, one in found.items()} == dict.fromkeys(found, sorted(expected))


# What a shell reads otherwise is told.

SHELLS = st.text("ab.*?[]", min_size=1, max_size=6)


@given(SHELLS, st.lists(st.text("ab.", min_size=1, max_size=5), max_size=5))
def test_a_pattern_is_told_exactly_where_a_shell_fits_other_keys(pattern: str, keys: list[str]) -> None:
    here, there = set(filter(key_matcher([pattern]), keys)), {key for key in keys if fnmatch.fnmatchcase(key, pattern)}
    told = shell_differences([pattern], keys)
    assert bool(told) is (here != there and "**" not in pattern)
    for line in told:
        if ": write " in line:
            wide = ast.literal_eval(line.partition(": write ")[2])
            assert set(filter(key_matcher([wide]), keys)) == there


@pytest.mark.parametrize("call", ["leave_out", "layout"])
def test_a_conversion_warns_of_what_a_shell_reads_otherwise(call: str) -> None:
    storage = sharded.storage.MemoryStorage()
    sharded.save([sharded.ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in ("a.w", "a.b.w")], storage)
    given = {"leave_out": ["a.*"]} if call == "leave_out" else {"layout": {"a.*": (2,)}}
    with pytest.warns(
        FutureWarning,
        match=rf"convert: {call}: patterns that match other keys than .* as a shell's globs\n  'a\.\*' fits 1 key",
    ):
        sharded.convert(storage, sharded.storage.MemoryStorage(), backend="safetensors", **given)


Fill = Callable[[str, Sequence[str]], str]


def is_undone(fill: Fill, pattern: list[str], key: str) -> None:
    parts = match_key(".".join(pattern), key)
    if parts is not None:
        assert fill(".".join(pattern), parts) == key
        assert len(parts) == stars(".".join(pattern))


@given(PATTERNS, KEYS)
def test_filling_in_undoes_matching(pattern: list[str], key: str) -> None:
    is_undone(fill_key, pattern, key)


def test_filling_in_undoes_matching_catches_stars_filled_backwards() -> None:
    assert_caught(is_undone, lambda pattern, parts: fill_key(pattern, parts[::-1]), PATTERNS, KEYS)


@pytest.mark.parametrize(
    ("pattern", "key", "parts"),
    [
        ("l*s.w", "layers.w", ("ayer",)),
        ("a.**", "ab", None),
        ("a.b", "axb", None),
        ("a+", "a+", ()),
        ("a", "a\n", None),
    ],
)
def test_what_stands_for_the_stars(pattern: str, key: str, parts: tuple[str, ...] | None) -> None:
    assert match_key(pattern, key) == parts


def test_the_first_pattern_that_fits_is_chosen() -> None:
    found = match_keys("rename", ["a.1", "a.*", "**"], ["a.1", "a.2", "b"])
    assert found == {"a.1": ("a.1", ()), "a.2": ("a.*", ("2",)), "b": ("**", ("b",))}
    assert match_keys("rename", ["a"], ["b", "a"]) == {"a": ("a", ())}
    assert match_keys("rename", [], ["a"]) == {}


def test_filling_in_leaves_out_the_dot_of_no_part() -> None:
    assert [fill_key(pattern, [""]) for pattern in ("**.w", "a.**", "a.**.w")] == ["w", "a", "a.w"]
    assert fill_key("a.*.**.w", ["1", "b.c"]) == "a.1.b.c.w"
    assert fill_key("plain", []) == "plain"
