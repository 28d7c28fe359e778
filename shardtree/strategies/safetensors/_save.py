"""Saving in the native format: each rank writes its data files, then rank 0 writes the index."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...codec import encode_tree
from ...errors import CheckpointingException, IntegrityError, StorageError, error_text
from ...geometry import Column
from ...layouts import join_columns, shard_columns, write_problems
from ...mapping import ShardedObject, ShardedTensor
from ...storage import STAGED_BYTES, Storage, StoredFile, collector_paused, is_in_place, usual_threads
from .._checks import check_objects_written
from .._metadata import METADATA_FILE, decode_metadata, metadata_bytes, write_checked
from .._save_folders import is_left_over, is_save_folder, remove_save
from .._values import AsyncRequest, Fields, PendingSave
from ..index import Index, build_index
from ._layout import Shard, parts
from ._load import encode_index
from ._write import Written, fingerprint_column, write_files

# The global index, from what each rank wrote


def collect_index(written: Sequence[Written]) -> Index:
    """Return the index of a checkpoint, given what its ranks wrote.

    Raises:
        IntegrityError: ranks disagree about a tensor, two wrote the same object, or a tensor is named like one.
    """
    columns = join_columns([part.columns for part in written])
    problems = write_problems(columns)
    if problems:
        fix = "Give replicas different replica_ids, and keep shards inside their tensor's global shape."
        what = "save: shards that can't lie in one checkpoint"
        raise IntegrityError(error_text(what, offenders=map(str, problems), fix=fix))
    first_file = np.cumsum([0, *(len(part.files) for part in written)])
    files = [
        StoredFile(name, length, hashes)
        for part in written
        for name, length, hashes in zip(part.files, part.lengths, part.hashes, strict=True)
    ]
    index = build_index(
        columns,
        _joined([part.file + base for part, base in zip(written, first_file, strict=False)]),
        _joined([part.byte for part in written]),
        files=files,
        objects=_objects(written, first_file, columns.keys),
    )
    return replace(index, x_fingerprint=fingerprint_column(columns, [part.totals for part in written]))


def _objects(written: Sequence[Written], first_file: Column, keys: Sequence[str]) -> list[tuple[str, int, int, int]]:
    rows = sorted(
        (key, file + int(base), byte, length)
        for part, base in zip(written, first_file, strict=False)
        for key, file, byte, length in part.objects
    )
    check_objects_written([row[0] for row in rows], keys)
    return rows


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate([*columns, np.zeros(0, dtype=np.int64)])


# Removing the replaced save's files, and orphaned files of interrupted saves


def remove_orphans(storage: Storage, *, keep: str, before: bytes | None, stale_after: float) -> None:
    """Remove the folder of the replaced save, and those of interrupted saves; only files that a save writes.

    Args:
        storage: the checkpoint's folder.
        keep: the folder that metadata.json refers to now.
        before: metadata.json as it was before.
        stale_after: seconds without a change, by the storage's clock, after which an unfinished save counts as
            interrupted, if its process can't be seen.
    """
    replaced = _save_id(before)
    # From the time of this commit, so that only the storage's own clock counts.
    stale = (storage.changed(METADATA_FILE) or 0.0) - stale_after
    for name in storage.names():
        if not is_save_folder(name) or name == keep:
            continue
        if name == replaced or is_left_over(storage, name, before=stale):
            remove_save(storage, name)


def remove_unless_committed(storage: Storage, folder: str) -> None:
    """Remove a save's folder, unless metadata.json refers to it."""
    # A metadata.json that can't be read may be this save's: then its files stay.
    metadata = metadata_bytes(storage)
    if metadata is None or _save_id(metadata) not in (None, folder):
        remove_save(storage, folder)


def _save_id(metadata: bytes | None) -> str | None:
    try:
        save_id = decode_metadata(metadata, METADATA_FILE).get("save_id") if metadata else None
    except CheckpointingException:
        return None
    return save_id if isinstance(save_id, str) else None


BACKEND, VERSION = "safetensors", 1

logger = logging.getLogger("shardtree")


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree as one file, and return its fields of metadata.json."""
    data = encode_tree(common, allow_pickle=pending.options.allow_pickle)
    name = f"{pending.save_id}/common.safetensors"
    entry = write_checked(pending.storage, name, data, durable=pending.options.durable)
    return {"save_id": pending.save_id, "common": entry}


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data files of a rank's shards, and return the request that writes them."""
    with collector_paused():
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        threads = pending.options.threads or usual_threads()
        threads = threads if threads == 1 or all(map(_in_memory, tensors)) else 1
        layout = parts(shards, allow_pickle=pending.options.allow_pickle, most_files=threads)
        columns = shard_columns(tensors, pending.world.rank)
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(write_files, pending, layout, columns, _tensor_rows(shards), threads),
        commit=partial(_write_index, pending),
        abandon=partial(_abandon, pending),
        clean_up=partial(_clean_up, pending),
    )


def _abandon(pending: PendingSave) -> None:
    """Remove the files of a failed save, so that a full disk has room for the next one. Never raises."""
    if pending.world.rank != 0:
        return
    try:
        remove_unless_committed(pending.storage, pending.save_id)
    except Exception as error:
        # The save's own error is being raised, and must not be hidden; a later save removes what stays.
        logger.warning("save: what a failed save wrote stays in %s: %s", pending.storage.where(pending.save_id), error)


def _in_memory(shard: ShardedTensor) -> bool:
    """Return whether several threads can write such data at a time, without a large copy or a device's stream each."""
    data = shard.data
    return isinstance(data, torch.Tensor) and data.is_cpu and (is_in_place(data) or data.nbytes <= STAGED_BYTES)


def _tensor_rows(shards: Sequence[Shard]) -> Column:
    """Return, for each shard, the row that it has among the tensors; -1 for an object."""
    is_tensor = np.array([isinstance(shard, ShardedTensor) for shard in shards], dtype=np.bool_)
    return np.where(is_tensor, np.cumsum(is_tensor) - 1, -1)


def _write_index(pending: PendingSave, written: Sequence[Written]) -> Fields:
    # Before the index names them: another save's clean-up may have removed files, or rank 0 may see another folder.
    for rank, part in enumerate(written):
        for name, length in zip(part.files, part.lengths, strict=True):
            found = pending.storage.length(name)
            if found != length:
                where = pending.storage.where(name)
                fix = "Every rank must see the same folder; use shared storage."
                what = f"save: rank 0 doesn't see {where!r} as rank {rank} wrote it"
                raise StorageError(error_text(what, found=found, expected=f"{length} bytes", fix=fix))
    data = encode_index(collect_index(written))
    entry = write_checked(
        pending.storage, f"{pending.save_id}/index-0.safetensors", data, durable=pending.options.durable
    )
    return {"save_id": pending.save_id, "index": entry}


def _clean_up(pending: PendingSave) -> None:
    if pending.world.rank != 0:
        return
    try:
        remove_orphans(
            pending.storage, keep=pending.save_id, before=pending.before, stale_after=pending.options.stale_after
        )
    except StorageError as error:
        # No failure of this save, whose checkpoint counts by now; the next save tries again.
        logger.warning("save: orphaned files of earlier saves stay in %s: %s", pending.storage.where(), error)
