"""`write_file`, which writes a data file of a third-party format; our own format writes several files at once."""

from __future__ import annotations

from collections.abc import Iterable

from ...storage import AnyBuffer, StoredFile, byte_view, make_folder, sync_folder, write_hashed
from .._values import PendingSave
from ._save import in_save_folder


def write_file(pending: PendingSave, name: str, buffers: Iterable[AnyBuffer]) -> StoredFile:
    """Write a data file under the save's options, and return its description with block hashes.

    Args:
        pending: Checkpoint that is being written.
        name: Name of the file, from `rank_file` or `save_file`.
        buffers: Bytes of the file in order, such as those of `item_buffers`: bytes, bytearrays, memoryviews, arrays, or
            other contiguous objects with the buffer protocol.

    Raises:
        StorageError: the file can't be written, or a value isn't a buffer.
        StrategyError: the clean-up wouldn't remove a file of this name.

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
    # The folder may be missing: a request that was abandoned, and whose folder was removed, may run once more.
    make_folder(storage, pending.save_id, durable=options.durable)
    where = storage.where(name)
    views = (byte_view(buffer, where) for buffer in buffers)
    durable, checksums, progress = options.durable, options.checksums, options.progress
    file = write_hashed(storage, name, views, durable=durable, checksums=checksums, progress=progress)
    if durable:
        sync_folder(storage, pending.save_id)
    return file
