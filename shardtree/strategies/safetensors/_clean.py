"""Removing what no checkpoint needs any more: the replaced save's files, and what dead saves left behind."""

from __future__ import annotations

from ...errors import CheckpointingException
from ...storage import Storage
from .._metadata import METADATA_FILE, decode_metadata, metadata_bytes
from .._save_folders import is_left_over, is_save_folder, remove_save


def remove_left_overs(storage: Storage, *, keep: str, before: bytes | None, stale_after: float) -> None:
    """Remove the folder of the save that was replaced, and folders of saves that died; only files that a save writes.

    Args:
        storage: the checkpoint's folder.
        keep: the folder that metadata.json refers to now.
        before: metadata.json as it was before.
        stale_after: seconds without a change, by the storage's clock, after which an unfinished save counts as dead.
    """
    replaced = _save_id(before)
    before_that = (storage.changed(METADATA_FILE) or 0.0) - stale_after
    for name in storage.names():
        if not is_save_folder(name) or name == keep:
            continue
        if name == replaced or is_left_over(storage, name, before=before_that):
            remove_save(storage, name)


def remove_unless_committed(storage: Storage, folder: str) -> None:
    """Remove a save's folder, unless metadata.json refers to it."""
    metadata = metadata_bytes(storage)
    if metadata is None or _save_id(metadata) not in (None, folder):
        remove_save(storage, folder)


def _save_id(metadata: bytes | None) -> str | None:
    try:
        save_id = decode_metadata(metadata, METADATA_FILE).get("save_id") if metadata else None
    except CheckpointingException:
        return None
    return save_id if isinstance(save_id, str) else None
