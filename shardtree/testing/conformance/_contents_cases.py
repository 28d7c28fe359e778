"""Cases about metadata: shapes and dtypes, objects, `explain`, and removing tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...checkpoint import explain, load_sharded_metadata, remove_sharded_tensors
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Mismatch, Unexpected
from ...strategies import StrategyAction
from .._layouts import Layout, even_layout
from .._states import GlobalState
from ._layout_cases import COLUMNS, FLAT_ROWS, GRID, IRREGULAR, LAYERS, LOADS, ROWS, SHAPE, WHOLE, ZERO_SIZE, numbers
from ._subject import Case, Promise, Subject, check_there, loaded, only, saved, trees_of

_METADATA = LOADS | {StrategyAction.LOAD_METADATA}


def metadata(subject: Subject) -> Iterator[Case]:
    """Yield tensors in layouts of each kind, all of which must have the same metadata."""
    kinds = {"whole": WHOLE, "rows": ROWS, "a grid": GRID, "a scalar": even_layout((), 2), "layers": LAYERS}
    kinds |= {"boxes of no grid": IRREGULAR, "flat ranges": FLAT_ROWS}
    kinds |= {name: one for name, (one, _) in ZERO_SIZE.items()}
    for name, layout in kinds.items():
        yield Case(name, partial(_check_metadata, subject, layout))


def _check_metadata(subject: Subject, layout: Layout) -> None:
    shape = layout.global_shape
    # Two tensors that differ only in key and dtype, so that metadata of the wrong one shows.
    state = GlobalState({"w": numbers(shape), "b.w": numbers(shape).int()}, {}, {})
    place = saved(subject, trees_of(state, dict.fromkeys(state.tensors, layout)))
    found = load_sharded_metadata(place, strategies=subject.strategies)
    assert set(found) == set(state.tensors), f"lists {sorted(found)}, stored are {sorted(state.tensors)}"
    for key, whole in state.tensors.items():
        expected = (key, whole.dtype, shape, shape, (0,) * len(shape))
        said = tuple(
            getattr(found[key], name, None) for name in ("key", "dtype", "local_shape", "global_shape", "global_offset")
        )
        assert said == expected, f"says {_described(said)}, stored is {_described(expected)}"
        flat, data = getattr(found[key], "flattened_range", None), found[key].data
        assert flat is None and data is None, f"{key!r} comes with flattened_range={flat!r}, data={data!r}"


def _described(said: Any) -> str:
    key, dtype, local, shape, offset = said
    return f"{key!r} {dtype}: box of shape {local} at {offset} in {shape}"


def object_metadata(subject: Subject) -> Iterator[Case]:
    """Yield an array of objects, each of which the metadata must name."""
    yield Case("objects of 2 ranks", partial(_check_object_metadata, subject))


def _check_object_metadata(subject: Subject) -> None:
    trees: list[list[Any]] = [[ShardedObject("rng", rank, (1, 2), (0, rank))] for rank in (0, 1)]
    trees[0].append(ShardedTensor.from_rank_offsets("w", numbers(SHAPE)))
    place = saved(subject, trees)
    found = load_sharded_metadata(place, strategies=subject.strategies)
    expected = {"rng/shard_0.0_1.2": ((1, 2), (0, 0)), "rng/shard_0.1_1.2": ((1, 2), (0, 1))}
    objects = {name: leaf for name, leaf in found.items() if isinstance(leaf, ShardedObject)}
    said = {name: (leaf.global_shape, leaf.global_offset) for name, leaf in objects.items()}
    assert said == expected, f"lists objects {said}, stored are {expected}"


def explanations(subject: Subject) -> Iterator[Case]:
    """Yield targets for which `explain` must predict whether they can be loaded."""
    fits = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3, dtype=torch.float32, device="cpu"), (1, 1, 2))
    unknown = ShardedTensor.from_rank_offsets("v", torch.zeros(2, dtype=torch.float32, device="cpu"))
    yield Case("a target that fits", partial(_check_explanation, subject, fits, None))
    yield Case("a key that isn't stored", partial(_check_explanation, subject, unknown, Unexpected))
    yield Case("another shape", partial(_check_explanation, subject, _zeros(4, 7), Mismatch))
    yield Case("another dtype", partial(_check_explanation, subject, _zeros(*SHAPE, dtype=torch.int32), Mismatch))


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.zeros(shape, dtype=dtype, device="cpu"))


def _check_explanation(subject: Subject, target: ShardedTensor, kind: type | None) -> None:
    place = saved(subject, trees_of(GlobalState({"w": numbers(SHAPE)}, {}, {}), {"w": GRID}))
    found = explain({"t": target}, place, validate_access_integrity=False, strategies=subject.strategies)
    kinds = [type(problem) for problem in found.problems]
    expected = [] if kind is None else [kind]
    assert kinds == expected, f"says {[str(problem) for problem in found.problems]}, expected {expected}"


def removals(subject: Subject) -> Iterator[Case]:
    """Yield prefixes of keys to remove; everything else must be unchanged."""
    yield Case("a prefix of two keys", partial(_check_removal, subject, "exp_avg.", ("exp_avg.b", "exp_avg.w")))
    yield Case("one key", partial(_check_removal, subject, "w", ("w",)))
    yield Case("a prefix of none", partial(_check_removal, subject, "v", ()))
    yield Case("a prefix that is in the middle of keys", partial(_check_removal, subject, "avg.", ()))
    yield Case("objects", partial(_check_object_removal, subject))


def _check_removal(subject: Subject, prefix: str, gone: tuple[str, ...]) -> None:
    # "exp_avg." must not match "exp_avg_sq.w", nor "avg." the middle of a key.
    keys = ("b", "exp_avg.b", "exp_avg.w", "exp_avg_sq.w", "w")
    state = GlobalState({key: numbers(SHAPE, 50 * number) for number, key in enumerate(keys)}, {}, {})
    place = saved(subject, trees_of(state, dict.fromkeys(keys, ROWS)))
    remove_sharded_tensors(place, prefix, strategies=subject.strategies)
    # Loaded as well as listed: removing tensors must not move or damage the bytes of the others.
    found, stay = load_sharded_metadata(place, strategies=subject.strategies), [key for key in keys if key not in gone]
    assert sorted(found) == stay, f"removing {prefix!r} leaves {sorted(found)}, expected {stay}"
    check_there(subject, only(state, *stay), dict.fromkeys(stay, COLUMNS), place)


def _check_object_removal(subject: Subject) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", numbers(SHAPE))
    tree = {"w": tensor, "rng": [ShardedObject(key, {key: 1}, (1,), (0,)) for key in ("rng", "other")]}
    place = saved(subject, [tree])
    remove_sharded_tensors(place, "rng", strategies=subject.strategies)
    found = sorted(load_sharded_metadata(place, strategies=subject.strategies))
    assert found == ["other/shard_0_1", "w"], f"leaves {found}, expected ['other/shard_0_1', 'w']"
    (rest,) = loaded(subject, [{"rng": [ShardedObject("other", None, (1,), (0,))]}], place)
    assert rest["rng"] == [{"other": 1}], f"found {rest['rng']!r}"


PROMISES = (
    Promise("metadata says what was saved", _METADATA, metadata),
    Promise("metadata names every object", _METADATA | {StrategyAction.LOAD_OBJECTS}, object_metadata),
    Promise("explain says what a load would do", LOADS | {StrategyAction.EXPLAIN}, explanations),
    Promise("removal takes what has the prefix, and no more", LOADS | {StrategyAction.REMOVE_SHARDED}, removals),
)
