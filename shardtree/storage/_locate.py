"""From what a caller calls a directory to the storage that keeps it."""

from __future__ import annotations

import os

from ..errors import StorageError, error_text
from ._fsspec import fsspec_storage
from ._local import LocalStorage
from ._storage import Storage

Directory = str | os.PathLike[str] | Storage
"""A checkpoint's place: a path, a URL of a file system that fsspec knows, or a storage."""


def storage_at(directory: Directory) -> Storage:
    """Return the storage of a directory; a relative path is that of now, wherever the process goes later.

    Raises:
        StorageError: the directory is neither a path, nor a URL, nor a storage.

    Examples:
        >>> storage_at("/checkpoints/step_10")
        LocalStorage(root='/checkpoints/step_10')
    """
    if isinstance(directory, (str, os.PathLike)):
        path = os.fspath(directory)
        if isinstance(path, str) and path and "\0" not in path:
            return fsspec_storage(path) if "://" in path else LocalStorage(_absolute(path))
    elif isinstance(directory, Storage):
        return directory
    kind = type(directory).__name__
    raise StorageError(
        error_text("where is the checkpoint?", found=f"{directory!r} ({kind})", expected="a path, a URL or a Storage")
    )


def is_same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages are one folder, by whatever path or link.

    Examples:
        >>> is_same_place(storage_at("/runs/step_10"), storage_at("/runs/step_9/../step_10/"))
        True
    """
    if isinstance(one, LocalStorage) and isinstance(other, LocalStorage):
        return os.path.realpath(one.root) == os.path.realpath(other.root)
    return one == other


def _absolute(path: str) -> str:
    # Not abspath: it takes "link/.." for nothing, although a link leads elsewhere.
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        found = "the current directory was removed"
        raise StorageError(error_text(f"where is {path!r}?", found=found, fix="Name an absolute path.")) from error
