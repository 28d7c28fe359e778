"""Syncing folders to the medium."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress


def sync(folder: str) -> None:
    """Wait until what was made, renamed or removed in a folder is on the medium."""
    # Syncing a file doesn't sync its name: that is an entry of the folder.
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_above(folders: Iterable[str]) -> None:
    """Sync folders, except those that belong to another user and may not be opened."""
    for folder in folders:
        with suppress(PermissionError):
            sync(folder)


def parents_of_missing(path: str) -> list[str]:
    """Return the parents of those folders on a path that don't exist yet: making the path adds entries to them.

    Examples:
        >>> parents_of_missing("/"), parents_of_missing("/nowhere/at/all")
        ([], ['/nowhere/at', '/nowhere', '/'])
    """
    parents = []
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
        parents.append(path)
    return parents
