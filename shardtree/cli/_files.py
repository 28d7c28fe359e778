"""What a folder takes up: how many files, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ..storage import LocalStorage, MemoryStorage, Storage

_MOST, _MOST_REMOTE = 20_000, 500  # files that are looked at; a remote one takes a request


@dataclass(frozen=True, slots=True)
class Files:
    """What is in a folder.

    Attributes:
        count: how many files were looked at.
        length: bytes in them.
        is_all: whether there are no more.
    """

    count: int
    length: int
    is_all: bool


def files_in(storage: Storage) -> Files:
    """Return how many files a folder holds, and how long they are together; of very many, only so many are looked at.

    Examples:
        >>> storage = MemoryStorage()
        >>> storage.write("a/b", [memoryview(b"123")], durable=False)
        3
        >>> files_in(storage)
        Files(count=1, length=3, is_all=True)
    """
    most = _MOST if isinstance(storage, LocalStorage | MemoryStorage) else _MOST_REMOTE
    found = list(islice(_lengths(storage, ""), most + 1))
    return Files(min(len(found), most), sum(found[:most]), len(found) <= most)


def _lengths(storage: Storage, name: str) -> Iterator[int]:
    length = storage.length(name)
    if length is not None:
        yield length
        return
    for inner in storage.names(name):
        yield from _lengths(storage, f"{name}/{inner}" if name else inner)
