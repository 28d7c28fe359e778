"""Loading by an index: only the bytes that are needed, straight into the targets' memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...codec import bit_view
from ...errors import IntegrityError, error_text
from ...layouts import ShardColumns, shard_columns
from ...mapping import ShardedTensor
from ...plans import LoadPlan, Unexpected, find_gaps, find_mismatches, find_unexpected, plan_load
from ...storage import ReadReport, fetch
from .._checks import check_fit
from .._missing import check_lengths
from .._values import Checkpoint
from ._columns import Index
from ._rows import chunks_of, file_at, kind_at
from ._texts import find_texts, texts


def load_from_index(checkpoint: Checkpoint, index: Index, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    All that LOAD_SHARDED needs of a format whose chunks are row-major bytes in files.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    plan = plan_shards(index, shards, shard_columns(shards, checkpoint.world.rank))
    return read_planned(checkpoint, index, plan, [bit_view(shard.data) for shard in shards])


def plan_shards(index: Index, shards: Sequence[ShardedTensor], columns: ShardColumns) -> LoadPlan:
    """Return the plan that fills shards from a checkpoint, after checking that it can.

    Args:
        index: what is stored.
        shards: what is asked for.
        columns: the same shards as columns.
    """
    numbers = find_texts(index.key_text, index.key_start, columns.keys)
    known = {key: kind_at(index, number) for key, number in zip(columns.keys, numbers, strict=True) if number >= 0}
    absent: tuple[Unexpected, ...] = ()
    if len(known) < len(columns.keys):
        absent = find_unexpected(columns.keys, list(texts(index.key_text, index.key_start)))
    check_fit((*absent, *find_mismatches([shard for shard in shards if shard.key in known], known)))
    plan = plan_load(columns, chunks_of(index, np.array(numbers, dtype=np.int64)))
    if plan.doubled.size:
        keys = [repr(columns.keys[number]) for number in plan.doubled.tolist()]
        raise IntegrityError(
            error_text("load: stored chunks overlap; the checkpoint contradicts itself", offenders=keys)
        )
    check_fit(find_gaps(shards, plan.covered, known))
    return plan


def read_planned(checkpoint: Checkpoint, index: Index, plan: LoadPlan, memories: Sequence[torch.Tensor]) -> ReadReport:
    """Read what a plan says, once the files that it needs are known to be as long as the index says.

    Args:
        checkpoint: where the files are, and how they are read.
        index: what the plan was made on.
        plan: what to read.
        memories: for each requested shard its bytes, uint8 (bytes,), written in place.
    """
    numbers = np.union1d(plan.runs.file, plan.strided.file).tolist()
    files = {number: file_at(index, number) for number in numbers}
    check_lengths(checkpoint, files.values())
    options = checkpoint.options
    return fetch(checkpoint.storage, files, plan, memories, verify=options.verify, progress=options.progress)
