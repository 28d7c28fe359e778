"""Waiting until folders are on the medium."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress


def sync(folder: str) -> None:
    """Wait until what was made, renamed or removed in a folder is on the medium."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_above(folders: Iterable[str]) -> None:
    """Wait for folders that may be other people's: one that can't be listed can't be waited for."""
    for folder in folders:
        with suppress(PermissionError):
            sync(folder)


def parents_to_be(path: str) -> list[str]:
    """Return the parents of those folders on a path that aren't there yet.

    Examples:
        >>> parents_to_be("/"), parents_to_be("/nowhere/at/all")
        ([], ['/nowhere/at', '/nowhere', '/'])
    """
    parents = []
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
        parents.append(path)
    return parents
