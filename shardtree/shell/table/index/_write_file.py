"""`write_file`, by which a format of others writes a data file; our own writes several at a time."""

from __future__ import annotations

from collections.abc import Iterable

from ...storage import AnyBuffer, StoredFile, byte_view, make_folder, sync_folder, write_hashed
from .._values import PendingSave
from ._save import in_save_folder


def write_file(pending: PendingSave, name: str, buffers: Iterable[AnyBuffer]) -> StoredFile:
    """Write a data file with the hashes of its blocks, as the save's options say.

    Args:
        pending: the save.
        name: the file's, as `rank_file` or `save_file` makes it.
        buffers: its bytes in order: bytes, bytearrays, memoryviews, arrays, or what else memoryview takes, contiguous;
            `item_buffers` yields those of an item.

    Raises:
        StorageError: it can't be written, or one of them is no buffer.
        StrategyError: the clean-up knows no such name.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> from shardtree.world import one_process
        >>> pending = PendingSave(MemoryStorage(), "save-1", one_process())
        >>> from shardtree.kit import rank_file
        >>> write_file(pending, rank_file(pending, "raw"), [b"abc", bytes(16)]).length
        19
    """
    options, storage = pending.options, pending.storage
    in_save_folder(name, pending.save_id)
    # Made again: an abandoned request, whose folder was removed, may be run once more.
    make_folder(storage, pending.save_id, durable=options.durable)
    where = storage.where(name)
    views = (byte_view(buffer, where) for buffer in buffers)
    durable, checksums, progress = options.durable, options.checksums, options.progress
    file = write_hashed(storage, name, views, durable=durable, checksums=checksums, progress=progress)
    if durable:
        sync_folder(storage, pending.save_id)
    return file
