"""The folder that is one save's alone: how it and the files in it are named, and how it is removed."""

from __future__ import annotations

import re

from ..storage import Storage

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


def remove_save(storage: Storage, folder: str) -> None:
    """Remove a save's folder, unless somebody else's files are in it."""
    for name in storage.names(folder):
        if _OUR_FILE.fullmatch(name):
            storage.remove(f"{folder}/{name}")
    storage.remove_folder(folder)


def newest_change(storage: Storage, folder: str) -> float:
    """Return when a folder or a file in it was changed last, in seconds by the storage's clock."""
    inside = (f"{folder}/{name}" for name in storage.names(folder))
    return max(storage.changed(name) or 0.0 for name in (folder, *inside))
