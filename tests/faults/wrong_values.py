"""Values of other types, and numbers beyond reason, in the place of each value of a file's metadata."""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.fuzz.slots import Slot

OTHER_TYPES: dict[str, Any] = {
    **{repr(value): value for value in (None, True, -1, 0, 1.5, float("inf"), "x", b"x", 2**70)},
    **{repr(value): value for value in ([], [1], (), (1,), {}, {"a": 1}, {1: [1]})},
    "an array": np.arange(2),
    "a number of many digits": 10**5000,
}
ABSURD = (-1, 2**31, 2**44, 2**63 - 1, 2**64)

_NO_VALUE = {"PROTO", "FRAME", "MARK", "STOP", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "POP", "POP_MARK"}


def value_ends(data: bytes) -> list[tuple[int, Any]]:
    """Return where each value of a pickle ends, parts of others included, and its opcode's argument."""
    ops = list(pickletools.genops(data))
    ends = [at for *_, at in ops[1:] if at is not None]
    return [(end, argument) for (op, argument, _), end in zip(ops, ends, strict=False) if op.name not in _NO_VALUE]


def with_value(data: bytes, end: int, value: Any) -> bytes:
    """Return a pickle with another value in the place of the one that ends there."""
    # The old one is made and dropped (POP), so that what refers to its parts by number still finds them.
    return data[:end] + b"0" + pickle.dumps(value, 2)[2:-1] + data[end:]


def with_absurd_numbers(slot: Slot) -> Iterator[tuple[str, bytes]]:
    """Yield what was changed, and a slot's bytes with an absurd number in place of one or of all equal ones."""
    change = _CHANGES.get(slot.kind, _in_nothing)
    for absurd in ABSURD:
        yield from ((f"{slot.name}: {place} -> {absurd}", made) for place, made in change(slot.seed, absurd))


def _in_nothing(data: bytes, absurd: int) -> Iterator[tuple[str, bytes]]:
    yield from ()


def _in_pickle(data: bytes, absurd: int) -> Iterator[tuple[str, bytes]]:
    ends = [(end, old) for end, old in value_ends(data) if type(old) is int]
    for end, old in ends:
        yield f"{old} at {end}", with_value(data, end, absurd)
    for number in {old for _, old in ends}:
        made = data
        for end in reversed([end for end, old in ends if old == number]):
            made = with_value(made, end, absurd)
        yield f"each {number}", made


def _in_columns(data: bytes, absurd: int) -> Iterator[tuple[str, bytes]]:
    number = (absurd % 2**64).to_bytes(8, "little")
    yield from ((f"byte {at}", data[:at] + number + data[at + 8 :]) for at in range(0, len(data) - 7, 8))


def _in_header(data: bytes, absurd: int) -> Iterator[tuple[str, bytes]]:
    length = int.from_bytes(data[:8], "little")
    for place, made in _in_json(data[8 : 8 + length], absurd):
        text = made.ljust(length)
        yield place, struct.pack("<Q", len(text)) + text + data[8 + length :]


def _in_json(text: bytes, absurd: int) -> Iterator[tuple[str, bytes]]:
    value = json.loads(text)
    places = list(_numbers(value))
    for old in {holder[name] for holder, name, _ in places}:
        alike = [(holder, name) for holder, name, _ in places if holder[name] == old]
        for chosen in [alike, *([one] for one in alike if len(alike) > 1)]:
            for holder, name in chosen:
                holder[name] = absurd
            where = next(place for holder, name, place in places if (holder, name) == chosen[0])
            yield f"{len(chosen)} times {old}, first {where}", json.dumps(value).encode()
            for holder, name in chosen:
                holder[name] = old


def _numbers(value: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield each number's container, its name or position there, and its place."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in entries:
        if type(item) is int:
            yield value, name, f"{place}[{name!r}]"
        yield from _numbers(item, f"{place}[{name!r}]")


_CHANGES = {"pickle": _in_pickle, "integers": _in_columns, "header": _in_header, "json": _in_json}
