"""Saving as zarr v3 arrays: each rank writes its chunk files, rank 0 the index and last the group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...codec import encode_tree
from ...errors import CheckpointingException, IntegrityError, StrategyError, error_text
from ...geometry import Column
from ...layouts import ShardColumns, select_rows, shard_columns, write_problems
from ...mapping import ShardedObject, ShardedTensor
from ...plans import level_writes
from ...storage import BlockHasher, Hashes, hash_column, hashed
from .._metadata import METADATA_FILE
from .._values import AsyncRequest, Draft
from ..base import StrategyAction, register_default_strategy
from ._blobs import FOLDER, Document, blob, write_blob, write_document
from ._commit import Written, group_files, object_blob, write_index
from ._common import BACKEND, VERSION
from ._files import ChunkFile, chunk_files, told, write_chunk_file
from ._layout import placed
from ._v3 import NODE_FILE, encode_v3

logger = logging.getLogger("shardtree")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What one rank writes.

    Attributes:
        files: chunk files, or its parts of them.
        documents: for each array whose metadata it writes, folder and content.
        objects: unique key and bytes of each of its objects.
    """

    files: tuple[ChunkFile, ...]
    documents: tuple[tuple[str, Document], ...]
    objects: tuple[tuple[str, bytes], ...]


@register_default_strategy(StrategyAction.SAVE_OBJECTS, BACKEND, VERSION)
@register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION)
def save_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the chunk files of a rank's shards, and return the request that writes them.

    Raises:
        StrategyError: the ranks didn't tell each other what they hold, so that none knows the chunks.
        IntegrityError: shards can't lie in one checkpoint, or leave gaps in a chunk.
        UnsupportedValue: a dtype or an object can't be stored.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    written, own = _all_writes(draft, tensors)
    objects = [shard for shard in shards if isinstance(shard, ShardedObject)]
    work = _work(draft, written, own, objects)
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(_write, draft, work, tensors),
        commit=partial(write_index, draft, written),
        abandon=partial(_abandon, draft, work),
    )


def _all_writes(draft: Draft, tensors: Sequence[ShardedTensor]) -> tuple[ShardColumns, Column]:
    """Return what all ranks write, and for each row which of this rank's tensors it is, -1 for others'."""
    if draft.world.size == 1:
        columns = shard_columns(tensors)
        problems = write_problems(columns)
        if problems:
            fix = "Give replicas different replica_ids, and keep shards inside their tensor's global shape."
            what = "save: shards that can't lie in one checkpoint"
            raise IntegrityError(error_text(what, offenders=map(str, problems), fix=fix))
        return columns, np.arange(len(tensors))
    if draft.layout is None:
        fix = "Save with validate_access_integrity=True, so that ranks tell each other what they hold."
        raise StrategyError(error_text("save: how tensors are cut into zarr chunks depends on all ranks", fix=fix))
    columns = select_rows(draft.layout, np.flatnonzero(level_writes(draft.layout, draft.world.size)))
    mine = np.flatnonzero(columns.rank == draft.world.rank)
    if [columns.keys[number] for number in columns.key[mine].tolist()] != [shard.key for shard in tensors]:
        found = f"{len(tensors)} shards to write where {mine.size} are expected"
        raise IntegrityError(error_text("save: the shards aren't those that the ranks agreed on", found=found))
    own = np.full(len(columns), -1, dtype=np.int64)
    own[mine] = np.arange(mine.size)
    return columns, own


def _work(draft: Draft, written: ShardColumns, own: Column, objects: Sequence[ShardedObject]) -> Work:
    files: list[ChunkFile] = []
    documents = []
    rank = draft.world.rank
    for part in placed(written, rank):
        if part.keeper == rank:
            documents.append((part.array.name, encode_v3(part.array)))
        numbers = own[part.rows]
        if (numbers >= 0).any():
            files += chunk_files(part, rank, numbers)
    encoded = tuple((item.unique_key, _encoded(item, draft)) for item in objects)
    return Work(tuple(files), tuple(documents), encoded)


def _encoded(item: ShardedObject, draft: Draft) -> bytes:
    try:
        return encode_tree(item.data, allow_pickle=draft.options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {item.unique_key!r}")
        raise


def _write(draft: Draft, work: Work, tensors: Sequence[ShardedTensor]) -> Written:
    storage, options = draft.storage, draft.options
    durable = options.durable
    folders = sorted({name.rpartition("/")[0] for name in _names(work)})
    for folder in folders:
        storage.make_folder(folder, durable=durable)
    files = []
    for file in work.files:
        hashes = write_chunk_file(
            storage, file, tensors, durable=durable, checksums=options.checksums, progress=options.progress
        )
        files.append((file.name, file.length, hashes))
    for folder, document in work.documents:
        write_document(storage, folder, document, durable=durable)
    objects: tuple[tuple[str, int, int], ...] = ()
    if work.objects:
        entry, objects = _write_objects(draft, work)
        files.append(entry)
    if durable:
        for folder in folders:
            storage.sync_folder(folder)
    return Written(tuple(files), objects)


def _write_objects(draft: Draft, work: Work) -> tuple[tuple[str, int, Hashes], tuple[tuple[str, int, int], ...]]:
    """Write a rank's objects as one array of bytes, and return its file, and where in it each object lies."""
    places, begin = [], 0
    for unique_key, data in work.objects:
        places.append((unique_key, begin, len(data)))
        begin += len(data)
    name, document = object_blob(draft.world.rank, begin, places)
    hasher = BlockHasher()
    buffers = hashed((memoryview(data) for _, data in work.objects), hasher)
    options = draft.options
    write_blob(draft.storage, name, told(buffers, options.progress), document, durable=options.durable)
    return (name, begin, hash_column(hasher)), tuple(places)


def _names(work: Work) -> list[str]:
    names = [file.name for file in work.files]
    return [*names, *(f"{folder}/{NODE_FILE}" for folder, _ in work.documents)]


def _abandon(draft: Draft, work: Work) -> None:
    """Remove what a save that failed has written, so that a full disk has room for the next one."""
    storage = draft.storage
    try:
        if storage.length(METADATA_FILE) is not None:
            return  # it is committed; what failed came after
        own = object_blob(draft.world.rank, 0, [])[0]
        blobs = [own, blob("common", 0)[0], blob("index", 0)[0]] if draft.world.rank == 0 else [own]
        names = [*_names(work), *blobs, *(f"{name.rpartition('/')[0]}/{NODE_FILE}" for name in blobs)]
        for name in names:
            storage.remove(name)
        for folder in sorted({name.rpartition("/")[0] for name in names}, reverse=True):
            storage.remove_folder(folder)
        _remove_groups(draft)
    except Exception as error:
        # The save's own error is on its way; what stays is written over by the next save.
        logger.warning("save: what a failed save wrote stays in %s: %s", storage.where(), error)


def _remove_groups(draft: Draft) -> None:
    if draft.world.rank == 0:
        for name in group_files():
            draft.storage.remove(name)
        for folder in (f"{FOLDER}/objects", FOLDER, draft.save_id):
            draft.storage.remove_folder(folder)
