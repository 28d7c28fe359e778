"""Canonical JSON for writing, and strict JSON for reading."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from ..errors import CorruptCheckpoint, UnsupportedValue, error_text

_ZERO = re.compile(b"\0")


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON text of a value: sorted keys, no spaces, ASCII.

    Args:
        value: None, bools, ints, finite floats, strings, lists, tuples and dicts with string keys.

    Raises:
        UnsupportedValue: the value contains something else.

    Examples:
        >>> canonical_json({"b": [1, 2.5], "a": None})
        b'{"a":null,"b":[1,2.5]}'
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedValue(error_text(f"JSON: can't be written: {error}")) from error


def parse_json(data: bytes | bytearray | memoryview, what: str) -> Any:
    """Parse an untrusted JSON text.

    Args:
        data: UTF-8.
        what: the text's name, for messages.

    Raises:
        CorruptCheckpoint: not UTF-8, not JSON, a name twice in one object, a number that isn't finite, or nested
            too deep.

    Examples:
        >>> parse_json(b'{"a": [1, 2.5]}', "metadata.json")
        {'a': [1, 2.5]}
    """
    try:
        # Before the bytes become text: a file with holes can be terabytes long, takes no space, and reads as zeros.
        if _ZERO.search(data):
            raise ValueError("a zero byte")
        text = str(data, "utf-8")
        return json.loads(
            text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise CorruptCheckpoint(error_text(f"{what}: JSON is nested too deep")) from None
    except ValueError as error:
        raise CorruptCheckpoint(error_text(f"{what}: not valid JSON: {str(error)[:200]}")) from error


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two members of one name, other readers the first: they would see different checkpoints.
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return fields


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} isn't a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:50]} is out of range")
    return value
