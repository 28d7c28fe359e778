"""Canonical JSON and its suspicious reader."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.codec import canonical_json, parse_json
from shardtree.errors import CheckpointingException, CorruptCheckpoint, UnsupportedValue

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_parse_undoes_canonical(value: object) -> None:
    assert parse_json(canonical_json(value), "test") == value


@given(st.dictionaries(st.text(), JSON))
def test_canonical_ignores_the_order_of_names(value: dict[str, object]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_canonical_is_ascii_without_spaces() -> None:
    assert canonical_json({"b": [1, 2.0], "ä": None}) == rb'{"b":[1,2.0],"\u00e4":null}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1: 2, "a": 3}, {(1,): 2}])
def test_canonical_refuses_what_json_lacks(value: object) -> None:
    with pytest.raises(UnsupportedValue):
        canonical_json(value)


@pytest.mark.parametrize(
    "text", [b"", b"nan", b"NaN", b"-Infinity", b"1e999", b"{'a':1}", b'{"a":1,"a":1}', b"\xff", b"[" * 100_000, b"1 2"]
)
def test_parse_refuses(text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"metadata\.json"):
        parse_json(text, "metadata.json")


@given(st.binary())
def test_any_bytes_parse_or_raise(data: bytes) -> None:
    with contextlib.suppress(CheckpointingException):
        parse_json(data, "test")
