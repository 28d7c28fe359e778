"""What keys match is what regular expressions say, and no key makes matching slow."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from itertools import zip_longest

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardtree as sharded
from shardtree.core.trees import FormPiece, KeyForm, key_form, key_matcher, match_key, one_of, text_piece
from shardtree.core.trees._key_forms import match_in_order
from shardtree.transforms import _stack
from tests.core.trees.samples import assert_caught

# The matcher as it was while regular expressions alone were it: the oracle.

STAR = re.compile(r"\*\*\.|\.\*\*$|\*\*?")
EXPRESSIONS = {"**.": r"((?:[^.]+\.)*)", ".**": r"((?:\.[^.]+)*)", "**": r"((?s:.*))"}


def key_expression(pattern: str) -> str:
    def star_expression(star: re.Match[str]) -> str:
        around = pattern[: star.start()][-1:] + pattern[star.end() :][:1]
        return r"([^.]+)" if around in ("", ".", "..") else r"([^.]*)"

    texts = [re.escape(text) for text in STAR.split(pattern)]
    expressions = [EXPRESSIONS.get(star[0]) or star_expression(star) for star in STAR.finditer(pattern)]
    return "".join(text + star for text, star in zip_longest(texts, expressions, fillvalue=""))


def expected(pattern: str, key: str) -> tuple[str, ...] | None:
    match = re.fullmatch(key_expression(pattern), key)
    return None if match is None else tuple(part.strip(".") for part in match.groups())


Match = Callable[[str, str], tuple[str, ...] | None]


def in_order(pattern: str, key: str) -> tuple[str, ...] | None:
    """Match as keys are that are too long for regular expressions."""
    match = match_in_order(key_form(pattern).pieces, key)
    return None if match is None else tuple(part.strip(".") for part in match)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str]:
    """Return a pattern, and a key of which parts fit it."""
    parts = st.sampled_from(["a", "b", "ab", ".", "..", "0", "*", "**", "**.", ".**", ".*.", "\n"])
    pattern = "".join(draw(st.lists(parts, min_size=1, max_size=7)))
    filling = st.text("ab.0\n", max_size=4)
    return pattern, re.sub(r"\*+", lambda star: draw(filling), pattern) + draw(st.sampled_from(["", "", "a", ".b"]))


def is_as_before(match: Match, pair: tuple[str, str]) -> None:
    assert match(*pair) == expected(*pair)


@given(pairs())
@example(("**.a.**.w", "x.a.y.a.z.w"))
@example(("a.**\n", "a.b\n"))
@example(("**.**.a", "b.b.a"))
def test_what_stars_match_is_as_before(pair: tuple[str, str]) -> None:
    is_as_before(match_key, pair)
    is_as_before(in_order, pair)
    assert key_matcher(["x", pair[0]])(pair[1]) is (pair[1] == "x" or expected(*pair) is not None)


def test_what_stars_match_catches_a_last_star_that_is_the_longest() -> None:
    def backwards(pattern: str, key: str) -> tuple[str, ...] | None:
        found = in_order(pattern[::-1], key[::-1])
        return None if found is None else tuple(part[::-1] for part in found[::-1])

    assert_caught(is_as_before, backwards, pairs())


def test_what_stars_match_catches_places_that_are_not_looked_at_twice() -> None:
    def greedy(pattern: str, key: str) -> tuple[str, ...] | None:
        match = re.fullmatch(re.sub(r"(?<=[*+])\)", "+)", key_expression(pattern)), key)  # possessive
        return None if match is None else tuple(part.strip(".") for part in match.groups())

    assert_caught(is_as_before, greedy, pairs())


# The forms of layers' keys: what stands before a number, the number, and what follows.

LAYERS = {
    "stack": (r"({0})\.(0|[1-9][0-9]*)\.(.+)", (".", FormPiece("number"), ".", FormPiece("rest"))),
    "unstack": (r"({0})\.(?![0-9]+(?:\.|$))(.+)", (".", FormPiece("rest without number"))),
    "keep": (
        r"((?:(?:[^.]+\.)*optimizer\.(?:state\.[^.]+|param_group)\.)?{0})\.(0|[1-9][0-9]*)((?:\..+)?)",
        (".", FormPiece("number"), one_of((text_piece("."), FormPiece("rest")), ())),
    ),
}


def layer_form(name: str, pattern: str) -> KeyForm:
    end = [text_piece(piece) if isinstance(piece, str) else piece for piece in LAYERS[name][1]]
    return KeyForm((*([_stack._STATES] if name == "keep" else []), *key_form(pattern).pieces, *end))


PARTS = ["a", "b", "0", "7", "07", "10", "\n", "", "optimizer", "state", "param_group"]
PREFIXES = st.lists(st.sampled_from(["a", "*", "**", "a*", "*b*"]), min_size=1, max_size=3).map(".".join)


@pytest.mark.parametrize("name", LAYERS)
@given(PREFIXES, st.lists(st.sampled_from(PARTS), min_size=1, max_size=9).map(".".join))
@example("**", "a.optimizer.state.optimizer.param_group.a.0.b")
def test_numbers_of_layers_are_found_as_before(name: str, pattern: str, key: str) -> None:
    match = re.fullmatch(LAYERS[name][0].format(key_expression(pattern)), key, re.DOTALL)
    form = layer_form(name, pattern)
    for found in (form.match(key), match_in_order(form.pieces, key)):
        assert (found is None) is (match is None)
        if found is not None and match is not None:
            ends = (-1,) if name == "unstack" else (-2, -1)
            assert [found[end] for end in ends] == [match.groups()[end] for end in ends]
            assert key.endswith("".join(found[-1:])) and key[: match.end(1)] == match[1]


# Keys that a file makes as long as it likes: by regular expressions, each of these takes minutes to years.

LONG = {
    "the reported case": ("**.experts.**.weight", "experts." * 8000 + "x"),
    "three": ("**.a.**.a.**.w", "a." * 30000 + "x"),
    "stars within a part": ("*a*a*a*b", "a" * 30000),
    "across dots": ("**a**a**b", "a." * 20000),
    "many parts": ("a.**.*.*.*.b", "a." * 30000 + "c"),
}


@pytest.fixture
def without_expressions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let regular expressions of single patterns fail, which long keys must not reach."""

    def expression(form: KeyForm) -> re.Pattern[str]:
        raise AssertionError("a regular expression")

    monkeypatch.setattr(KeyForm, "expression", property(expression))


@pytest.mark.usefixtures("without_expressions")
@pytest.mark.parametrize("name", LONG)
def test_long_keys_are_matched_without_regular_expressions(name: str) -> None:
    pattern, key = LONG[name]
    assert match_key(pattern, key) is None
    assert not key_matcher(["x", pattern])(key)
    assert sharded.layouts.specs_by_pattern({pattern: sharded.P("tp")}, default=sharded.P())(key, None) == sharded.P()
    assert match_key(f"{pattern}.**", f"{pattern.replace('*', 'a')}.{key}".rstrip(".")) is not None


@pytest.mark.usefixtures("without_expressions")
@pytest.mark.parametrize("name", LAYERS)
def test_long_keys_of_layers_are_matched_without_regular_expressions(name: str) -> None:
    found = layer_form(name, "**.x.**").match("optimizer.state.a.x.0.." * 3000)
    assert found is not None and found[-1].endswith("..")


def test_functions_of_keys_are_values_that_go_to_other_processes() -> None:
    fits = pickle.loads(pickle.dumps(key_matcher(["**.w", "a"])))
    assert [fits(key) for key in ("b.w", "a", "c")] == [True, True, False]
