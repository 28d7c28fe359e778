"""Loading by an index: only the bytes that are needed, straight into the targets' memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...codec import byte_buffer
from ...errors import IntegrityError, error_text
from ...geometry import Column
from ...layouts import ShardColumns, TensorKind, shard_columns
from ...mapping import ShardedTensor
from ...plans import LoadPlan, Unexpected, find_gaps, find_mismatches, find_unexpected, plan_load
from ...storage import ReadReport, collector_paused, fetch
from .._checks import check_fit
from .._missing import check_lengths
from .._values import Checkpoint
from ._columns import Index
from ._rows import chunks_of, file_at, kinds_at, stored_alike
from ._run import MOST_BYTES, read_run, run_plan, single_run
from ._texts import find_texts, texts


def load_from_index(checkpoint: Checkpoint, index: Index, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous tensor on the CPU or where copies are staged, and return what was read.

    All that LOAD_SHARDED needs of a format whose chunks are row-major bytes in files.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    if len(shards) == 1 and checkpoint.options.verify is None and shards[0].data.is_cpu:
        run = single_run(index, shards[0])
        if run is not None and run.length <= MOST_BYTES:
            return read_run(checkpoint, index, run, byte_buffer(shards[0].data))
    with collector_paused():
        plan = plan_shards(index, shards, shard_columns(shards, checkpoint.world.rank))
    return read_planned(checkpoint, index, plan, [shard.data for shard in shards])


def plan_shards(index: Index, shards: Sequence[ShardedTensor], columns: ShardColumns) -> LoadPlan:
    """Return the plan that fills shards from a checkpoint, after checking that it can.

    Args:
        index: what is stored.
        shards: what is asked for.
        columns: the same shards as columns.
    """
    if len(shards) == 1 and (run := single_run(index, shards[0])) is not None:
        return run_plan(run)
    numbers = np.array(find_texts(index.key_text, index.key_start, columns.keys), dtype=np.int64)
    if not stored_alike(index, numbers, columns.kinds):
        _check_kinds(index, numbers, shards, columns)
    plan = plan_load(columns, chunks_of(index, numbers))
    if plan.doubled.size:
        keys = [repr(columns.keys[number]) for number in plan.doubled.tolist()]
        raise IntegrityError(
            error_text("load: stored chunks overlap; the checkpoint contradicts itself", offenders=keys)
        )
    partly = np.flatnonzero(plan.covered != columns.elements)
    if partly.size:
        known = _stored_kinds(index, numbers, columns)
        check_fit(find_gaps([shards[row] for row in partly.tolist()], plan.covered[partly], known))
    return plan


def _check_kinds(index: Index, numbers: Column, shards: Sequence[ShardedTensor], columns: ShardColumns) -> None:
    """Raise with all that is asked for and not stored, or stored otherwise."""
    known = _stored_kinds(index, numbers, columns)
    absent: tuple[Unexpected, ...] = ()
    if len(known) < len(columns.keys):
        absent = find_unexpected(columns.keys, list(texts(index.key_text, index.key_start)))
    asked = [shard for shard in shards if shard.key in known] if absent else shards
    check_fit((*absent, *find_mismatches(asked, known)))


def _stored_kinds(index: Index, numbers: Column, columns: ShardColumns) -> dict[str, TensorKind]:
    """Return what is stored of each key that is."""
    found = numbers.tolist()
    stored = [key for key, number in zip(columns.keys, found, strict=True) if number >= 0]
    return dict(zip(stored, kinds_at(index, [number for number in found if number >= 0]), strict=True))


def read_planned(checkpoint: Checkpoint, index: Index, plan: LoadPlan, memories: Sequence[torch.Tensor]) -> ReadReport:
    """Read what a plan says, once the files that it needs are known to be as long as the index says.

    Args:
        checkpoint: where the files are, and how they are read.
        index: what the plan was made on.
        plan: what to read.
        memories: for each requested shard its memory, a contiguous tensor, written in place.
    """
    numbers = np.union1d(plan.runs.file, plan.strided.file).tolist()
    files = {number: file_at(index, number) for number in numbers}
    check_lengths(checkpoint, files.values())
    options = checkpoint.options
    return fetch(checkpoint.storage, files, plan, memories, verify=options.verify, progress=options.progress)
