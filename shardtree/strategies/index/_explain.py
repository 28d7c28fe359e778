"""What a load by an index would come to: problems and bytes, from the index alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ...layouts import shard_columns
from ...mapping import ShardedTensor
from ...plans import (
    LoadPlan,
    Prospect,
    ReadCost,
    Refused,
    find_gaps,
    find_mismatches,
    find_unexpected,
    plan_load,
)
from ...storage import fetch_cost
from .._missing import check_lengths
from .._values import Checkpoint
from ._columns import Index
from ._rows import chunks_of, file_at, kind_at
from ._texts import find_texts, texts

_CONTRADICTION = "its stored chunks overlap; the checkpoint contradicts itself"


def explain_from_index(
    index: Index,
    shards: Sequence[ShardedTensor],
    cost: Callable[[LoadPlan], ReadCost],
    *,
    cast: bool,
    refused: Mapping[str, str],
) -> Prospect:
    """Return what loading shards would come to: all that EXPLAIN needs of a format with an index.

    Args:
        index: what is stored.
        shards: what is asked for.
        cost: gives what reading a plan takes.
        cast: whether dtypes are converted.
        refused: why a tensor that isn't in the index can't be read, by its key.
    """
    keys = sorted({shard.key for shard in shards})
    numbers = find_texts(index.key_text, index.key_start, keys)
    kinds = {key: kind_at(index, number) for key, number in zip(keys, numbers, strict=True) if number >= 0}
    unread = [Refused(key, refused[key]) for key in keys if key in refused]
    wanted = [key for key in keys if key not in refused]
    absent = find_unexpected(wanted, [*texts(index.key_text, index.key_start)]) if not kinds.keys() >= {*wanted} else ()
    known = [shard for shard in shards if shard.key in kinds]
    mismatches = find_mismatches(known, kinds, cast=cast)
    misfits = {mismatch.key for mismatch in mismatches}
    fit = [_as_stored(shard, kinds[shard.key].dtype) for shard in known if shard.key not in misfits]
    columns = shard_columns(fit)
    chosen = find_texts(index.key_text, index.key_start, columns.keys)
    plan = plan_load(columns, chunks_of(index, np.array(chosen, dtype=np.int64)))
    doubled = [Refused(columns.keys[number], _CONTRADICTION) for number in plan.doubled.tolist()]
    return Prospect(
        (*unread, *absent, *mismatches, *doubled, *find_gaps(fit, plan.covered, kinds)), partial(cost, plan)
    )


def _as_stored(shard: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    return shard if shard.dtype == dtype else replace(shard, data=None, dtype=dtype)


def planned_cost(checkpoint: Checkpoint, index: Index, plan: LoadPlan) -> ReadCost:
    """Return what reading a plan takes, once the files that it needs are known to be as long as the index says.

    Args:
        checkpoint: where the files are, and how they are read.
        index: what the plan was made on.
        plan: what would be read.

    Raises:
        CorruptCheckpoint: a file isn't there, or is longer or shorter.
    """
    numbers = np.union1d(plan.runs.file, plan.strided.file).tolist()
    files = {number: file_at(index, number) for number in numbers}
    check_lengths(checkpoint, files.values())
    return fetch_cost(files, plan, verify=checkpoint.options.verify)
