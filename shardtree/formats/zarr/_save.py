"""Saving as zarr v3 arrays: each rank writes its chunk files, rank 0 the index and last the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from ...errors import IntegrityError, StrategyError, error_text
from ...kit import (
    METADATA_FILE,
    AsyncRequest,
    Column,
    Fields,
    PendingSave,
    ShardColumns,
    ShardedObject,
    ShardedTensor,
    StoredFile,
    abandoning,
    build_index,
    canonical_json,
    check_objects_written,
    check_seen,
    check_stored_shards,
    checked_entry,
    item_buffers,
    level_writes,
    make_folder,
    remove_folder,
    replace_metadata,
    select_rows,
    shard_columns,
    sync_folder,
)
from ._cells import inner_cells, inner_counts
from ._group import Rows, array_columns, chunk_rows
from ._layout import ArrayLayout, ChunkFile, array_layouts, chunk_files, write_chunk_file
from ._metadata import NODE_FILE, OURS, encode_v3
from ._own import FOLDER, Document, blob, encode_columns, group_document, write_blob, write_document

# On rank 0: the index of all chunk files, then the group, then metadata.json


@dataclass(slots=True, eq=False)
class ZarrSaving:
    """Findings of one save, which its later rows use.

    Attributes:
        columns: the shards that all ranks write.
        members: the zarr.json of each array by its folder, once rank 0 has written the index.
    """

    columns: ShardColumns
    members: Mapping[str, Document] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """Files of one rank.

    Attributes:
        files: name, length in bytes and block hashes of each file, no hashes if others wrote it too; the file of the
            rank's objects comes last, if there is one.
        objects: unique key of each object, where it begins in that file, and its length in bytes.
    """

    files: tuple[tuple[str, int, NDArray[np.uint64] | None], ...]
    objects: tuple[tuple[str, int, int], ...]


def write_index(pending: PendingSave, saving: ZarrSaving, rank_files: Sequence[RankFiles]) -> Fields:
    """Write the index, and return its fields of metadata.json; on rank 0.

    Args:
        pending: what is being saved.
        saving: has the shards that all ranks wrote, and gets the members of the group.
        written: what each rank wrote.

    Raises:
        StorageError: rank 0 doesn't see a file as it was written.
        IntegrityError: two ranks wrote the same object, or a tensor has the name of one.
    """
    columns = saving.columns
    files = {name: StoredFile(name, length, hashes) for part in rank_files for name, length, hashes in part.files}
    for rank, part in enumerate(rank_files):
        check_seen(pending.storage, ((name, length) for name, length, _ in part.files), f"rank {rank}")
    number = {name: position for position, name in enumerate(files)}
    parts = sorted(array_layouts(columns), key=lambda part: part.array.key)
    rows = [_rows(part, number) for part in parts]
    arrays = [part.array for part in parts]
    objects = [
        (unique_key, number[part.files[-1][0]], begin, length)
        for part in rank_files
        for unique_key, begin, length in part.objects
    ]
    check_objects_written([key for key, *_ in objects], {array.key for array in arrays})
    kinds = dict(zip(columns.keys, columns.kinds, strict=True))
    chunk_columns, file, byte = array_columns(arrays, rows)
    chunk_columns = replace(chunk_columns, kinds=tuple(kinds[key] for key in chunk_columns.keys))
    data = encode_columns(build_index(chunk_columns, file, byte, files=list(files.values()), objects=objects))
    name, document = blob("index", len(data))
    write_blob(pending.storage, name, [memoryview(data)], document, durable=pending.options.durable)
    saving.members = _members(parts, rank_files) | {f"{FOLDER}/index": document}
    return {"save_id": pending.save_id, "index": checked_entry(name, data)}


def _rows(part: ArrayLayout, number: dict[str, int]) -> Rows:
    array, cells = part.array, part.cells
    file = np.array([number[array.file_name(tuple(cell))] for cell in cells.tolist()], dtype=np.int64)
    if array.inner is None:
        return chunk_rows(array, cells, array.step, file)
    each = prod(inner_counts(array))
    numbers = np.arange(each, dtype=np.int64)
    places = np.concatenate([inner_cells(array, cell, numbers) for cell in cells])
    begin = np.tile(numbers * (prod(array.inner) * array.dtype.itemsize), len(cells))
    return chunk_rows(array, places, array.inner, np.repeat(file, each), begin)


def _members(parts: Sequence[ArrayLayout], rank_files: Sequence[RankFiles]) -> dict[str, Document]:
    members = {part.array.name: encode_v3(part.array) for part in parts}
    for rank, part in enumerate(rank_files):
        if part.objects:
            members[f"{FOLDER}/objects/{rank}"] = object_blob(rank, part.files[-1][1], part.objects)[1]
    return members


def object_blob(rank: int, length: int, places: Sequence[tuple[str, int, int]]) -> tuple[str, Document]:
    """Return the name of the file of a rank's objects, and the zarr.json of its array, which says where each lies."""
    return blob(f"objects/{rank}", length, {OURS: {"objects": [list(place) for place in places]}})


def publish(pending: PendingSave, fields: Fields) -> None:
    """Write the group's zarr.json, with the metadata of all arrays in it, and last metadata.json; on rank 0."""
    # Consolidated metadata: other programs open all arrays by this one file.
    members = dict(pending.state.members) if isinstance(pending.state, ZarrSaving) else {}
    common = fields.get("common")
    if isinstance(common, dict) and str(common.get("name")).startswith(f"{FOLDER}/common/"):
        members[f"{FOLDER}/common"] = blob("common", int(common["length"]))[1]
    has_objects = any(name.startswith(f"{FOLDER}/objects/") for name in members)
    groups = [FOLDER, f"{FOLDER}/objects"] if has_objects else [FOLDER]
    for folder in groups:
        write_document(pending.storage, folder, group_document(), durable=pending.options.durable)
        members[folder] = group_document()
    data = canonical_json(group_document({name: members[name] for name in sorted(members)}))
    # Replaced atomically: a torn file would be recognised as a damaged checkpoint, and no save could go there.
    pending.storage.replace(NODE_FILE, data, durable=pending.options.durable)
    if pending.options.durable:
        for folder in (*groups, ""):
            sync_folder(pending.storage, folder)
    all_fields = {**fields, "group": checked_entry(NODE_FILE, data)}
    replace_metadata(pending.storage, pending.before, all_fields, durable=pending.options.durable)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One rank's share of a save.

    Attributes:
        files: chunk files, or its parts of them.
        documents: Folder and content of each array whose metadata it writes.
        objects: unique key and bytes of each of its objects.
    """

    files: tuple[ChunkFile, ...]
    documents: tuple[tuple[str, Document], ...]
    objects: tuple[tuple[str, bytes], ...]


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[RankFiles]:
    """Prepare the chunk files of a rank's shards, and return the request that writes them.

    Raises:
        StrategyError: the ranks didn't exchange what they hold, so that none knows the chunks.
        IntegrityError: shards can't lie in one checkpoint, or leave gaps in a chunk.
        UnsupportedValue: a dtype or an object can't be stored.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    writes, own = _all_writes(pending, tensors)
    objects = [shard for shard in shards if isinstance(shard, ShardedObject)]
    work, saving = _work(pending, writes, own, objects), ZarrSaving(writes)
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(_write, pending, work, tensors),
        index=partial(write_index, pending, saving),
        abandon=partial(_abandon, pending, work),
        state=saving,
    )


def _all_writes(pending: PendingSave, tensors: Sequence[ShardedTensor]) -> tuple[ShardColumns, Column]:
    """Return the shares of all ranks, and for each row the number of this rank's tensor, -1 for other ranks'."""
    if pending.world.size == 1:
        columns = shard_columns(tensors)
        check_stored_shards(columns)
        return columns, np.arange(len(tensors))
    if pending.layout is None:
        fix = "Save with validate_access_integrity=True, so that ranks exchange what they hold."
        raise StrategyError(error_text("save: how tensors are cut into zarr chunks depends on all ranks", fix=fix))
    if isinstance(pending.state, ZarrSaving):  # of another rank that this process plays
        columns = pending.state.columns
    else:
        # The same sharing out as in `save`, computed again: every rank has to know who writes which file.
        columns = select_rows(pending.layout, np.flatnonzero(level_writes(pending.layout, pending.world.size)))
    mine = np.flatnonzero(columns.rank == pending.world.rank)
    if [columns.keys[number] for number in columns.key[mine].tolist()] != [shard.key for shard in tensors]:
        found = f"{len(tensors)} shards to write where {mine.size} are expected"
        raise IntegrityError(error_text("save: the shards aren't those that the ranks agreed on", found=found))
    own = np.full(len(columns), -1, dtype=np.int64)
    own[mine] = np.arange(mine.size)
    return columns, own


def _work(pending: PendingSave, writes: ShardColumns, own: Column, objects: Sequence[ShardedObject]) -> Work:
    files: list[ChunkFile] = []
    documents = []
    rank = pending.world.rank
    for part in array_layouts(writes, rank):
        if part.metadata_writer == rank:
            documents.append((part.array.name, encode_v3(part.array)))
        numbers = own[part.rows]
        if (numbers >= 0).any():
            files += chunk_files(part, rank, numbers)
    object_data = tuple((item.unique_key, b"".join(item_buffers(pending, item))) for item in objects)
    return Work(tuple(files), tuple(documents), object_data)


def _write(pending: PendingSave, work: Work, tensors: Sequence[ShardedTensor]) -> RankFiles:
    storage, options = pending.storage, pending.options
    durable = options.durable
    folders = sorted({name.rpartition("/")[0] for name in _names(work)})
    for folder in folders:
        make_folder(storage, folder, durable=durable)
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
        entry, objects = _write_objects(pending, work)
        files.append(entry)
    if durable:
        for folder in folders:
            sync_folder(storage, folder)
    return RankFiles(tuple(files), objects)


def _write_objects(
    pending: PendingSave, work: Work
) -> tuple[tuple[str, int, NDArray[np.uint64] | None], tuple[tuple[str, int, int], ...]]:
    """Write a rank's objects as one array of bytes, and return its file, and where in it each object lies."""
    places, begin = [], 0
    for unique_key, data in work.objects:
        places.append((unique_key, begin, len(data)))
        begin += len(data)
    name, document = object_blob(pending.world.rank, begin, places)
    options, buffers = pending.options, [memoryview(data) for _, data in work.objects]
    file = write_blob(pending.storage, name, buffers, document, durable=options.durable, progress=options.progress)
    return (name, begin, file.hashes), tuple(places)


def _names(work: Work) -> list[str]:
    names = [file.name for file in work.files]
    return [*names, *(f"{folder}/{NODE_FILE}" for folder, _ in work.documents)]


def _abandon(pending: PendingSave, work: Work) -> None:
    """Remove the files of a failed save, so that a full disk has room for the next one. Never raises."""
    storage = pending.storage
    with abandoning(storage.where()):
        if storage.length(METADATA_FILE) is not None:
            return  # committed: what failed came after, and the files are the checkpoint's
        own = object_blob(pending.world.rank, 0, [])[0]
        blobs = [own, blob("common", 0)[0], blob("index", 0)[0]] if pending.world.rank == 0 else [own]
        names = [*_names(work), *blobs, *(f"{name.rpartition('/')[0]}/{NODE_FILE}" for name in blobs)]
        for name in names:
            storage.remove(name)
        for folder in sorted({name.rpartition("/")[0] for name in names}, reverse=True):
            remove_folder(storage, folder)
        if pending.world.rank == 0:
            for name in (NODE_FILE, f"{FOLDER}/{NODE_FILE}", f"{FOLDER}/objects/{NODE_FILE}"):
                storage.remove(name)
            for folder in (f"{FOLDER}/objects", FOLDER, pending.save_id):
                remove_folder(storage, folder)
