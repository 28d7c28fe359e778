"""Saves with an index: each rank reports the files and offsets of its shards, and rank 0 builds the index."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from ....core.codec import check_storable, encode_tree
from ....core.fingerprints import add_fingerprints, column_parts
from ....core.geometry import Column, as_int64, narrowed
from ....core.layouts import ShardColumns, check_stored_shards, join_columns, shard_columns
from ....core.mapping import ShardedObject, ShardedTensor
from ....errors import CheckpointingException, StorageError, StrategyError, UnsupportedValue, error_text
from ...storage import (
    Buffer,
    Hashes,
    Listed,
    Storage,
    StoredFile,
    can,
    tensor_buffers,
)
from .._checks import check_objects_written, check_seen, checked_data
from .._save_folders import FORMAT_FILE, abandoning, remove_orphaned, remove_unless_committed
from .._values import AsyncRequest, Fields, PendingSave
from ._columns import Index
from ._file import build_index, write_index

logger = logging.getLogger("shardtree")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A tensor shard or an object, and the byte range of a file where it is stored.

    Attributes:
        item: The shard or the object.
        byte: Offset in its file.
        length: Number of bytes.
    """

    item: ShardedTensor | ShardedObject
    byte: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class RankFiles:
    """The data files of one rank and the locations of its shards, sent to rank 0 for the index.

    Attributes:
        files: Names of the data files.
        lengths: Number of bytes of each file.
        hashes: Block hashes of each file; None for a file without checksums.
        columns: Columns of the tensor shards that the rank wrote.
        file: Position of each shard's file in `files`, int64 (shards,).
        byte: Offset of each shard in its file, int64 (shards,).
        objects: (unique key, position in `files`, offset, length in bytes) of each object.
        totals: Each shard's contribution to its tensor's fingerprint, uint64 (shards,); None without fingerprints.
    """

    files: tuple[str, ...]
    lengths: tuple[int, ...]
    hashes: tuple[Hashes | None, ...]
    columns: ShardColumns
    file: Column
    byte: Column
    objects: tuple[tuple[str, int, int, int], ...]
    totals: Hashes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return function and arguments for pickle; narrowed columns let ranks send fewer bytes."""
        places = narrowed(self.file), narrowed(self.byte)
        return _from_narrow, (self.files, self.lengths, self.hashes, self.columns, *places, self.objects, self.totals)


def _from_narrow(
    files: tuple[str, ...],
    lengths: tuple[int, ...],
    hashes: Any,
    columns: ShardColumns,
    file: Any,
    byte: Any,
    *fields: Any,
) -> RankFiles:
    return RankFiles(files, lengths, hashes, columns, as_int64(file), as_int64(byte), *fields)


def save_with_index(pending: PendingSave, write: Callable[[], RankFiles]) -> AsyncRequest[RankFiles]:
    """Return the request of a SAVE_SHARDED row that stores shards as bytes in files, and our own index beside them.

    Rank 0 writes the index after all ranks have written. Formats with another index call `save_in_folder`.

    Args:
        pending: Checkpoint that is being written; all files go into the folder `pending.save_id`, named by `rank_file`.
        write: Function that writes this rank's files, without any collective, and returns their description,
            usually from `rank_files`.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> pending = PendingSave(MemoryStorage(), "save-1", one_process())
        >>> request = save_with_index(pending, lambda: rank_files(pending, []))
        >>> sorted(request.execute_sync())
        ['index', 'save_id']
    """
    seen = _FolderView(pending.storage)
    return _request(pending, write, partial(_index, pending, seen), seen)


def save_in_folder(
    pending: PendingSave, write: Callable[[], T], index: Callable[[Sequence[T]], Fields]
) -> AsyncRequest[T]:
    """Return the request of a SAVE_SHARDED row for a format with its own index, with all files in the save's folder.

    The files of a failed save are removed. A commit also removes the folders of the replaced save and of interrupted
    saves. Only files with names from `rank_file` and `save_file` are removed.

    Args:
        pending: The checkpoint that is being written.
        write: Function that writes this rank's files, without any collective, and returns a value for rank 0.
        index: Function that rank 0 calls with the values of all ranks, by rank. It writes the index, and returns fields
            of metadata.json for loads; "save_id" is added.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> pending = PendingSave(MemoryStorage(), "save-1", one_process())
        >>> save_in_folder(pending, lambda: "a", lambda values: {"cards": values}).execute_sync()
        {'save_id': 'save-1', 'cards': ['a']}
    """
    return _request(
        pending, write, lambda values: {"save_id": pending.save_id, **index(values)}, _FolderView(pending.storage)
    )


def _request(
    pending: PendingSave, write: Callable[[], T], index: Callable[[Sequence[T]], Fields], seen: _FolderView
) -> AsyncRequest[T]:
    return AsyncRequest(
        world=pending.world,
        async_fn=write,
        index=index,
        abandon=partial(_abandon, pending),
        clean_up=partial(_clean_up, pending, seen),
        removes_saves=True,
    )


@dataclass(slots=True, eq=False)
class _FolderView:
    """The storage in which the clean-up looks for files of earlier saves: the save's destination, or a listing of it.

    An object store is listed only once, right before the commit, and the clean-up reads this listing.
    """

    storage: Storage


def rank_file(pending: PendingSave, suffix: str, number: int = 0) -> str:
    """Return the name of a rank's data file in the save's folder.

    Args:
        pending: Checkpoint that is being written.
        suffix: The format's suffix, of lower-case letters and digits.
        number: Number of the file among the rank's files.

    Raises:
        StrategyError: the suffix or the number makes a name that the clean-up wouldn't remove.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> rank_file(PendingSave(MemoryStorage(), "save-1", one_process()), "tar")
        'save-1/00000-of-00001.tar'
    """
    part = f"-{number}" if number else ""
    name = f"{pending.save_id}/{pending.world.rank:05d}-of-{pending.world.size:05d}{part}.{suffix}"
    return in_save_folder(name, pending.save_id)


def save_file(pending: PendingSave, name: str) -> str:
    """Return the name of a format's own file, such as its index, in the save's folder.

    No file is created. If the save fails or is replaced, files with such names are removed.

    Args:
        pending: Checkpoint that is being written.
        name: Name without the prefix ``own-``: lower-case letters, digits and ``._-``, beginning with a letter or
            digit. A file "index.json" counts as the index, which is removed after all others.

    Raises:
        StrategyError: the name has other characters.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> save_file(PendingSave(MemoryStorage(), "save-1", one_process()), "index.json")
        'save-1/own-index.json'
    """
    return in_save_folder(f"{pending.save_id}/own-{name}", pending.save_id)


def in_save_folder(name: str, folder: str) -> str:
    """Return the name of a format's file unchanged, after checking that the clean-up can remove it.

    Args:
        name: The file's name in the checkpoint.
        folder: The save's folder.

    Raises:
        StrategyError: the clean-up of replaced and failed saves wouldn't remove a file of this name.
    """
    above, _, last = name.rpartition("/") if isinstance(name, str) else ("", "", "")
    if above != folder or FORMAT_FILE.fullmatch(last) is None:
        expected = f"{folder}/<rank>-of-<ranks>.<suffix> or {folder}/own-<name>, of lower-case letters and digits"
        fix = (
            "Name data files by `rank_file(pending, suffix, number)`, and others by `save_file(pending, name)`; "
            "files with other names would stay when the save is replaced."
        )
        raise StrategyError(error_text("save: invalid name of a file", found=name, expected=expected, fix=fix))
    return name


def item_buffers(pending: PendingSave, item: ShardedTensor | ShardedObject) -> Iterator[Buffer]:
    r"""Yield the stored bytes of an item: a tensor's elements in row-major order, or an object in the common codec.

    Raises:
        UnsupportedValue: the codec can't hold an object's data, and `allow_pickle` is False.
        ShapeError: a tensor was changed since the save began.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> pending = PendingSave(MemoryStorage(), "save-1", one_process())
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.tensor([1, 2], dtype=torch.uint8))
        >>> list(map(bytes, item_buffers(pending, shard)))
        [b'\x01\x02']
    """
    if isinstance(item, ShardedTensor):
        check_storable(item.dtype, f"save: {item.key!r}")
        yield from tensor_buffers(checked_data(item))
    else:
        yield memoryview(encoded_object(item, allow_pickle=pending.options.allow_pickle))


@contextmanager
def naming_data_of(unique_key: str, place: str = "tree") -> Iterator[None]:
    """Context manager that adds the name of a sharded object to the errors that its block raises.

    Args:
        unique_key: Unique key of the object.
        place: Name of the object's data in these errors.

    Raises:
        CheckpointingException: the block's error, with the object's name.

    Examples:
        >>> with naming_data_of("f/shard_0_1"):
        ...     raise UnsupportedValue("tree cannot be stored")
        Traceback (most recent call last):
        shardtree.errors.UnsupportedValue: save: ShardedObject 'f/shard_0_1', whose data is tree: tree cannot be stored
    """
    try:
        yield
    except UnsupportedValue as error:
        # The name is put into the text, since only the text of an error reaches other ranks.
        raise UnsupportedValue(f"save: ShardedObject {unique_key!r}, whose data is {place}: {error}") from error
    except CheckpointingException as error:
        error.add_note(f"save: ShardedObject {unique_key!r}, whose data is {place}")
        raise


def encoded_object(item: ShardedObject, *, allow_pickle: bool) -> bytes:
    """Return an object's data in the common codec; errors name the object."""
    with naming_data_of(item.unique_key):
        return encode_tree(item.data, allow_pickle=allow_pickle)


def rank_files(pending: PendingSave, files: Sequence[tuple[StoredFile, Sequence[StoredItem]]]) -> RankFiles:
    """Return a rank's files and the locations of its shards, in the form that `save_with_index` expects.

    Args:
        pending: Checkpoint that is being written.
        files: Each data file, and the shards and objects in it.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> pending = PendingSave(MemoryStorage(), "save-1", one_process())
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.tensor([1, 2], dtype=torch.uint8))
        >>> rank_files(pending, [(StoredFile("a.raw", 10), [StoredItem(shard, 8, 2)])]).byte.tolist()
        [8]
    """
    places = [(number, part.item, part.byte, part.length) for number, (_, items) in enumerate(files) for part in items]
    tensors = [(item, number, byte) for number, item, byte, _ in places if isinstance(item, ShardedTensor)]
    return RankFiles(
        files=tuple(file.name for file, _ in files),
        lengths=tuple(file.length for file, _ in files),
        hashes=tuple(file.hashes for file, _ in files),
        columns=shard_columns([item for item, *_ in tensors], pending.world.rank),
        file=np.array([number for _, number, _ in tensors], dtype=np.int64),
        byte=np.array([byte for *_, byte in tensors], dtype=np.int64),
        objects=tuple(
            (item.unique_key, number, byte, length)
            for number, item, byte, length in places
            if isinstance(item, ShardedObject)
        ),
    )


def collect_index(parts: Sequence[RankFiles]) -> Index:
    """Return the index of a checkpoint from the files of its ranks.

    Raises:
        IntegrityError: ranks disagree about a tensor, two ranks wrote the same object, a tensor is named like an
            object, or the shards with fingerprints don't cover whole tensors.
    """
    columns = join_columns([part.columns for part in parts])
    check_stored_shards(columns)
    first_file = np.cumsum([0, *(len(part.files) for part in parts)])
    files = [
        StoredFile(name, length, hashes)
        for part in parts
        for name, length, hashes in zip(part.files, part.lengths, part.hashes, strict=True)
    ]
    objects = sorted(
        (key, file + int(base), byte, length)
        for part, base in zip(parts, first_file, strict=False)
        for key, file, byte, length in part.objects
    )
    check_objects_written([row[0] for row in objects], columns.keys)
    index = build_index(
        columns,
        _join([part.file + base for part, base in zip(parts, first_file, strict=False)]),
        _join([part.byte for part in parts]),
        files=files,
        objects=objects,
    )
    totals = [part.totals for part in parts if part.totals is not None]
    if not totals:
        return index
    fingerprints = add_fingerprints([column_parts(columns, np.concatenate(totals))])
    return replace(index, x_fingerprint=np.array([fingerprints[key] for key in columns.keys], dtype=np.uint64))


def _join(columns: Sequence[Column]) -> Column:
    return np.concatenate([*columns, np.zeros(0, dtype=np.int64)])


def _index(pending: PendingSave, seen: _FolderView, parts: Sequence[RankFiles]) -> Fields:
    for name in chain.from_iterable(part.files for part in parts):
        in_save_folder(name, pending.save_id)
    write = partial(write_index, pending, collect_index(parts))
    if can(pending.storage).entries is None:
        _check_files(pending.storage, parts)
        return write()
    # A single listing, made while the index is written, serves the check of the files and then the removals.
    seen.storage = Listed(pending.storage)
    with ThreadPoolExecutor(1) as thread:
        fields = thread.submit(write)
        _check_files(seen.storage, parts)
        return fields.result()


def _check_files(storage: Storage, parts: Sequence[RankFiles]) -> None:
    for rank, part in enumerate(parts):
        check_seen(storage, zip(part.files, part.lengths, strict=True), f"rank {rank}")


def _abandon(pending: PendingSave) -> None:
    """Remove the files of a failed save, so that a full disk has room for the next save. Never raises."""
    if pending.world.rank != 0:
        return
    with abandoning(pending.storage.where(pending.save_id)):
        remove_unless_committed(pending.storage, pending.save_id)


def _clean_up(pending: PendingSave, seen: _FolderView) -> None:
    if pending.world.rank != 0:
        return
    try:
        storage, options = pending.storage, pending.options
        listing, seen.storage = seen.storage, storage
        remove_orphaned(storage, listing, keep=pending.save_id, before=pending.before, stale_after=options.stale_after)
    except StorageError as error:
        # This isn't an error of this save, whose checkpoint is published; the next save tries again.
        logger.warning("save: orphaned files of earlier saves stay in %s: %s", pending.storage.where(), error)
