"""Saving in the native format: each rank writes its data files, then rank 0 writes the index."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...codec import encode_tree
from ...errors import StorageError, error_text
from ...geometry import Column
from ...layouts import shard_columns
from ...mapping import ShardedObject, ShardedTensor
from ...storage import STAGED_BYTES, collector_paused, is_in_place, usual_threads
from .._checked import write_checked
from .._values import AsyncRequest, Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._clean import remove_left_overs, remove_unless_committed
from ._collect import collect_index
from ._entries import Shard
from ._index_file import encode_index
from ._layout import parts
from ._write import write_files
from ._written import Written

BACKEND, VERSION = "safetensors", 1

logger = logging.getLogger("shardtree")


@register_default_strategy(StrategyAction.SAVE_COMMON, BACKEND, VERSION)
def save_common(draft: Draft, common: Any) -> Fields:
    """Write the common tree as one file, and return what metadata.json says about it."""
    data = encode_tree(common, allow_pickle=draft.options.allow_pickle)
    name = f"{draft.save_id}/common.safetensors"
    entry = write_checked(draft.storage, name, data, durable=draft.options.durable)
    return {"save_id": draft.save_id, "common": entry}


@register_default_strategy(StrategyAction.SAVE_OBJECTS, BACKEND, VERSION)
@register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION)
def save_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data files of a rank's shards, and return the request that writes them."""
    with collector_paused():
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        threads = draft.options.threads or usual_threads()
        threads = threads if threads == 1 or all(map(_in_memory, tensors)) else 1
        layout = parts(shards, allow_pickle=draft.options.allow_pickle, most_files=threads)
        columns = shard_columns(tensors, draft.world.rank)
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(write_files, draft, layout, columns, _tensor_rows(shards), threads),
        commit=partial(_write_index, draft),
        abandon=partial(_abandon, draft),
        clean_up=partial(_clean_up, draft),
    )


def _abandon(draft: Draft) -> None:
    """Remove what a save that failed has written, so that a full disk has room for the next one."""
    if draft.world.rank != 0:
        return
    try:
        remove_unless_committed(draft.storage, draft.save_id)
    except Exception as error:
        # The save's own error is on its way; what stays is removed by a later save.
        logger.warning("save: what a failed save wrote stays in %s: %s", draft.storage.where(draft.save_id), error)


def _in_memory(shard: ShardedTensor) -> bool:
    """Return whether several threads can write such data at a time: each without a large copy, or a device's stream."""
    data = shard.data
    return isinstance(data, torch.Tensor) and data.is_cpu and (is_in_place(data) or data.nbytes <= STAGED_BYTES)


def _tensor_rows(shards: Sequence[Shard]) -> Column:
    """Return, for each shard, the row that it has among the tensors; -1 for an object."""
    is_tensor = np.array([isinstance(shard, ShardedTensor) for shard in shards], dtype=np.bool_)
    return np.where(is_tensor, np.cumsum(is_tensor) - 1, -1)


def _write_index(draft: Draft, written: Sequence[Written]) -> Fields:
    for rank, part in enumerate(written):
        for name, length in zip(part.files, part.lengths, strict=True):
            found = draft.storage.length(name)
            if found != length:
                where = draft.storage.where(name)
                fix = "Every rank must see the same folder; use shared storage."
                what = f"save: rank 0 doesn't see {where!r} as rank {rank} wrote it"
                raise StorageError(error_text(what, found=found, expected=f"{length} bytes", fix=fix))
    data = encode_index(collect_index(written))
    entry = write_checked(draft.storage, f"{draft.save_id}/index-0.safetensors", data, durable=draft.options.durable)
    return {"save_id": draft.save_id, "index": entry}


def _clean_up(draft: Draft) -> None:
    if draft.world.rank != 0:
        return
    try:
        remove_left_overs(draft.storage, keep=draft.save_id, before=draft.before, stale_after=draft.options.stale_after)
    except StorageError as error:
        # The checkpoint is saved; what couldn't be removed is tried again by the next save.
        logger.warning("save: left-overs of earlier saves stay in %s: %s", draft.storage.where(), error)
