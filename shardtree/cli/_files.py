"""The files of a checkpoint's folder: their number, their total length, and the missing ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..inspection import OpenCheckpoint
from ..inspection.needed_files import missing_files
from ..shell.storage import LocalStorage, Storage, file_lengths
from ..stores import MemoryStorage

_MOST, _MOST_REMOTE = 20_000, 500
"""Upper bounds of the files that are counted; each remote file takes a request."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a folder: their number, their total length, and the missing ones.

    Attributes:
        count: Number of counted files; counting stops at a limit.
        length: Total length of the counted files in bytes.
        is_all: True if the folder has no files beyond the counted ones.
        missing: Names of the checkpoint's files that are missing or too short; None if this wasn't checked.
        is_readable: True if the checkpoint's metadata could be read.
    """

    count: int
    length: int
    is_all: bool
    missing: tuple[str, ...] | None = None
    is_readable: bool = True

    @property
    def is_complete(self) -> bool | None:
        """False if a file is missing or the metadata can't be read; None if not all files were checked; else True.

        Examples:
            >>> Files(1, 9, True, ()).is_complete, Files(1, 9, True, ("b",)).is_complete
            (True, False)
            >>> Files(1, 9, True).is_complete, Files(1, 9, False, ()).is_complete
            (None, None)
        """
        if self.missing or not self.is_readable:
            return False
        return None if self.missing is None or not self.is_all else True


def files_in(storage: Storage) -> Files:
    """Return the number and the total length of the files in a folder; counting stops at a limit.

    Examples:
        >>> storage = MemoryStorage()
        >>> storage.write("a/b", [memoryview(b"123")], durable=False)
        3
        >>> files_in(storage)
        Files(count=1, length=3, is_all=True, missing=None, is_readable=True)
    """
    return _counted(_lengths(storage), _most(storage))


def files_of(tree: OpenCheckpoint) -> Files:
    """Return the number and length of the files in a checkpoint's folder, and the names of missing or short files.

    Counting stops at a limit. If the folder has more files, missing files aren't reported, only counted files that are
    too short.
    """
    storage = tree.checkpoint.storage
    lengths, most = _lengths(storage), _most(storage)
    counted = _counted(lengths, most)
    # Files that weren't counted aren't looked up one by one either.
    return replace(counted, missing=missing_files(tree, dict(lengths), most if counted.is_all else 0))


def _counted(lengths: Sequence[tuple[str, int]], most: int) -> Files:
    return Files(min(len(lengths), most), sum(length for _, length in lengths[:most]), len(lengths) <= most)


def _lengths(storage: Storage) -> list[tuple[str, int]]:
    """Return (name, length) pairs for the files in a folder, at most ``_most(storage) + 1`` of them."""
    return list(islice(file_lengths(storage), _most(storage) + 1))


def _most(storage: Storage) -> int:
    return _MOST if isinstance(storage, LocalStorage | MemoryStorage) else _MOST_REMOTE
