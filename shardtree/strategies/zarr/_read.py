"""Reading tensors: plain chunks straight from their files, others one decoded chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from ...geometry import Column
from ...layouts import shard_columns
from ...mapping import ShardedTensor
from ...plans import LoadPlan, Prospect, ReadCost, Runs, Strided
from ...storage import MemoryStorage, ReadReport, fetch
from .._missing import check_lengths
from .._values import Checkpoint
from ..index import explain_from_index, file_at, plan_shards, planned_cost, read_planned
from ._decode import decoded, filled
from ._group import Group


def load_from_group(checkpoint: Checkpoint, group: Group, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype, or not all of it is.
        CorruptCheckpoint: stored bytes aren't what the metadata says.
    """
    plan = plan_shards(group.index, shards, shard_columns(shards, checkpoint.world.rank))
    memories = [shard.data for shard in shards]
    plain, made = _apart(group, plan)
    report = read_planned(checkpoint, group.index, plain, memories)
    for number, part in _by_file(made):
        report += _read_made(checkpoint, group, number, part, memories)
    return report


def explain_group(checkpoint: Checkpoint, group: Group, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would come to: of chunks that have to be decoded, the whole stored ones."""
    return explain_from_index(group.index, shards, partial(_cost, checkpoint, group), cast=cast, refused={})


def _cost(checkpoint: Checkpoint, group: Group, plan: LoadPlan) -> ReadCost:
    plain, made = _apart(group, plan)
    numbers = [
        number for number in np.union1d(made.runs.file, made.strided.file).tolist() if group.made[number][1] is not None
    ]
    lengths = [checkpoint.storage.length(file_at(group.index, number).name) or 0 for number in numbers]
    pieces = len(made.runs.file) + len(made.strided.file)
    decoded_cost = ReadCost(made.bytes_read, sum(lengths), pieces, len(numbers))
    return planned_cost(checkpoint, group.index, plain) + decoded_cost


def _apart(group: Group, plan: LoadPlan) -> tuple[LoadPlan, LoadPlan]:
    """Return what a plan reads as it is stored, and what it wants of chunks that are decoded or made."""
    made = np.array(sorted(group.made), dtype=np.int64)
    runs, strided = np.isin(plan.runs.file, made), np.isin(plan.strided.file, made)
    return _part(plan, ~runs, ~strided), _part(plan, runs, strided)


def _read_made(
    checkpoint: Checkpoint, group: Group, number: int, plan: LoadPlan, memories: Sequence[torch.Tensor]
) -> ReadReport:
    """Copy what a plan wants of one chunk out of memory that lives as long as this call."""
    array, cell = group.made[number]
    file = file_at(group.index, number)
    if cell is not None and checkpoint.storage.length(file.name) is None:
        check_lengths(checkpoint, [file])
    chunk = filled(array, file.length) if cell is None else decoded(checkpoint.storage, array, cell)
    room = MemoryStorage()
    room.write(file.name, [memoryview(chunk.numpy())], durable=False)
    return fetch(room, {number: file}, plan, memories, verify=None, progress=checkpoint.options.progress)


def _by_file(plan: LoadPlan) -> list[tuple[int, LoadPlan]]:
    """Return a plan's rows file by file."""
    numbers = np.union1d(plan.runs.file, plan.strided.file)
    runs, strided = (np.argsort(rows.file, kind="stable") for rows in (plan.runs, plan.strided))
    ends = np.append(numbers, numbers[-1:] + 1)
    of_runs = np.searchsorted(plan.runs.file[runs], ends).tolist()
    of_strided = np.searchsorted(plan.strided.file[strided], ends).tolist()
    return [
        (number, _part(plan, runs[slice(*one)], strided[slice(*other)]))
        for number, one, other in zip(numbers.tolist(), pairwise(of_runs), pairwise(of_strided), strict=True)
    ]


def _part(
    plan: LoadPlan,
    runs: Column | np.ndarray[tuple[int], np.dtype[np.bool_]],
    strided: Column | np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> LoadPlan:
    return LoadPlan(
        Runs(*(getattr(plan.runs, name)[runs] for name in Runs.__slots__)),
        Strided(*(getattr(plan.strided, name)[strided] for name in Strided.__slots__)),
        plan.covered,
        plan.doubled,
    )
