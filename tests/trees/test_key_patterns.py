"""Patterns of keys: what matches, what stands for the stars, and that filling in undoes matching."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.trees import fill_key, key_expression, match_key, match_keys, stars
from tests.trees.samples import assert_caught

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
        ("layers.*.w", "layers.11.w", ("11",)),
        ("layers.*.w", "layers..w", None),
        ("l*s.w", "layers.w", ("ayer",)),
        ("l*s.w", "la.rs.w", None),
        ("**.w", "w", ("",)),
        ("**.w", "X.a.X.w", ("X.a.X",)),
        ("a.**", "a", ("",)),
        ("a.**", "a.b.c", ("b.c",)),
        ("a.**", "ab", None),
        ("a.**.b", "a.b", ("",)),
        ("**", "a.b", ("a.b",)),
        ("a.b", "axb", None),
        ("a+", "a+", ()),
        ("a", "a\n", None),
    ],
)
def test_what_stands_for_the_stars(pattern: str, key: str, parts: tuple[str, ...] | None) -> None:
    assert match_key(pattern, key) == parts


def test_filling_in_leaves_out_the_dot_of_no_part() -> None:
    assert [fill_key(pattern, [""]) for pattern in ("**.w", "a.**", "a.**.w")] == ["w", "a", "a.w"]
    assert fill_key("a.*.**.w", ["1", "b.c"]) == "a.1.b.c.w"
    assert fill_key("plain", []) == "plain"


def test_a_pattern_is_a_group_for_each_star() -> None:
    assert key_expression("a.*.b") == r"a\.([^.]+)\.b"
    assert key_expression("**.a") == r"((?:[^.]+\.)*)a"
    assert (stars("a"), stars("*.**.b*"), stars("a.**")) == (0, 3, 1)


def test_the_first_pattern_that_fits_is_chosen() -> None:
    found = match_keys("rename", ["a.1", "a.*", "**"], ["a.1", "a.2", "b"])
    assert found == {"a.1": ("a.1", ()), "a.2": ("a.*", ("2",)), "b": ("**", ("b",))}
    assert match_keys("rename", ["a"], ["b", "a"]) == {"a": ("a", ())}
    assert match_keys("rename", [], ["a"]) == {}
