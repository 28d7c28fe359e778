"""Loading from zarr folders: our own by their index, those of other programs by their metadata and file names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...codec import decode_tree, parse_json
from ...errors import CheckpointingException
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Prospect, Runs, runs_plan
from ...storage import ReadReport, Storage
from .._checked import read_checked
from .._object_checks import check_objects_known
from .._values import Checkpoint, Fields
from ..base import StrategyAction, register_default_strategy
from ..index import Index, IndexMetadata, find_texts, read_planned
from ._array import StoredArray
from ._blobs import decode_columns
from ._common import BACKEND, VERSION
from ._folder import find_arrays
from ._group import Group, read_group
from ._read import explain_group, load_from_group
from ._v3 import NODE_FILE, OURS

_V2_GROUP = ".zgroup"


def is_own(fields: Fields) -> bool:
    """Return whether a save of ours wrote the arrays, as metadata.json says."""
    return "index" in fields


def read_arrays(checkpoint: Checkpoint) -> Group:
    """Return what a checkpoint's folder holds, looked up once."""
    if "group" not in checkpoint.memo:
        if is_own(checkpoint.fields):
            group = Group(decode_columns(*read_checked(checkpoint, "index")), (), {})
        else:
            arrays, _ = find_arrays(checkpoint.storage)
            group = read_group(checkpoint.storage, [_with_fill(array) for array in arrays])
        checkpoint.memo["group"] = group
    found: Group = checkpoint.memo["group"]
    return found


def _with_fill(array: StoredArray) -> StoredArray:
    """Return a v2 array without a fill value as one of zeros: zarr-python leaves out such chunks of it."""
    return replace(array, fill=0) if array.fill is None and array.document["zarr_format"] == 2 else array


@register_default_strategy(StrategyAction.RECOGNIZE, BACKEND, VERSION)
def recognize(storage: Storage) -> Fields | None:
    """Return the backends of a folder of zarr arrays that another program wrote, None if it is none.

    A folder of ours has metadata.json; without, its save wasn't finished.
    """
    if storage.length(_V2_GROUP) is None:
        if storage.length(NODE_FILE) is None:
            return None
        node = parse_json(storage.read(NODE_FILE), storage.where(NODE_FILE))
        attributes = node.get("attributes") if isinstance(node, dict) else None
        is_group = isinstance(node, dict) and node.get("node_type") == "group"
        if not is_group or (isinstance(attributes, dict) and OURS in attributes):
            return None
    return {
        "sharded_backend": BACKEND,
        "sharded_backend_version": VERSION,
        "common_backend": BACKEND,
        "common_backend_version": VERSION,
    }


@register_default_strategy(StrategyAction.LOAD_METADATA, BACKEND, VERSION)
def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    return IndexMetadata(read_arrays(checkpoint).index)


@register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION)
def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    return load_from_group(checkpoint, read_arrays(checkpoint), shards)


@register_default_strategy(StrategyAction.EXPLAIN, BACKEND, VERSION)
def explain(checkpoint: Checkpoint, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would come to, from metadata and the lengths of files alone."""
    return explain_group(checkpoint, read_arrays(checkpoint), shards, cast=cast)


@register_default_strategy(StrategyAction.LOAD_OBJECTS, BACKEND, VERSION)
def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: the checkpoint lacks some.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    if not objects:
        return []
    index, wanted = read_arrays(checkpoint).index, [item.unique_key for item in objects]
    numbers = find_texts(index.object_text, index.object_start, wanted)
    check_objects_known(wanted, [number >= 0 for number in numbers])
    memories = _object_bytes(checkpoint, index, numbers)
    return [_decoded(memory, key, checkpoint) for memory, key in zip(memories, wanted, strict=True)]


def _object_bytes(checkpoint: Checkpoint, index: Index, numbers: Sequence[int]) -> list[torch.Tensor]:
    rows = np.array(numbers, dtype=np.int64)
    memories = [torch.empty(length, dtype=torch.uint8) for length in index.object_length[rows].tolist()]
    order = np.lexsort((index.object_byte[rows], index.object_file[rows]))
    file, byte, length = (getattr(index, f"object_{name}")[rows[order]] for name in ("file", "byte", "length"))
    plan = runs_plan(Runs(file, byte, order, np.zeros(order.size, dtype=np.int64), length))
    # A damaged object could decode to another value, so its blocks are read whole and checked, small as they are.
    options = replace(checkpoint.options, verify="all" if checkpoint.options.verify else None)
    read_planned(replace(checkpoint, options=options), index, plan, memories)
    return memories


def _decoded(memory: torch.Tensor, unique_key: str, checkpoint: Checkpoint) -> Any:
    options = checkpoint.options
    try:
        return decode_tree(memoryview(memory.numpy()), types=options.types, allow_pickle=options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {unique_key!r}")
        raise
