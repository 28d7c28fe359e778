"""What storages behind a network can do beyond `Storage`: there each request costs many milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ._storage import Buffer, Storage


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a listing.

    Attributes:
        length: in bytes.
        changed: when it was changed last, in seconds by the storage's own clock.
    """

    length: int
    changed: float


@runtime_checkable
class Ranged(Protocol):
    """A storage whose reads are requests, which take long and can be made side by side."""

    def read_range(self, name: str, begin: int, end: int) -> tuple[Buffer, int]:
        """Return bytes `begin` to `end` of a file, as far as it has them, and the file's length; by any thread.

        Raises:
            StorageError: there is no such file, or it can't be read.
        """


def threads_of(storage: Storage, threads: int | None, requests: int = 16) -> int | None:
    """Return how many threads read a storage: those of the caller, else as many as requests may be in flight.

    Args:
        storage: where reads may be requests, which wait nearly all the time.
        threads: what the caller says; None for the usual number.
        requests: how many may be in flight.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> threads_of(MemoryStorage(), None) is None, threads_of(MemoryStorage(), 4)
        (True, 4)
    """
    return requests if threads is None and isinstance(storage, Ranged) else threads


@runtime_checkable
class Listing(Protocol):
    """A storage that lists and removes many files by one request."""

    def content(self, name: str, most: int | None = None) -> bytes | None:
        """Return a file's bytes by one request, None if there is no such file.

        Raises:
            CorruptCheckpoint: it has more than `most` bytes, which aren't fetched.
        """

    def entries(self, folder: str = "", *, deep: bool = True) -> dict[str, Entry]:
        """Return all files in a folder by their names in it, however deep.

        Without `deep`, those directly inside, and folders, whose names end in ``/``.
        """

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files; nothing happens to those that aren't there."""


@runtime_checkable
class Conditional(Protocol):
    """A storage that replaces a file only if it still is as it was."""

    def replace_if(self, name: str, before: bytes | None, data: bytes) -> bool:
        """Give a file new content if it has its old content, None if it isn't there; in one step.

        Returns:
            Whether an answer says that it was done. If False, the file has changed, or no answer came: then it may
            have the new content, or get it yet. The request isn't repeated.

        Raises:
            StorageError: it was refused, and nothing was done.
        """

    def mark(self, name: str, data: bytes) -> bool:
        """Create a file, and return whether the storage honours conditions.

        Some servers pass over them: then a file that is created twice is created twice.
        """


def remove_files(storage: Storage, names: Sequence[str]) -> None:
    """Remove files in any order, by one request where that can be done.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("a", b"", durable=False)
        >>> remove_files(storage, ["a", "b"]), storage.names()
        (None, ())
    """
    if isinstance(storage, Listing):
        storage.remove_all(names)
    else:
        for name in names:
            storage.remove(name)


def read_if_there(storage: Storage, name: str) -> bytes | None:
    """Return a file's bytes, None if there is no such file.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> read_if_there(MemoryStorage(), "metadata.json") is None
        True
    """
    if isinstance(storage, Listing):
        return storage.content(name)
    return None if storage.length(name) is None else storage.read(name)
