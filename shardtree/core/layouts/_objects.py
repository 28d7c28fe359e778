"""Checks that ranks agree on each key's kind, and that global arrays of objects are complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ...errors import MetadataError, rank_text
from ..geometry import Column, Mask, box_column, refuse, widen
from ..mapping import ShardedObject, is_main_replica
from ._columns import ShardColumns, TensorKind, select_rows
from ._problems import Problem, fault_problems, sharding_faults

# Completeness: each object of a global array has exactly one main replica.


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumns:
    """Sharded objects, one a row: a cell of the array whose key is ``keys[key[row]]``.

    Attributes:
        keys: Keys of the arrays, sorted; a key with several shapes appears once for each.
        shapes: Global shape of each key's array, in objects.
        key: Index of each object's array in `keys`, int64 (objects,).
        offset: Cell of each object in its array, int64 (objects, axes); shorter offsets are padded on the left.
        rank: Rank that holds the object, int64 (objects,).
        main: Whether the object is the main replica, bool (objects,).
    """

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    key: Column
    offset: Column
    rank: Column
    main: Mask

    def __len__(self) -> int:
        return len(self.key)


def object_columns(objects: Sequence[ShardedObject], rank: int = 0) -> ObjectColumns:
    """Return one rank's objects as columns, one row an object, in the same order.

    Args:
        objects: Sharded objects, with or without data.
        rank: Rank that holds them.

    Examples:
        >>> columns = object_columns([ShardedObject("rng", None, (2, 4), (1, 3))], rank=1)
        >>> columns.keys, columns.shapes, columns.offset.tolist()
        (('rng',), ((2, 4),), [[1, 3]])
    """
    try:
        arrays = sorted({(item.key, item.global_shape) for item in objects})
    except (AttributeError, TypeError):
        fix = "Pass a list of one rank's objects."
        refuse("object_columns", "objects", type(objects).__name__, "a list of ShardedObject", fix, error=MetadataError)
    number = {array: position for position, array in enumerate(arrays)}
    return ObjectColumns(
        keys=tuple(key for key, _ in arrays),
        shapes=tuple(shape for _, shape in arrays),
        key=np.array([number[item.key, item.global_shape] for item in objects], dtype=np.int64),
        offset=box_column([item.global_offset for item in objects], fill=0),
        rank=np.full(len(objects), rank, dtype=np.int64),
        main=np.array([is_main_replica(item.replica_id) for item in objects], dtype=np.bool_),
    )


def join_objects(parts: Sequence[ObjectColumns]) -> ObjectColumns:
    """Return several ranks' objects as one `ObjectColumns`, rows in the same order.

    Examples:
        >>> objects = [ShardedObject("rng", None, (2,), (rank,)) for rank in range(2)]
        >>> join_objects([object_columns([item], rank) for rank, item in enumerate(objects)]).offset.tolist()
        [[0], [1]]
    """
    arrays = sorted({array for part in parts for array in zip(part.keys, part.shapes, strict=True)})
    number = {array: position for position, array in enumerate(arrays)}
    axes = max((part.offset.shape[1] for part in parts), default=1)
    columns = [
        (
            np.array([number[array] for array in zip(part.keys, part.shapes, strict=True)], dtype=np.int64)[part.key],
            widen(part.offset, axes, 0),
            part.rank,
            part.main,
        )
        for part in (object_columns([]), *parts)
    ]
    rows: Any = map(np.concatenate, zip(*columns, strict=True))
    return ObjectColumns(tuple(key for key, _ in arrays), tuple(shape for _, shape in arrays), *rows)


def object_problems(columns: ObjectColumns) -> tuple[Problem, ...]:
    """Return a problem for each cell of the global arrays that doesn't have exactly one main replica.

    If the size of an array's last axis is unknown (-1), the object with the largest index along it determines the size.

    Args:
        columns: Objects of all ranks.

    Examples:
        >>> objects = [ShardedObject("rng", None, (4,), (place,)) for place in (0, 1, 3)]
        >>> [str(problem) for problem in object_problems(object_columns(objects))]
        ["'rng' (rank 0): [2:3] has no main replica (1 of 4 objects); beside it: rank 0 [1:2], rank 0 [3:4]"]
    """
    if not columns.keys:
        return ()
    cells = _as_cells(columns)
    main = select_rows(cells, np.flatnonzero(cells.main))
    return fault_problems(cells, sharding_faults(main), "object")


def _as_cells(columns: ObjectColumns) -> ShardColumns:
    """Return objects as shards of one element, of an arbitrary dtype, so that tensors' checks serve objects too."""
    # A last size of -1 is unknown, as in old checkpoints; the objects determine it.
    ends = np.zeros(len(columns.keys), dtype=np.int64)
    np.maximum.at(ends, columns.key, columns.offset[:, -1] + 1)
    shapes = (
        (*shape[:-1], end) if shape and shape[-1] < 0 else shape
        for shape, end in zip(columns.shapes, ends.tolist(), strict=True)
    )
    no_range = np.full(len(columns), -1, dtype=np.int64)
    return ShardColumns(
        keys=columns.keys,
        kinds=tuple(TensorKind(torch.uint8, shape, 0) for shape in shapes),
        key=columns.key,
        offset=columns.offset,
        shape=np.ones_like(columns.offset),
        start=no_range,
        stop=no_range,
        rank=columns.rank,
        main=columns.main,
    )


# Agreement: a key names one tensor, of one shape and dtype, or one array of objects.

ONE_KIND = (
    "Give all shards of a key one global shape, dtype and number of prepended axes. from_rank_offsets and from_local "
    "expect equal parts: for others, call ShardedTensor(...), or pass global_shapes={key: shape} to from_local."
)


def kind_problems(parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns] = ()) -> tuple[Problem, ...]:
    """Return a problem for each key that ranks disagree about, with its different kinds and the ranks of each.

    The kind of a tensor is its dtype, global shape and prepended axes; that of an array of objects is its shape.

    Args:
        parts: Shards of each rank.
        objects: Objects of each rank.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(size)) for size in (4, 5, 5)]
        >>> own = [st.layouts.shard_columns([shard], rank) for rank, shard in enumerate(shards)]
        >>> for problem in kind_problems(own):
        ...     print(problem)
        'w' (ranks 0-2): (4,) float32 on rank 0, (5,) float32 on ranks 1, 2
    """
    # A single rank's columns already agree with themselves.
    if sum(bool(keys) for keys in (*(part.keys for part in parts), *(array.keys for array in objects))) < 2:
        return ()
    wrong = _differing_keys(parts, objects)
    kinds_of: dict[str, dict[str, list[int]]] = {key: defaultdict(list) for key in sorted(wrong)}
    columns: list[ShardColumns | ObjectColumns] = [*parts, *objects] if wrong else []
    for part in columns:
        for number, rank in _numbers_and_ranks(part, wrong):
            kinds_of[part.keys[number]][_kind_text(part, number)].append(rank)
    return tuple(
        Problem(
            key,
            tuple(sorted({rank for ranks in kinds.values() for rank in ranks})),
            ", ".join(f"{kind} on {rank_text(ranks)}" for kind, ranks in kinds.items()),
            fix=ONE_KIND,
        )
        for key, kinds in kinds_of.items()
    )


def _differing_keys(parts: Sequence[ShardColumns], objects: Sequence[ObjectColumns]) -> set[str]:
    """Return the keys that have several kinds; a kind is a tensor's `TensorKind` or the shape of an object array."""
    same: dict[TensorKind, TensorKind] = {}
    kinds_of: dict[str, TensorKind | tuple[int, ...]] = {}
    wrong: set[str] = set()
    # Reading messages makes ranks with equal keys and kinds share tuples: one of these ranks is enough.
    tables = {(id(part.keys), id(part.kinds)): part for part in parts}
    for part in tables.values():
        _compare(kinds_of, part.keys, _intern(part.kinds, same), wrong)
    for array in objects:
        _compare(kinds_of, array.keys, array.shapes, wrong)
    return wrong


_Kind = TypeVar("_Kind", bound=TensorKind | tuple[int, ...])


def _compare(kinds_of: dict[str, Any], keys: tuple[str, ...], kinds: tuple[_Kind, ...], wrong: set[str]) -> None:
    """Compare the kinds of one rank's keys with those of earlier ranks; a kind is as in `_differing_keys`.

    Args:
        kinds_of: First kind of each key so far; new keys are added.
        keys: Keys of the rank.
        kinds: Kind of each of these keys.
        wrong: Keys with several kinds; keys whose kind differs from the first one are added.
    """
    if not kinds_of and len(set(keys)) == len(keys):
        kinds_of.update(zip(keys, kinds, strict=True))
        return
    if tuple(map(kinds_of.get, keys)) == kinds:  # one comparison in C, by identity first: most ranks agree
        return
    for key, kind in zip(keys, kinds, strict=True):
        if kinds_of.setdefault(key, kind) != kind:
            wrong.add(key)


def _intern(kinds: tuple[TensorKind, ...], same: dict[TensorKind, TensorKind]) -> tuple[TensorKind, ...]:
    """Return kinds with one object for all equal ones, so that they compare by identity."""
    few = {id(kind): kind for kind in kinds}
    ours = {number: same.setdefault(kind, kind) for number, kind in few.items()}
    return tuple([ours[id(kind)] for kind in kinds])


def _numbers_and_ranks(columns: ShardColumns | ObjectColumns, keys: Collection[str]) -> list[list[int]]:
    """Return distinct (number, rank) pairs for some keys: the key's index in the columns, and a rank that holds it."""
    mask = np.array([key in keys for key in columns.keys], dtype=np.bool_)
    rows = np.flatnonzero(mask[columns.key])
    pairs: list[list[int]] = np.unique(np.column_stack([columns.key[rows], columns.rank[rows]]), axis=0).tolist()
    return pairs


def _kind_text(columns: ShardColumns | ObjectColumns, number: int) -> str:
    return str(columns.kinds[number]) if isinstance(columns, ShardColumns) else f"{columns.shapes[number]} objects"


def without_keys(columns: ShardColumns, keys: Collection[object]) -> ShardColumns:
    """Return columns without some keys and their shards.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in "ab"]
        >>> without_keys(st.layouts.shard_columns(shards), {"a"}).keys
        ('b',)
    """
    mask = np.array([key not in keys for key in columns.keys], dtype=np.bool_)
    numbers = np.flatnonzero(mask).tolist()
    kept = select_rows(columns, np.flatnonzero(mask[columns.key]))
    return replace(
        kept,
        keys=tuple(columns.keys[number] for number in numbers),
        kinds=tuple(columns.kinds[number] for number in numbers),
        key=(np.cumsum(mask) - 1)[kept.key],
    )
