"""The files of a storage as plain bytes: listed, damaged, cut short, and left by a save that dies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from ...storage import Storage
from ...strategies import OWNER_FILE
from .._watched import Call, WatchedStorage


class Died(Exception):
    """What a storage raises from the call on at which its process is dead."""


def file_names(storage: Storage, folder: str = "") -> set[str]:
    """Return the names of all files in a storage, in folders too.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> _ = storage.write("a/b", [memoryview(b"c")], durable=False)
        >>> file_names(storage)
        {'a/b'}
    """
    found: set[str] = set()
    for last in storage.names(folder):
        name = f"{folder}/{last}" if folder else last
        found |= file_names(storage, name) if storage.is_folder(name) else {name}
    return found


def is_no_note(name: str) -> bool:
    """Return whether a file is more than a save's note of who makes it."""
    return PurePosixPath(name).name != OWNER_FILE


def write(storage: Storage, name: str, data: bytes) -> None:
    """Put bytes in the place of a file."""
    folder = PurePosixPath(name).parent.as_posix()
    if storage.length(name) is not None:
        storage.remove(name)
    elif folder != ".":
        storage.make_folder(folder, durable=False)
    storage.write(name, [memoryview(data)], durable=False)


def dying(storage: Storage, number: int) -> WatchedStorage:
    """Return a storage whose calls fail, from one on: for a save that dies there and cleans up nothing."""

    def strike(call: Call) -> None:
        if call.number >= number:
            raise Died(f"at {call.method} of {call.name!r}")

    return WatchedStorage(storage, before=strike)


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing of what a save that dies on purpose leaves behind."""
    logger = logging.getLogger("shardtree")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def calls_of(storage: Storage) -> tuple[WatchedStorage, list[Call]]:
    """Return a storage that notes its calls, and the list of them."""
    calls: list[Call] = []
    return WatchedStorage(storage, before=calls.append), calls
