"""Cases about everything but tensors' elements: objects, the common state, metadata, `explain` and removals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ...core.mapping import ShardedObject, ShardedTensor
from ...core.plans import Mismatch, Refusal, Unexpected
from ...errors import CheckpointingException
from ...inspection import (
    explain,
    load_common_state_dict,
    load_content_metadata,
    load_sharded_metadata,
    open_checkpoint,
    unproven_of,
)
from ...shell.checkpoint import load, remove_sharded_tensors
from ...shell.table import StrategyAction
from .._bits import outline
from .._layouts import Layout, even_layout
from .._states import GlobalState
from ._layout_cases import COLUMNS, FLAT_ROWS, GRID, IRREGULAR, LAYERS, LOADS, ROWS, SHAPE, WHOLE, ZERO_SIZE, numbers
from ._subject import Case, Promise, Subject, check_there, load_trees, only, save_trees, together_or_each, trees_of

_METADATA = LOADS | {StrategyAction.LOAD_METADATA}
_COMMON = frozenset({StrategyAction.LOAD_COMMON})

# Values that formats tend to change without an error: tuples to lists, keys to strings, large integers to floats. Each
# is created anew for each use, since a backend could change it in place.
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
    """Yield cases in which 2 ranks save sharded objects of each kind of value, and 1 and 3 ranks load them."""
    each = (Case(name, partial(_check_objects, subject, value)) for name, value in VALUES.items())
    yield from together_or_each(partial(_check_objects, subject, *VALUES.values()), each)


def _check_objects(subject: Subject, *values: Callable[[], Any]) -> None:
    """Raise unless arrays of objects, saved on two ranks, are loaded correctly on one rank and on three.

    Args:
        values: Functions that return a value; each gives an array of two objects, the value and ``[value]``.
    """
    names = [f"rng.{number}" for number in range(len(values))]
    cells = [[value(), [value()]] for value in values]

    def objects_at(cell: int, replica: int, *, filled: bool) -> list[ShardedObject]:
        pairs = zip(names, cells, strict=True)
        return [ShardedObject(name, pair[cell] if filled else None, (2,), (cell,), replica) for name, pair in pairs]

    trees: list[Any] = [{"own": objects_at(rank, 0, filled=True), "w": _tensor(rank)} for rank in (0, 1)]
    trees[1]["replicas"] = objects_at(0, 1, filled=True)
    place = save_trees(subject, trees)
    # Fewer ranks than saved and more, and another order: objects must be found by their index, not by their rank.
    for ranks in (1, 3):
        targets = [[objects_at(cell, rank, filled=False) for cell in (1, 0)] for rank in range(ranks)]
        for rank, objects_of_rank in enumerate(load_trees(subject, targets, place)):
            expected = [[pair[cell] for pair in cells] for cell in (1, 0)]
            right = outline(objects_of_rank) == outline(expected)
            assert right, f"rank {rank} of {ranks} found {objects_of_rank!r}, expected {expected!r}"
    (alone,) = load_trees(subject, [objects_at(1, 0, filled=False)[:1]], place, validate_access_integrity=False)
    assert outline(alone[0]) == outline(cells[0][1]), f"found {alone[0]!r}, expected {cells[0][1]!r}"


def common_values(subject: Subject) -> Iterator[Case]:
    """Yield cases that save and load a common state with one kind of value each."""
    each = (Case(name, partial(_check_common, subject, {name: value})) for name, value in VALUES.items())
    yield from together_or_each(partial(_check_common, subject, VALUES), each)


def _check_common(subject: Subject, values: Mapping[str, Callable[[], Any]]) -> None:
    trees = [{"values": {name: value() for name, value in values.items()}, "w": _tensor(rank)} for rank in (0, 1)]
    place = save_trees(subject, trees)
    for rank, tree in enumerate(load_trees(subject, [{"w": _tensor(rank)} for rank in range(3)], place)):
        assert "values" in tree, f"rank {rank} found {sorted(tree)}, expected 'values' too"
        for name, value in values.items():
            right = outline(tree["values"].get(name)) == outline(value())
            assert right, f"rank {rank} found {tree['values'].get(name)!r}, expected {value()!r}"


def common_positions(subject: Subject) -> Iterator[Case]:
    """Yield cases for common values: in a list that holds a shard, too; without shards; beside `content_metadata`."""
    yield Case("a list of values around a shard", partial(_check_hole, subject))
    yield Case("nothing but values", partial(_check_alone, subject))
    yield Case("content_metadata", partial(_check_content, subject))


def _check_hole(subject: Subject) -> None:
    place = save_trees(subject, [{"mixed": [1, _tensor(), (2, 3)], "last": 4}])
    (tree,) = load_trees(subject, [{"mixed": [None, _tensor(), None]}], place)
    left = tree["mixed"][0], tree["mixed"][2], tree["last"]
    assert left == (1, (2, 3), 4), f"found {left!r} around the shard, expected {(1, (2, 3), 4)!r}"
    assert torch.equal(tree["mixed"][1], numbers(SHAPE)), "the shard has other elements"


def _check_alone(subject: Subject) -> None:
    (found,) = load_trees(subject, [{}], save_trees(subject, [{"step": 3}]))
    assert found == {"step": 3}, f"found {found!r}, expected {{'step': 3}}"


def _check_content(subject: Subject) -> None:
    place = save_trees(subject, [{"w": _tensor(), "step": 3}], content_metadata={"optimizer": "adam"})
    found = load_content_metadata(place, strategies=subject.strategies)
    assert found == {"optimizer": "adam"}, f"found {found!r}, expected {{'optimizer': 'adam'}}"
    common = load_common_state_dict(place, strategies=subject.strategies)
    assert common.get("step") == 3, f"found the common state {common!r}, expected a step of 3"


def _tensor(replica: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", numbers(SHAPE), replica_id=replica)


# Metadata, `explain` and removals, which don't load tensors.


def metadata(subject: Subject) -> Iterator[Case]:
    """Yield a case for each kind of layout in which tensors are saved; their metadata must not depend on it."""
    kinds = {"whole": WHOLE, "rows": ROWS, "a grid": GRID, "a scalar": even_layout((), 2), "layers": LAYERS}
    kinds |= {"boxes of no grid": IRREGULAR, "flat ranges": FLAT_ROWS}
    kinds |= {name: save_layout for name, (save_layout, _) in ZERO_SIZE.items()}
    for name, layout in kinds.items():
        yield Case(name, partial(_check_metadata, subject, layout))


def _check_metadata(subject: Subject, layout: Layout) -> None:
    shape = layout.global_shape
    # Two tensors that differ only in key and dtype, so that metadata of the wrong one shows.
    state = GlobalState({"w": numbers(shape), "b.w": numbers(shape).int()}, {}, {})
    place = save_trees(subject, trees_of(state, dict.fromkeys(state.tensors, layout)))
    metadata = load_sharded_metadata(place, strategies=subject.strategies)
    assert set(metadata) == set(state.tensors), f"lists {sorted(metadata)}, stored are {sorted(state.tensors)}"
    for key, whole in state.tensors.items():
        expected = (key, whole.dtype, shape, shape, (0,) * len(shape))
        fields = tuple(
            getattr(metadata[key], name, None)
            for name in ("key", "dtype", "local_shape", "global_shape", "global_offset")
        )
        assert fields == expected, f"says {_describe(fields)}, stored is {_describe(expected)}"
        flat, data = getattr(metadata[key], "flattened_range", None), metadata[key].data
        assert flat is None and data is None, f"{key!r} comes with flattened_range={flat!r}, data={data!r}"


def _describe(fields: Any) -> str:
    key, dtype, local, shape, offset = fields
    return f"{key!r} {dtype}: box of shape {local} at {offset} in {shape}"


def object_metadata(subject: Subject) -> Iterator[Case]:
    """Yield the case in which 2 ranks save an array of two `ShardedObject` leaves; the metadata must list both."""
    yield Case("objects of 2 ranks", partial(_check_object_metadata, subject))


def _check_object_metadata(subject: Subject) -> None:
    trees: list[list[Any]] = [[ShardedObject("rng", rank, (1, 2), (0, rank))] for rank in (0, 1)]
    trees[0].append(_tensor())
    place = save_trees(subject, trees)
    metadata = load_sharded_metadata(place, strategies=subject.strategies)
    expected = {"rng/shard_0.0_1.2": ((1, 2), (0, 0)), "rng/shard_0.1_1.2": ((1, 2), (0, 1))}
    objects = {name: leaf for name, leaf in metadata.items() if isinstance(leaf, ShardedObject)}
    boxes = {name: (leaf.global_shape, leaf.global_offset) for name, leaf in objects.items()}
    assert boxes == expected, f"lists objects {boxes}, stored are {expected}"


def explanations(subject: Subject) -> Iterator[Case]:
    """Yield a case for each of several targets; `explain` must predict whether the target can be loaded."""
    fits = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3, dtype=torch.float32, device="cpu"), (1, 1, 2))
    unknown = ShardedTensor.from_rank_offsets("v", torch.zeros(2, dtype=torch.float32, device="cpu"))
    yield Case("a target that fits", partial(_check_explanation, subject, fits, None))
    yield Case("a key that is not stored", partial(_check_explanation, subject, unknown, Unexpected))
    # Where files don't prove shapes, a format refuses a target of another shape with the likely reason.
    yield Case("another shape", partial(_check_explanation, subject, _zeros(4, 7), Mismatch, unproven=Refusal))
    yield Case("another dtype", partial(_check_explanation, subject, _zeros(*SHAPE, dtype=torch.int32), Mismatch))


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.zeros(shape, dtype=dtype, device="cpu"))


def _check_explanation(
    subject: Subject, target: ShardedTensor, kind: type | None, *, unproven: type | None = None
) -> None:
    place = save_trees(subject, trees_of(GlobalState({"w": numbers(SHAPE)}, {}, {}), {"w": GRID}))
    explanation = explain({"t": target}, place, validate_access_integrity=False, strategies=subject.strategies)
    if unproven is not None and unproven_of(open_checkpoint(place, strategies=subject.strategies).metadata):
        kind = unproven
    problems, kinds = explanation.problems, [type(problem) for problem in explanation.problems]
    expected = [] if kind is None else [kind]
    assert kinds == expected, f"says {[str(problem) for problem in problems]}, expected {expected}"
    message = ""
    try:
        load({"t": target}, place, validate_access_integrity=False, strategies=subject.strategies)
    except CheckpointingException as error:
        message = str(error)
    keys = [getattr(problem, "key", "") for problem in explanation.problems]
    assert all(key in message for key in keys) and bool(message) == bool(problems), (
        f"a load raises {message!r}, and explain says {[str(problem) for problem in explanation.problems]}"
    )


def removals(subject: Subject) -> Iterator[Case]:
    """Yield cases that remove tensors or objects by a prefix of their keys; everything else must be unchanged."""
    yield Case("a prefix of two keys", partial(_check_removal, subject, "exp_avg.", ("exp_avg.b", "exp_avg.w")))
    yield Case("one key", partial(_check_removal, subject, "w", ("w",)))
    yield Case("a prefix of none", partial(_check_removal, subject, "v", ()))
    yield Case("a prefix that is in the middle of keys", partial(_check_removal, subject, "avg.", ()))
    yield Case("objects", partial(_check_object_removal, subject))


def _check_removal(subject: Subject, prefix: str, removed_keys: tuple[str, ...]) -> None:
    # "exp_avg." must not match "exp_avg_sq.w", nor "avg." the middle of a key.
    keys = ("b", "exp_avg.b", "exp_avg.w", "exp_avg_sq.w", "w")
    state = GlobalState({key: numbers(SHAPE, 50 * number) for number, key in enumerate(keys)}, {}, {})
    place = save_trees(subject, trees_of(state, dict.fromkeys(keys, ROWS)))
    remove_sharded_tensors(place, prefix, strategies=subject.strategies)
    # Loaded as well as listed: removing tensors must not move or damage the bytes of the others.
    found = load_sharded_metadata(place, strategies=subject.strategies)
    stay = [key for key in keys if key not in removed_keys]
    assert sorted(found) == stay, f"removing {prefix!r} leaves {sorted(found)}, expected {stay}"
    check_there(subject, only(state, *stay), dict.fromkeys(stay, COLUMNS), place)


def _check_object_removal(subject: Subject) -> None:
    tree = {"w": _tensor(), "rng": [ShardedObject(key, {key: 1}, (1,), (0,)) for key in ("rng", "other")]}
    place = save_trees(subject, [tree])
    remove_sharded_tensors(place, "rng", strategies=subject.strategies)
    found = sorted(load_sharded_metadata(place, strategies=subject.strategies))
    assert found == ["other/shard_0_1", "w"], f"leaves {found}, expected ['other/shard_0_1', 'w']"
    (remaining,) = load_trees(subject, [{"rng": [ShardedObject("other", None, (1,), (0,))]}], place)
    assert remaining["rng"] == [{"other": 1}], f"found {remaining['rng']!r}"


PROMISES = (
    Promise("objects come back, each as itself", LOADS, objects),
    Promise("the common state comes back as it was", _COMMON, common_values),
    Promise("common values keep their places", _COMMON, common_positions, saves=True),
    Promise("metadata says what was saved", _METADATA, metadata),
    Promise("metadata names every object", _METADATA | {StrategyAction.LOAD_OBJECTS}, object_metadata),
    Promise("explain says what a load would do", LOADS | _METADATA, explanations),
    Promise("removal takes what has the prefix, and no more", LOADS | {StrategyAction.REMOVE_SHARDED}, removals),
)
