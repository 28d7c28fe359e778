"""The files of a checkpoint's folder: how many, how long, and which that it needs aren't there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..inspection import OpenCheckpoint
from ..inspection.needed_files import missing_files
from ..shell.storage import LocalStorage, Storage, file_lengths
from ..stores import MemoryStorage

_MOST, _MOST_REMOTE = 20_000, 500  # files that are counted; each remote one takes a request


@dataclass(frozen=True, slots=True)
class Files:
    """Number of files in a folder.

    Attributes:
        count: Number of counted files.
        length: bytes in them.
        is_all: whether there are no more.
        missing: names of the checkpoint's files that aren't there, or are shorter than what lies in them; None where
            this wasn't looked for.
        is_readable: whether the checkpoint's metadata could be read.
    """

    count: int
    length: int
    is_all: bool
    missing: tuple[str, ...] | None = None
    is_readable: bool = True

    @property
    def is_complete(self) -> bool | None:
        """Whether none is missing; None where this wasn't looked for, or not all were counted.

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
    """Return the number of files in a folder and their total length; counting stops at a limit.

    Examples:
        >>> storage = MemoryStorage()
        >>> storage.write("a/b", [memoryview(b"123")], durable=False)
        3
        >>> files_in(storage)
        Files(count=1, length=3, is_all=True, missing=None, is_readable=True)
    """
    return _counted(_lengths(storage), _most(storage))


def files_of(tree: OpenCheckpoint) -> Files:
    """Return the number and length of the files in a checkpoint's folder, and those that it needs and that are missing.

    Where there are more files than are counted, only those counted are compared with what the checkpoint needs.
    """
    storage = tree.checkpoint.storage
    lengths, most = _lengths(storage), _most(storage)
    counted = _counted(lengths, most)
    # Files that weren't counted aren't asked for one by one either.
    return replace(counted, missing=missing_files(tree, dict(lengths), most if counted.is_all else 0))


def _counted(lengths: Sequence[tuple[str, int]], most: int) -> Files:
    return Files(min(len(lengths), most), sum(length for _, length in lengths[:most]), len(lengths) <= most)


def _lengths(storage: Storage) -> list[tuple[str, int]]:
    """Return names and lengths of files: one more than are counted, to know whether there are more."""
    return list(islice(file_lengths(storage), _most(storage) + 1))


def _most(storage: Storage) -> int:
    return _MOST if isinstance(storage, LocalStorage | MemoryStorage) else _MOST_REMOTE
