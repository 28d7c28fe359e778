"""The files that a whole checkpoint needs, and those of them that are missing, from names and lengths alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..errors import CheckpointingException, CorruptCheckpoint
from ..formats.manifest import read_manifest
from ..shell.checkpoint import common_backend, sharded_backend
from ..shell.storage import Storage
from ..shell.table import Fields, StrategyAction, find_strategy
from ._opened import OpenCheckpoint, index_of


def missing_files(tree: OpenCheckpoint, lengths: Mapping[str, int], most: int) -> tuple[str, ...]:
    """Return the sorted names of a checkpoint's files that are missing, or too short for their contents.

    Args:
        tree: The checkpoint.
        lengths: Known lengths of existing files, by name. Other lengths are requested from the storage.
        most: Upper bound of the number of lengths that are requested.
    """
    storage, needed = tree.checkpoint.storage, needed_files(tree)
    unknown = [name for name in needed if name not in lengths][:most]
    there = {**lengths, **{name: _length(storage, name) for name in unknown}}
    return tuple(sorted(name for name, length in needed.items() if there.get(name, length) < length))


def needed_files(tree: OpenCheckpoint) -> dict[str, int]:
    """Return the minimum length in bytes of each required file, by name, from a checkpoint's metadata.

    Examples:
        >>> import torch, shardtree as st
        >>> folder = st.storage.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, folder, ("huggingface", 1))
        >>> list(needed_files(st.open_checkpoint(folder)))
        ['model.safetensors']
    """
    checkpoint, strategies = tree.checkpoint, tree.strategies
    metadata = index_of(checkpoint, strategies)
    needed = {} if metadata is None else dict(metadata.needed_files())
    with suppress(CorruptCheckpoint):  # the manifest is damaged: loads and verify report that
        needed = dict.fromkeys(read_manifest(checkpoint) or (), 0) | needed
    return needed | _described_files(checkpoint.fields) | _common_files(tree)


def _described_files(fields: Fields) -> dict[str, int]:
    """Return the lengths of the files that metadata.json names: our index, and our file of the common state."""
    described = [entry for entry in map(fields.get, ("index", "common")) if isinstance(entry, dict)]
    entries = [(entry.get("name"), entry.get("length")) for entry in described]
    return {name: length for name, length in entries if isinstance(name, str) and type(length) is int}


def _common_files(tree: OpenCheckpoint) -> dict[str, int]:
    """Return the least lengths, all 0, of the files of a common state that is in another format than the shards.

    If at least one of the files exists, the result is empty, since the checkpoint may not need the others.
    """
    checkpoint, common = tree.checkpoint, common_backend(tree.checkpoint.fields)
    list_files = find_strategy(StrategyAction.LIST_FILES, *common, strategies=tree.strategies)
    if list_files is None or common == sharded_backend(checkpoint.fields) or "common" in checkpoint.fields:
        return {}
    names = list_files(checkpoint)
    # A format may list files that needn't exist.
    return {} if any(_length(checkpoint.storage, name) >= 0 for name in names) else dict.fromkeys(names, 0)


def _length(storage: Storage, name: str) -> int:
    """Return a file's length, -1 if there is no such file."""
    with suppress(CheckpointingException):  # a name that leads out of the folder
        if (length := storage.length(name)) is not None:
            return length
    return -1
