"""Saves as zarr v3 arrays: each rank writes its chunk files, then rank 0 writes the index and the group."""

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

# Rank 0 writes the index of all chunk files, then the group, then metadata.json.


@dataclass(slots=True, eq=False)
class ZarrSaving:
    """State of a save, kept for the strategy's later functions.

    Attributes:
        columns: Shards that all ranks write.
        members: Metadata (zarr.json) of each array, by folder; empty until rank 0 has written the index.
    """

    columns: ShardColumns
    members: Mapping[str, Document] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """The files that a rank wrote in a save, for the index.

    Attributes:
        files: Name, length in bytes and block hashes of each file; the hashes are None if several ranks wrote the file.
            If the rank has objects, their file comes last.
        objects: Unique key of each object, its offset in the file of objects, and its length in bytes.
    """

    files: tuple[tuple[str, int, NDArray[np.uint64] | None], ...]
    objects: tuple[tuple[str, int, int], ...]


def write_index(pending: PendingSave, saving: ZarrSaving, rank_files: Sequence[RankFiles]) -> Fields:
    """Write the index on rank 0. Return the fields of metadata.json that name the save and the index file.

    Args:
        pending: Save in progress.
        saving: State of the save, with the shards of all ranks; this function sets its `members`.
        rank_files: Files that each rank wrote, by rank.

    Raises:
        StorageError: Rank 0 doesn't see a file, or sees it with another length.
        IntegrityError: Two ranks wrote the same object, or a tensor has the name of an object.
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
    chunks = prod(inner_counts(array))
    numbers = np.arange(chunks, dtype=np.int64)
    places = np.concatenate([inner_cells(array, cell, numbers) for cell in cells])
    begin = np.tile(numbers * (prod(array.inner) * array.dtype.itemsize), len(cells))
    return chunk_rows(array, places, array.inner, np.repeat(file, chunks), begin)


def _members(parts: Sequence[ArrayLayout], rank_files: Sequence[RankFiles]) -> dict[str, Document]:
    members = {part.array.name: encode_v3(part.array) for part in parts}
    for rank, part in enumerate(rank_files):
        if part.objects:
            members[f"{FOLDER}/objects/{rank}"] = object_blob(rank, part.files[-1][1], part.objects)[1]
    return members


def object_blob(rank: int, length: int, places: Sequence[tuple[str, int, int]]) -> tuple[str, Document]:
    """Return the file name and the zarr.json of the array of bytes that holds a rank's objects.

    Args:
        rank: Rank that writes the objects.
        length: Length of the array.
        places: Unique key, offset and length of each object in the array; stored in the attributes of zarr.json.
    """
    return blob(f"objects/{rank}", length, {OURS: {"objects": [list(place) for place in places]}})


def publish(pending: PendingSave, fields: Fields) -> None:
    """Commit the save on rank 0: write the zarr.json of all groups, then metadata.json.

    The outermost group's zarr.json also holds the metadata of all arrays and groups.
    """
    # The metadata is consolidated, so that other programs open all arrays by this file.
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
    # The file is replaced atomically: a torn one would be taken for a damaged checkpoint, where no save could go.
    pending.storage.replace(NODE_FILE, data, durable=pending.options.durable)
    if pending.options.durable:
        for folder in (*groups, ""):
            sync_folder(pending.storage, folder)
    all_fields = {**fields, "group": checked_entry(NODE_FILE, data)}
    replace_metadata(pending.storage, pending.before, all_fields, durable=pending.options.durable)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A rank's share of a save.

    Attributes:
        files: Chunk files, or the rank's parts of them.
        documents: Folder and zarr.json of each array whose metadata the rank writes.
        objects: Unique key and bytes of each of the rank's objects.
    """

    files: tuple[ChunkFile, ...]
    documents: tuple[tuple[str, Document], ...]
    objects: tuple[tuple[str, bytes], ...]


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[RankFiles]:
    """Prepare the chunk files of a rank's shards, and return the request that writes them.

    Raises:
        StrategyError: The ranks didn't exchange their layouts, so that no rank can know the chunks.
        IntegrityError: Shards contradict each other, or leave gaps in a chunk.
        UnsupportedValue: A dtype or an object can't be stored.
    """
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    writes, own_numbers = _all_writes(pending, tensors)
    objects = [shard for shard in shards if isinstance(shard, ShardedObject)]
    work, saving = _work(pending, writes, own_numbers, objects), ZarrSaving(writes)
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(_write, pending, work, tensors),
        index=partial(write_index, pending, saving),
        abandon=partial(_abandon, pending, work),
        state=saving,
    )


def _all_writes(pending: PendingSave, tensors: Sequence[ShardedTensor]) -> tuple[ShardColumns, Column]:
    """Return the shards that all ranks write, and the index of each in this rank's `tensors`; -1 for other ranks'."""
    if pending.world.size == 1:
        columns = shard_columns(tensors)
        check_stored_shards(columns)
        return columns, np.arange(len(tensors))
    if pending.layout is None:
        fix = "Save with validate_access_integrity=True, so that ranks exchange their layouts."
        raise StrategyError(error_text("save: zarr chunks need all ranks' layouts, which are not exchanged", fix=fix))
    if isinstance(pending.state, ZarrSaving):  # This process also plays another rank, which has computed them.
        columns = pending.state.columns
    else:
        # The work is shared as in `save`, and computed again, since every rank must know the writer of each file.
        columns = select_rows(pending.layout, np.flatnonzero(level_writes(pending.layout, pending.world.size)))
    mine = np.flatnonzero(columns.rank == pending.world.rank)
    keys, agreed = [shard.key for shard in tensors], [columns.keys[number] for number in columns.key[mine].tolist()]
    if keys != agreed:
        heading = "save: the shards to write differ in number, keys or order from those that the ranks agreed on"
        fix = "Pass all shards that `save` passes to the format, in the same order."
        pairs = enumerate(zip(keys, agreed, strict=False))
        same = next((at for at, (key, other) in pairs if key != other), min(len(keys), len(agreed)))
        found, expected = (f"{len(each)} shards, from index {same} on: {each[same:][:3]}" for each in (keys, agreed))
        raise IntegrityError(error_text(heading, found=found, expected=expected, fix=fix))
    own_numbers = np.full(len(columns), -1, dtype=np.int64)
    own_numbers[mine] = np.arange(mine.size)
    return columns, own_numbers


def _work(pending: PendingSave, writes: ShardColumns, own_numbers: Column, objects: Sequence[ShardedObject]) -> Work:
    files: list[ChunkFile] = []
    documents = []
    rank = pending.world.rank
    for part in array_layouts(writes, rank):
        if part.metadata_writer == rank:
            documents.append((part.array.name, encode_v3(part.array)))
        numbers = own_numbers[part.rows]
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
    """Write a rank's objects as one array of bytes, and return the entries of `RankFiles` that describe it.

    Returns:
        ``(file, objects)``: the array's chunk file as ``(name, length, block_hashes)``, and each object as
        ``(unique_key, offset, length)``, with its offset and length in this file.
    """
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
    """Remove this rank's files of a failed save, so that a full disk has room for the next save. Never raises."""
    storage = pending.storage
    with abandoning(storage.where()):
        if storage.length(METADATA_FILE) is not None:
            return  # The failure came after the commit, and the files belong to the checkpoint.
        objects = object_blob(pending.world.rank, 0, [])[0]
        blobs = [objects, blob("common", 0)[0], blob("index", 0)[0]] if pending.world.rank == 0 else [objects]
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
