"""Whether all ranks' objects fill their global arrays: every object has exactly one main replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import MetadataError
from ...geometry import Column, box_column, refuse, widen
from ...mapping import ShardedObject, is_main_replica
from .._columns import ShardColumns, TensorKind, select_rows
from ._faults import sharding_faults
from ._problem import Problem
from ._told import fault_problems


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumns:
    """Sharded objects, one a row: a cell of the array ``keys[key[row]]``.

    Attributes:
        keys: the arrays' keys, sorted; a key of which several shapes are given is there once for each.
        shapes: for each of them, its global shape in objects.
        key: which array, int64 (objects,).
        offset: the cell, int64 (objects, axes), right-aligned.
        rank: who holds the object, int64 (objects,).
        main: whether it is the main replica, bool (objects,).
    """

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    key: Column
    offset: Column
    rank: Column
    main: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def __len__(self) -> int:
        return len(self.key)


def object_columns(objects: Sequence[ShardedObject], rank: int = 0) -> ObjectColumns:
    """Return one rank's objects as columns, a row an object, in the order given.

    Args:
        objects: sharded objects, with or without data.
        rank: the rank that holds them.

    Examples:
        >>> columns = object_columns([ShardedObject("rng", None, (2, 4), (1, 3))], rank=1)
        >>> columns.keys, columns.shapes, columns.offset.tolist()
        (('rng',), ((2, 4),), [[1, 3]])
    """
    try:
        arrays = sorted({(item.key, item.global_shape) for item in objects})
    except (AttributeError, TypeError):
        fix = "Give the objects alone, those of one rank."
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
    """Return several ranks' objects as one, rows in the order given.

    Examples:
        >>> objects = [ShardedObject("rng", None, (2,), (rank,)) for rank in range(2)]
        >>> join_objects([object_columns([item], rank) for rank, item in enumerate(objects)]).offset.tolist()
        [[0], [1]]
    """
    arrays = sorted({array for part in parts for array in zip(part.keys, part.shapes, strict=True)})
    number = {array: position for position, array in enumerate(arrays)}
    axes = max((part.offset.shape[1] for part in parts), default=1)
    own = [[number[array] for array in zip(part.keys, part.shapes, strict=True)] for part in parts]
    filled = [object_columns([]), *parts]
    return ObjectColumns(
        keys=tuple(key for key, _ in arrays),
        shapes=tuple(shape for _, shape in arrays),
        key=np.concatenate(
            [filled[0].key, *(np.array(new, dtype=np.int64)[part.key] for new, part in zip(own, parts, strict=True))]
        ),
        offset=np.concatenate([widen(part.offset, axes, 0) for part in filled]),
        rank=np.concatenate([part.rank for part in filled]),
        main=np.concatenate([part.main for part in filled]),
    )


def object_problems(columns: ObjectColumns) -> tuple[Problem, ...]:
    """Return which cells of the global arrays don't have exactly one main replica.

    Where an array's last size is unknown (-1), it ends with the last object that anybody holds.

    Args:
        columns: the objects of all ranks.

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
    """Return objects as shards of one element; of which dtype doesn't matter here."""
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
