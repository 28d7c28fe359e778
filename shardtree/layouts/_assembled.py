"""Shards put together to the global tensors that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import IntegrityError, ShapeError, error_text
from ..geometry import Column
from ..lazy import LazyTensor
from ..mapping import ShardedTensor
from ..mapping.memory import has_elements
from ..trees import as_integers, empty_data
from ._columns import BoxColumns, ShardColumns, select_rows, shard_boxes
from .integrity import Problem, doubled_faults, fault_problems, problem_lines, select_faults, sharding_faults


def assembled(columns: ShardColumns, shards: Sequence[ShardedTensor]) -> dict[str, Any]:
    """Return the global tensors, by key. One that a shard holds whole is that shard's tensor; others are new.

    An element is its main replica's; where there is none, that of the copy on the lowest rank.

    Args:
        columns: all shards.
        shards: the same, row by row.

    Raises:
        IntegrityError: nobody holds a place, or it has two main replicas.
        ShapeError: a shard that is needed has no data.
    """
    check_covered(columns)
    ordered = np.argsort(columns.key, kind="stable")
    of_each = np.split(ordered, np.searchsorted(columns.key[ordered], np.arange(1, len(columns.keys))))
    rows = [_needed(columns, number, of_each[number]) for number in range(len(columns.keys))]
    absent = [
        f"{shards[row].key!r} on rank {columns.rank[row]}"
        for needed in rows
        for row in needed
        if not _is_there(shards[row].data)
    ]
    if absent:
        fix = "Load the shards, or shard a tree that has its tensors."
        raise ShapeError(error_text("unshard: shards without elements to put together", offenders=absent, fix=fix))
    return {key: _whole(columns, shards, number, rows[number]) for number, key in enumerate(columns.keys)}


def check_covered(columns: ShardColumns) -> None:
    """Raise IntegrityError where nobody holds a place, or more than one main replica does."""
    mains = select_rows(columns, np.flatnonzero(columns.main))
    doubled = fault_problems(columns, doubled_faults(mains), "element")
    everybody = replace(columns, main=np.ones(len(columns), dtype=np.bool_))
    faults = sharding_faults(everybody)
    missing = fault_problems(everybody, select_faults(faults, np.flatnonzero(~faults.doubled)), "element")
    problems: Sequence[Problem] = (*missing, *doubled)
    if problems:
        fixes = dict.fromkeys(problem.fix for problem in problems if problem.fix)
        what = "unshard: each element needs a shard that holds it, and at most one main replica"
        raise IntegrityError(error_text(what, offenders=problem_lines(problems), fix="\n  ".join(fixes)))


def _needed(columns: ShardColumns, number: int, rows: Column) -> list[int]:
    """Return the rows that make up a tensor, those that count last: main replicas, and before them lower ranks."""
    rows = rows[columns.elements[rows] > 0]
    mains = rows[columns.main[rows]]
    are_all = columns.elements[mains].sum() == prod(columns.kinds[number].global_shape)
    needed: list[int] = (mains if are_all else rows[np.lexsort((-columns.rank[rows], columns.main[rows]))]).tolist()
    return needed


def _is_there(data: Any) -> bool:
    return isinstance(data, LazyTensor) or (isinstance(data, torch.Tensor) and has_elements(data))


def _whole(columns: ShardColumns, shards: Sequence[ShardedTensor], number: int, rows: Sequence[int]) -> Any:
    kind = columns.kinds[number]
    if len(rows) == 1:
        data = shards[rows[0]].data
        return data if tuple(data.shape) == kind.global_shape else _dense(data).reshape(kind.global_shape)
    pieces = [_dense(shards[row].data) for row in rows]
    whole = empty_data(kind.global_shape, kind.dtype, pieces[0].device if pieces else "cpu")
    mine = select_rows(columns, np.array(rows, dtype=np.int64))
    boxes = shard_boxes(mine.offset, mine.shape, mine.start, mine.stop)
    _fill(as_integers(whole), list(map(as_integers, pieces)), boxes, (mine.start >= 0).tolist())
    return whole


def _dense(data: Any) -> torch.Tensor:
    tensor: torch.Tensor = data.read() if isinstance(data, LazyTensor) else data
    return tensor


def _fill(whole: torch.Tensor, pieces: Sequence[torch.Tensor], boxes: BoxColumns, is_flat: Sequence[bool]) -> None:
    """Copy each box of the pieces to its place, in order."""
    axes = whole.dim()
    rows = zip(boxes.shard.tolist(), boxes.offset.tolist(), boxes.shape.tolist(), boxes.position.tolist(), strict=True)
    for shard, offset, shape, position in rows:
        # Columns are widened on the left: a scalar is a box of one axis.
        box = zip(offset[len(offset) - axes :], shape[len(shape) - axes :], strict=True)
        place = whole[tuple(slice(first, first + size) for first, size in box)]
        piece = pieces[shard]
        if is_flat[shard]:
            piece = piece[position : position + place.numel()]
        place.copy_(piece.reshape(place.shape))
