"""Enum members, dataclasses and named tuples."""

from __future__ import annotations

import enum
import sys
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from shardtree.core.codec import decode_tree, encode_tree
from shardtree.errors import UnsupportedValue
from shardtree.trees import Record


class Color(enum.Enum):
    RED = 1
    ROUND = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):  # noqa: UP042
    ADAM = "adam"


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclass
class Plain:
    lr: float
    steps: list[int] = field(default_factory=list)
    derived: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.derived += 1


@dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    inner: Any = None


class Point(NamedTuple):
    x: int
    y: Any = None


Pair = namedtuple("Pair", "a b")

TYPES = (Color, Level, Word, Bits, Plain, Frozen, Point, Pair)
VALUES = [
    *Color,
    *Level,
    *Word,
    Bits.A,
    Bits.A | Bits.B,
    Bits(0),
    Plain(0.5, [1]),
    Frozen("a", Frozen("b", {Color.RED: (1,)})),
    Point(1, Point(2)),
    Pair([1], Level.LOW),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_instances_come_back_with_their_classes(value: Any) -> None:
    (found,) = decode_tree(encode_tree([value]), types=TYPES)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("key", [Color.RED, Level.LOW, Bits.A | Bits.B, Frozen("a", Point(1))], ids=repr)
def test_instances_are_keys(key: Any) -> None:
    assert decode_tree(encode_tree({key: 1, "a": {key}}), types=TYPES) == {key: 1, "a": {key}}
    assert decode_tree(encode_tree({key: 1})) == {decode_tree(encode_tree(key)): 1}


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_record_becomes_what_it_records(value: Any) -> None:
    record = decode_tree(encode_tree(value))
    assert type(record) is Record
    assert record.type_name == f"{type(value).__module__}.{type(value).__qualname__}"
    assert decode_tree(encode_tree(record)) == record
    assert hash(decode_tree(encode_tree(record))) == hash(record)
    assert decode_tree(encode_tree(record), types=TYPES) == value


def test_records_differ_where_instances_do() -> None:
    records = [decode_tree(encode_tree(value)) for value in VALUES]
    assert all(
        (one == other) == (first is second)
        for one, first in zip(records, VALUES, strict=True)
        for other, second in zip(records, VALUES, strict=True)
    )
    weight = torch.ones(2)
    assert Record("T", {"w": [weight]}) == Record("T", {"w": [weight]})
    assert Record("T", {"w": [weight]}) != Record("T", {"w": [weight.clone()]})


def test_nothing_is_imported_because_a_file_names_it() -> None:
    before = set(sys.modules)
    found = decode_tree(encode_tree(Record("antigravity.Flight", {"height": 1})))
    assert found.type_name == "antigravity.Flight"
    assert set(sys.modules) == before


def test_a_class_that_has_changed_is_an_error() -> None:
    stored = encode_tree(Record(f"{__name__}.Frozen", {"name": "a"}))
    with pytest.raises(UnsupportedValue, match=r"found fields \['name'\], expected \['inner', 'name'\], as in"):
        decode_tree(stored, types=(Frozen,))
    stored = encode_tree(Record(f"{__name__}.Color", {"name": "GREEN", "value": 9}))
    with pytest.raises(UnsupportedValue, match="found name 'GREEN', expected the name of a member"):
        decode_tree(stored, types=(Color,))


def test_types_must_be_enums_dataclasses_or_named_tuples() -> None:
    with pytest.raises(UnsupportedValue, match=r"builtins\.dict"):
        decode_tree(encode_tree(1), types=(Color, dict))
