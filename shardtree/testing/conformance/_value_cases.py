"""Cases about other values: sharded objects, and the common state with its holes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ...checkpoint import load_common_state_dict, load_content_metadata
from ...mapping import ShardedObject, ShardedTensor
from ...strategies import StrategyAction
from .._bits import outline
from ._layout_cases import LOADS, SHAPE, numbers
from ._subject import Case, Promise, Subject, loaded, saved, together_or_each

_COMMON = frozenset({StrategyAction.LOAD_COMMON})

# Values that formats tend to change without an error: tuples to lists, keys to strings, large integers to floats. Each
# is made anew for each use, since a backend could change it in place.
VALUES: dict[str, Callable[[], Any]] = {
    "an int": lambda: 3,
    "a string": lambda: "é",
    "None": lambda: None,
    "a bool": lambda: True,
    "a float": lambda: 0.1,
    "an int of 80 bits": lambda: -(2**80),
    "not a number": lambda: math.nan,
    "a complex number": lambda: 1 - 2j,
    "bytes": lambda: b"\0a",
    "a list": lambda: [1, "a", None],
    "a tuple": lambda: (1, 2),
    "a tuple in a list in a dict": lambda: {"betas": [(0.9, 0.95)]},
    "a dict of dicts": lambda: {"a": {"b": 1, "c": [2]}},
    "a dict with ints as keys": lambda: {0: "a", 1: "b"},
    "a set": lambda: {1, 2},
    "a tensor": lambda: torch.tensor([[1, 2], [3, 4]], dtype=torch.int16, device="cpu"),
    "a dtype": lambda: torch.bfloat16,
}


def objects(subject: Subject) -> Iterator[Case]:
    """Yield sharded objects of 2 ranks, for each kind of value."""
    each = (Case(name, partial(_check_objects, subject, value)) for name, value in VALUES.items())
    yield from together_or_each(partial(_check_objects, subject, *VALUES.values()), each)


def _check_objects(subject: Subject, *values: Callable[[], Any]) -> None:
    """Raise unless arrays of two objects, the first with a replica, come back to one rank and to three."""
    names = [f"rng.{number}" for number in range(len(values))]
    cells = [[value(), [value()]] for value in values]

    def asked(cell: int, replica: int, *, filled: bool) -> list[ShardedObject]:
        pairs = zip(names, cells, strict=True)
        return [ShardedObject(name, own[cell] if filled else None, (2,), (cell,), replica) for name, own in pairs]

    trees: list[Any] = [{"own": asked(rank, 0, filled=True), "w": _tensor(rank)} for rank in (0, 1)]
    trees[1]["replicas"] = asked(0, 1, filled=True)
    place = saved(subject, trees)
    # Fewer ranks than saved and more, and in another order: objects must be found by their index, not by their rank.
    for ranks in (1, 3):
        targets = [[asked(cell, rank, filled=False) for cell in (1, 0)] for rank in range(ranks)]
        for rank, found in enumerate(loaded(subject, targets, place)):
            expected = [[own[cell] for own in cells] for cell in (1, 0)]
            right = outline(found) == outline(expected)
            assert right, f"rank {rank} of {ranks} found {found!r}, expected {expected!r}"
    (alone,) = loaded(subject, [asked(1, 0, filled=False)[:1]], place, validate_access_integrity=False)
    assert outline(alone[0]) == outline(cells[0][1]), f"found {alone[0]!r}, expected {cells[0][1]!r}"


def common_values(subject: Subject) -> Iterator[Case]:
    """Yield common states of one value each."""
    each = (Case(name, partial(_check_common, subject, {name: value})) for name, value in VALUES.items())
    yield from together_or_each(partial(_check_common, subject, VALUES), each)


def _check_common(subject: Subject, values: Mapping[str, Callable[[], Any]]) -> None:
    trees = [{"values": {name: value() for name, value in values.items()}, "w": _tensor(rank)} for rank in (0, 1)]
    place = saved(subject, trees)
    for rank, found in enumerate(loaded(subject, [{"w": _tensor(rank)} for rank in range(3)], place)):
        assert "values" in found, f"rank {rank} found {sorted(found)}, expected 'values' too"
        for name, value in values.items():
            right = outline(found["values"].get(name)) == outline(value())
            assert right, f"rank {rank} found {found['values'].get(name)!r}, expected {value()!r}"


def common_positions(subject: Subject) -> Iterator[Case]:
    """Yield common states with shards between values, without shards, and with content metadata."""
    yield Case("a list of values around a shard", partial(_check_hole, subject))
    yield Case("nothing but values", partial(_check_alone, subject))
    yield Case("content_metadata", partial(_check_content, subject))


def _check_hole(subject: Subject) -> None:
    place = saved(subject, [{"mixed": [1, _tensor(), (2, 3)], "last": 4}])
    (found,) = loaded(subject, [{"mixed": [None, _tensor(), None]}], place)
    left = found["mixed"][0], found["mixed"][2], found["last"]
    assert left == (1, (2, 3), 4), f"found {left!r} around the shard, expected {(1, (2, 3), 4)!r}"
    assert torch.equal(found["mixed"][1], numbers(SHAPE)), "the shard is another"


def _check_alone(subject: Subject) -> None:
    (found,) = loaded(subject, [{}], saved(subject, [{"step": 3}]))
    assert found == {"step": 3}, f"found {found!r}, expected {{'step': 3}}"


def _check_content(subject: Subject) -> None:
    place = saved(subject, [{"w": _tensor(), "step": 3}], content_metadata={"optimizer": "adam"})
    found = load_content_metadata(place, strategies=subject.strategies)
    assert found == {"optimizer": "adam"}, f"found {found!r}, expected {{'optimizer': 'adam'}}"
    rest = load_common_state_dict(place, strategies=subject.strategies)
    assert rest.get("step") == 3, f"found {rest!r} beside it"


def _tensor(replica: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", numbers(SHAPE), replica_id=replica)


PROMISES = (
    Promise("objects come back, each as itself", LOADS, objects),
    Promise("the common state comes back as it was", _COMMON, common_values),
    Promise("common values keep their places", _COMMON, common_positions, saves=True),
)
