"""Whether ranks agree about what each key names: a tensor of which shape and dtype, or an array of objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ...errors import rank_text
from .._columns import ShardColumns, TensorKind, select_rows
from ._objects import ObjectColumns
from ._problem import Problem

ONE_KIND = (
    "Give all shards of a key one global shape, dtype and number of prepended axes. from_rank_offsets is for equal "
    "parts, and so is from_local: of others build the ShardedTensor, or pass from_local global_shapes={key: shape}."
)


def kind_problems(parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns] = ()) -> tuple[Problem, ...]:
    """Return the keys that ranks disagree about, each with all that is said of it and by whom.

    Args:
        parts: each rank's shards.
        objects: each rank's objects.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(size)) for size in (4, 5, 5)]
        >>> for problem in kind_problems([st.shard_columns([shard], rank) for rank, shard in enumerate(shards)]):
        ...     print(problem)
        'w' (ranks 0-2): (4,) float32 on rank 0, (5,) float32 on ranks 1, 2
    """
    wrong = _disagreed(parts, objects)
    said: dict[str, dict[str, list[int]]] = {key: defaultdict(list) for key in sorted(wrong)}
    everybody: list[ShardColumns | ObjectColumns] = [*parts, *objects] if wrong else []
    for held in everybody:
        for number, rank in _held_by(held, wrong):
            said[held.keys[number]][_kind_text(held, number)].append(rank)
    return tuple(
        Problem(
            key,
            tuple(sorted({rank for ranks in kinds.values() for rank in ranks})),
            ", ".join(f"{kind} on {rank_text(ranks)}" for kind, ranks in kinds.items()),
            fix=ONE_KIND,
        )
        for key, kinds in said.items()
    )


def _disagreed(parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns]) -> set[str]:
    """Return the keys of which two things are said, at the cost of a comparison for each key of each rank."""
    if sum(bool(keys) for keys in (*(part.keys for part in parts), *(each.keys for each in objects))) < 2:
        return set()
    same: dict[TensorKind, TensorKind] = {}
    known: dict[str, TensorKind | tuple[int, ...]] = {}
    wrong: set[str] = set()
    for part in parts:
        _compare(known, part.keys, _as_few(part.kinds, same), wrong)
    for each in objects:
        _compare(known, each.keys, each.shapes, wrong)
    return wrong


_Said = TypeVar("_Said", bound=TensorKind | tuple[int, ...])


def _compare(known: dict[str, Any], keys: tuple[str, ...], kinds: tuple[_Said, ...], wrong: set[str]) -> None:
    """Learn what is said of keys that aren't known, and add those of which something else was said."""
    if not known and len(set(keys)) == len(keys):
        known.update(zip(keys, kinds, strict=True))
        return
    if tuple(map(known.get, keys)) == kinds:
        return
    for key, kind in zip(keys, kinds, strict=True):
        if known.setdefault(key, kind) != kind:
            wrong.add(key)


def _as_few(kinds: tuple[TensorKind, ...], same: dict[TensorKind, TensorKind]) -> tuple[TensorKind, ...]:
    """Return kinds with one object for all that are equal, which compare at once."""
    few = {id(kind): kind for kind in kinds}
    ours = {number: same.setdefault(kind, kind) for number, kind in few.items()}
    return tuple([ours[id(kind)] for kind in kinds])


def _held_by(held: ShardColumns | ObjectColumns, keys: Collection[str]) -> list[list[int]]:
    """Return the numbers of the given keys in columns, each with each rank that holds something of it."""
    wanted = np.array([key in keys for key in held.keys], dtype=np.bool_)
    rows = np.flatnonzero(wanted[held.key])
    pairs: list[list[int]] = np.unique(np.column_stack([held.key[rows], held.rank[rows]]), axis=0).tolist()
    return pairs


def _kind_text(held: ShardColumns | ObjectColumns, number: int) -> str:
    return str(held.kinds[number]) if isinstance(held, ShardColumns) else f"{held.shapes[number]} objects"


def agreed_parts(parts: Sequence[ShardColumns], disagreed: Collection[object]) -> list[ShardColumns]:
    """Return columns without the given keys.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in "ab"]
        >>> agreed_parts([st.shard_columns(shards)], {"a"})[0].keys
        ('b',)
    """
    return [_without(part, disagreed) if disagreed else part for part in parts]


def _without(columns: ShardColumns, keys: Collection[object]) -> ShardColumns:
    kept = np.array([key not in keys for key in columns.keys], dtype=np.bool_)
    numbers = np.flatnonzero(kept).tolist()
    rest = select_rows(columns, np.flatnonzero(kept[columns.key]))
    return replace(
        rest,
        keys=tuple(columns.keys[number] for number in numbers),
        kinds=tuple(columns.kinds[number] for number in numbers),
        key=(np.cumsum(kept) - 1)[rest.key],
    )
