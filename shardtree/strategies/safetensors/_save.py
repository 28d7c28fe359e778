"""Saving in the native format: each rank its data files, rank 0 the index; and the common state, which is one file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...codec import decode_tree, encode_tree
from ...geometry import Column
from ...layouts import shard_columns
from ...mapping import ShardedObject, ShardedTensor
from ...storage import STAGED_BYTES, collector_paused, is_in_place, usual_threads
from .._metadata import read_checked, write_checked
from .._values import AsyncRequest, Checkpoint, Fields, PendingSave
from ..index import RankFiles, save_with_index
from ._layout import Shard, parts
from ._write import write_files


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree as one file, and return what metadata.json says about it."""
    data = encode_tree(common, allow_pickle=pending.options.allow_pickle)
    name = f"{pending.save_id}/common.safetensors"
    entry = write_checked(pending.storage, name, data, durable=pending.options.durable)
    return {"save_id": pending.save_id, "common": entry}


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where shards were."""
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[RankFiles]:
    """Prepare the data files of a rank's shards, and return the request that writes them."""
    with collector_paused():
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        threads = pending.options.threads or usual_threads()
        threads = threads if threads == 1 or all(map(_in_memory, tensors)) else 1
        layout = parts(shards, allow_pickle=pending.options.allow_pickle, most_files=threads)
        columns = shard_columns(tensors, pending.world.rank)
    return save_with_index(pending, partial(write_files, pending, layout, columns, _tensor_rows(shards), threads))


def _in_memory(shard: ShardedTensor) -> bool:
    """Return whether several threads can write such data at a time: each without a large copy, or a device's stream."""
    data = shard.data
    return isinstance(data, torch.Tensor) and data.is_cpu and (is_in_place(data) or data.nbytes <= STAGED_BYTES)


def _tensor_rows(shards: Sequence[Shard]) -> Column:
    """Return, for each shard, the row that it has among the tensors; -1 for an object."""
    is_tensor = np.array([isinstance(shard, ShardedTensor) for shard in shards], dtype=np.bool_)
    return np.where(is_tensor, np.cumsum(is_tensor) - 1, -1)
