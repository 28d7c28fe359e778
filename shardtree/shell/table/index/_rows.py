"""Functions that formats with an index put into the dispatch table, for loads, metadata, verification and removal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....core.codec import decode_tree
from ....core.deferred import leaf
from ....core.mapping import ShardedObject, ShardedTensor
from ....core.plans import Runs, runs_plan
from ....errors import CheckpointingException
from ...storage import ReadReport
from .._actions import Strategies, StrategyAction
from .._checks import check_objects_known
from .._findings import Finding
from .._metadata import read_checked
from .._save_folders import is_save_file
from .._traits import FormatTraits
from .._values import Checkpoint
from ._columns import Index
from ._file import read_index
from ._load import load_from_index, read_planned
from ._metadata import IndexMetadata

ReadIndex = Callable[[Checkpoint], Index]
"""Function from a checkpoint to its index; raises CorruptCheckpoint if the index can't be read."""


def rows_from_index(backend: str, version: int, read_index: ReadIndex) -> Strategies:
    """Return the dispatch-table rows LOAD_SHARDED, LOAD_METADATA and VERIFY for a format whose index locates tensors.

    Loads read only the needed bytes, straight into the targets' memory. Each stored chunk must be contiguous, row-major
    bytes of one file. A format that stores objects too adds `rows_of_objects`.

    Args:
        backend: Name of the format.
        version: Version of the format.
        read_index: Function that returns the index; called once for an open checkpoint.

    Examples:
        >>> rows = rows_from_index("tar", 1, read_index)
        >>> sorted(action.value for action, *_ in rows)
        ['load_metadata', 'load_sharded', 'verify']
    """

    def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
        """Fill each shard's data, a contiguous tensor, in place, and return a report of the bytes read."""
        return load_from_index(checkpoint, checkpoint.once(read_index), shards)

    def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
        """Return every stored tensor by key, as one whole shard without data, and every object by unique key."""
        return IndexMetadata(checkpoint.once(read_index))

    def verify(checkpoint: Checkpoint) -> tuple[Finding, ...]:
        """Return the damaged blocks of the indexed files, and the blocks without a hash."""
        findings: tuple[Finding, ...] = leaf("verify_index")(checkpoint, read_index)
        return findings

    return {
        (StrategyAction.LOAD_SHARDED, backend, version): load_sharded,
        (StrategyAction.LOAD_METADATA, backend, version): load_metadata,
        (StrategyAction.VERIFY, backend, version): verify,
    }


def rows_of_objects(backend: str, version: int, read_index: ReadIndex) -> Strategies:
    """Return the dispatch-table row LOAD_OBJECTS for a format that stores objects encoded by `item_buffers`.

    The format's index must list the objects.

    Saves never pass objects to a format without this row: they put objects into the common state, or refuse them.

    Args:
        backend: Name of the format.
        version: Version of the format.
        read_index: Function that returns the index; called once for an open checkpoint.

    Examples:
        >>> [action.value for action, *_ in rows_of_objects("tar", 1, read_index)]
        ['load_objects']
    """

    def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
        """Return the data of each sharded object, in order."""
        return objects_from_index(checkpoint, checkpoint.once(read_index), objects) if objects else []

    return {(StrategyAction.LOAD_OBJECTS, backend, version): load_objects}


def rows_in_folder(backend: str, version: int) -> Strategies:
    """Return the dispatch-table rows LIST_FILES and DESCRIBE for a format that writes only into the save's folder.

    Examples:
        >>> sorted(action.value for action, *_ in rows_in_folder("tar", 1))
        ['describe', 'list_files']
    """
    return {
        (StrategyAction.LIST_FILES, backend, version): list_files,
        (StrategyAction.DESCRIBE, backend, version): lambda: FormatTraits(in_save_folder=True, fills_devices=True),
    }


def rows_of_saves(backend: str, version: int) -> Strategies:
    """Return all dispatch-table rows for saves by `save_with_index`, except SAVE_SHARDED and those of the common state.

    They are REMOVE_SHARDED and the rows of `rows_from_index`, `rows_of_objects` and `rows_in_folder`.

    Examples:
        >>> rows = rows_of_saves("tar", 1)
        >>> (StrategyAction.LIST_FILES, "tar", 1) in rows, (StrategyAction.SAVE_SHARDED, "tar", 1) in rows
        (True, False)
    """
    return {
        **rows_from_index(backend, version, read_index),
        **rows_of_objects(backend, version, read_index),
        **rows_in_folder(backend, version),
        (StrategyAction.REMOVE_SHARDED, backend, version): lambda *arguments: leaf("remove_sharded")(*arguments),
    }


def objects_from_index(checkpoint: Checkpoint, index: Index, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: an object isn't stored.
        CorruptCheckpoint: stored bytes are damaged.
        UnsafeFile: an object was pickled, and `allow_pickle` is False.
    """
    unique_keys = [item.unique_key for item in objects]
    numbers = index.find_objects(unique_keys)
    check_objects_known(unique_keys, [number >= 0 for number in numbers])
    rows = np.array(numbers, dtype=np.int64)
    memories = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in index.object_length[rows].tolist()]
    order = np.lexsort((index.object_byte[rows], index.object_file[rows]))
    file, byte, length = (getattr(index, f"object_{name}")[rows[order]] for name in ("file", "byte", "length"))
    plan = runs_plan(Runs(file, byte, order, np.zeros(order.size, dtype=np.int64), length))
    # All touched blocks are checked: a flipped bit makes a number of a tensor slightly wrong, but an object different.
    options = replace(checkpoint.options, verify="all" if checkpoint.options.verify else None)
    read_planned(replace(checkpoint, options=options), index.file, plan, memories)
    return [_decoded_object(memory, key, checkpoint) for memory, key in zip(memories, unique_keys, strict=True)]


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the common tree that `encode_tree` encoded, with `HOLE` in place of each shard.

    This is the LOAD_COMMON row of formats that store the tree in this encoding.
    """
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)


def _decoded_object(memory: torch.Tensor, unique_key: str, checkpoint: Checkpoint) -> Any:
    options = checkpoint.options
    try:
        return decode_tree(memoryview(memory.numpy()), types=options.types, allow_pickle=options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {unique_key!r}")
        raise


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of all files that a save wrote into its own folder."""
    folder = checkpoint.fields.get("save_id")
    names = checkpoint.storage.names(folder) if isinstance(folder, str) and folder else ()
    return tuple(name for name in (f"{folder}/{last}" for last in names) if is_save_file(name))
