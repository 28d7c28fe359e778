"""Loading from the native format: only the bytes that are needed, straight into the targets' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...codec import decode_tree
from ...errors import CheckpointingException
from ...geometry import Column
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Prospect, Runs, runs_plan
from ...storage import ReadReport
from .._checked import read_checked
from .._missing import check_lengths
from .._object_checks import check_objects_known
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import (
    Index,
    explain_from_index,
    file_at,
    find_texts,
    load_from_index,
    planned_cost,
    read_planned,
    text_at,
)
from ._index_file import decode_index
from ._save import BACKEND, VERSION


def read_index(checkpoint: Checkpoint) -> Index:
    """Return a checkpoint's index, its columns as views of the mapped file."""
    if "index" not in checkpoint.memo:
        checkpoint.memo["index"] = decode_index(*read_checked(checkpoint, "index"))
    index: Index = checkpoint.memo["index"]
    return index


@register_default_strategy(StrategyAction.LOAD_COMMON, BACKEND, VERSION)
def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where shards were."""
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)


@register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION)
def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    return load_from_index(checkpoint, read_index(checkpoint), shards)


@register_default_strategy(StrategyAction.EXPLAIN, BACKEND, VERSION)
def explain(checkpoint: Checkpoint, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would come to, from the index alone."""
    index = read_index(checkpoint)
    return explain_from_index(index, shards, partial(planned_cost, checkpoint, index), cast=cast, refused={})


@register_default_strategy(StrategyAction.LOAD_OBJECTS, BACKEND, VERSION)
def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order."""
    if not objects:
        return []
    index = read_index(checkpoint)
    wanted = [item.unique_key for item in objects]
    numbers = find_texts(index.object_text, index.object_start, wanted)
    check_objects_known(wanted, [number >= 0 for number in numbers])
    return _read_objects(checkpoint, index, np.array(numbers, dtype=np.int64))


def _read_objects(checkpoint: Checkpoint, index: Index, numbers: Column) -> list[Any]:
    lengths = index.object_length[numbers]
    check_lengths(checkpoint, (file_at(index, file) for file in np.unique(index.object_file[numbers]).tolist()))
    memories = [torch.empty(length, dtype=torch.uint8) for length in lengths.tolist()]
    order = np.lexsort((index.object_byte[numbers], index.object_file[numbers]))
    zero = np.zeros(order.size, dtype=np.int64)
    file, byte = index.object_file[numbers], index.object_byte[numbers]
    plan = runs_plan(Runs(file[order], byte[order], order, zero, lengths[order]))
    # A damaged object could decode to another value, so its blocks are read whole and checked, small as they are.
    options = replace(checkpoint.options, verify="all" if checkpoint.options.verify else None)
    read_planned(replace(checkpoint, options=options), index, plan, memories)
    names = [text_at(index.object_text, index.object_start, number) for number in numbers.tolist()]
    return [_decode(memory, name, checkpoint) for memory, name in zip(memories, names, strict=True)]


def _decode(memory: torch.Tensor, unique_key: str, checkpoint: Checkpoint) -> Any:
    options = checkpoint.options
    try:
        return decode_tree(memoryview(memory.numpy()), types=options.types, allow_pickle=options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {unique_key!r}")
        raise
