"""Removing what no checkpoint needs any more: the replaced save's files, and what dead saves left behind."""

from __future__ import annotations

import re

from ...errors import CheckpointingException
from ...storage import Storage
from .._metadata import METADATA_FILE, decode_metadata

_SAVE_FOLDER = re.compile(r"save-\d{8}T\d{6}-[0-9a-f]{16}")
_OUR_FILE = re.compile(r"(\d{5,}-of-\d{5,}(-\d+)?|common|index-\d+)\.safetensors")


def is_save_folder(name: str) -> bool:
    """Return whether a folder's name is one that a save gives.

    Examples:
        >>> is_save_folder("save-20260102T030405-0123456789abcdef"), is_save_folder("save-mine")
        (True, False)
    """
    return _SAVE_FOLDER.fullmatch(name) is not None


def is_save_file(name: str) -> bool:
    """Return whether a file's name inside a checkpoint is one that a save gives.

    Examples:
        >>> folder = "save-20260102T030405-0123456789abcdef"
        >>> is_save_file(f"{folder}/index-0.safetensors"), is_save_file("notes.txt")
        (True, False)
    """
    folder, _, last = name.rpartition("/")
    return is_save_folder(folder) and _OUR_FILE.fullmatch(last) is not None


def remove_left_overs(storage: Storage, *, keep: str, before: bytes | None, stale_after: float) -> None:
    """Remove the folder of the save that was replaced, and folders of saves that died; only files that a save writes.

    Args:
        storage: the checkpoint's folder.
        keep: the folder that metadata.json refers to now.
        before: metadata.json as it was before.
        stale_after: seconds without a change, by the storage's clock, after which an unfinished save counts as dead.
    """
    replaced = _save_id(before)
    now = storage.changed(METADATA_FILE) or 0.0
    for name in storage.names():
        if not is_save_folder(name) or name == keep:
            continue
        if name == replaced or now - newest_change(storage, name) > stale_after:
            remove_save(storage, name)


def remove_save(storage: Storage, folder: str) -> None:
    """Remove a save's folder, unless somebody else's files are in it."""
    for name in storage.names(folder):
        if _OUR_FILE.fullmatch(name):
            storage.remove(f"{folder}/{name}")
    storage.remove_folder(folder)


def remove_unless_committed(storage: Storage, folder: str) -> None:
    """Remove a save's folder, unless metadata.json refers to it."""
    metadata = storage.read(METADATA_FILE) if storage.length(METADATA_FILE) is not None else None
    if metadata is None or _save_id(metadata) not in (None, folder):
        remove_save(storage, folder)


def newest_change(storage: Storage, folder: str) -> float:
    """Return when a folder or a file in it was changed last, in seconds by the storage's clock."""
    inside = (f"{folder}/{name}" for name in storage.names(folder))
    return max(storage.changed(name) or 0.0 for name in (folder, *inside))


def _save_id(metadata: bytes | None) -> str | None:
    try:
        save_id = decode_metadata(metadata, METADATA_FILE).get("save_id") if metadata else None
    except CheckpointingException:
        return None
    return save_id if isinstance(save_id, str) else None
