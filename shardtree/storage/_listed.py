"""A storage seen through one listing: names, lengths and times without a request each, and removals in one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..errors import StorageError
from ._capabilities import Entry, Listing
from ._storage import Buffer, Reader, Storage, inside
from ._threads import in_threads

_READERS = 16


@contextmanager
def listed(storage: Storage, *, deep: bool = True) -> Iterator[Storage]:
    """Yield a storage that answers from one listing, and removes files at the end; itself where it isn't a `Listing`.

    What other programs change meanwhile isn't seen until something is written here, or a file turns out to be gone.

    Args:
        storage: to be looked at.
        deep: whether what is in its folders is listed too; a large checkpoint may have many files there.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> with listed(storage) as seen:
        ...     seen is storage
        True
    """
    if not isinstance(storage, Listing):
        yield storage
        return
    seen = Listed(storage, deep)
    try:
        yield seen
    finally:
        seen.remove_all_now()


def settle(storage: Storage) -> None:
    """Carry out the removals that a listed storage has put off, so that those which follow come after them."""
    if isinstance(storage, Listed):
        storage.remove_all_now()


def prefetch(storage: Storage, names: Iterable[str]) -> None:
    """Let a listed storage read small files side by side, since they will be asked for; others do nothing."""
    if isinstance(storage, Listed):
        storage.prefetch(names)


class Listed:
    """A `Storage` that knows another one's listing."""

    def __init__(self, inner: Any, deep: bool = True) -> None:
        self.inner, self._deep = inner, deep
        self._known: dict[str, Entry] | None = None
        self._removed: list[str] = []
        self._contents: dict[str, tuple[Entry, bytes]] = {}

    def remove_all_now(self) -> None:
        """Remove what was to be removed."""
        removed, self._removed = self._removed, []
        self.inner.remove_all(removed)

    def _entries(self) -> dict[str, Entry]:
        if self._known is None:
            self.remove_all_now()
            self._known = self.inner.entries(deep=self._deep)
        return self._known

    def _beyond(self, plain: str) -> bool:
        """Return whether a name isn't in the listing because it lies in a folder, or is the place itself."""
        if not plain:  # a file, maybe, such as a model's; of those that can be opened all have a dot in their names
            return not self._entries() and "." in self.where().rpartition("/")[2]
        return "/" in plain and not self._deep

    def prefetch(self, names: Iterable[str]) -> None:
        """Read small files side by side, for `read`; those that aren't there are passed over."""
        there = [name for name in names if self.length(name) is not None and name not in self._contents]
        found = in_threads(self.inner.content, there, threads=_READERS)
        for name, data in zip(there, found, strict=True):
            if data is not None:
                self._contents[name] = (self._entries()[name], data)

    def names(self, folder: str = "") -> tuple[str, ...]:
        plain = self._plain(folder)
        if plain and not self._deep:
            return tuple(self.inner.names(plain))
        start = f"{plain}/" if plain else ""
        found = (name[len(start) :].partition("/")[0] for name in self._entries() if name.startswith(start))
        return tuple(sorted({*found} - {""}))

    def is_folder(self, name: str = "") -> bool:
        return bool(self.names(name))

    def length(self, name: str) -> int | None:
        plain = self._plain(name)
        if self._beyond(plain):
            beyond: int | None = self.inner.length(plain)
            return beyond
        entry = self._entries().get(plain)
        return None if entry is None else entry.length

    def changed(self, name: str) -> float | None:
        plain = self._plain(name)
        if not self._deep:
            beyond: float | None = self.inner.changed(plain)
            return beyond
        if plain in self._entries():
            return self._entries()[plain].changed
        start = f"{plain}/" if plain else ""
        return max((one.changed for each, one in self._entries().items() if each.startswith(start)), default=None)

    def remove(self, name: str) -> None:
        plain = self._plain(name)
        self._contents.pop(plain, None)
        if self._entries().pop(plain, None) is not None or self._beyond(plain):
            self._removed.append(plain)

    def remove_folder(self, name: str) -> None:
        """Do nothing: a folder goes with its last file."""

    def read(self, name: str) -> bytes:
        entry, data = self._contents.get(name, (None, b""))
        if entry is not None and entry == self._entries().get(name):
            return data
        try:
            return bytes(self.inner.read(name))
        except StorageError:
            self._known = None  # it may have been removed since
            raise

    def open(self, name: str) -> AbstractContextManager[Reader]:
        opened: AbstractContextManager[Reader] = self.inner.open(name)
        return opened

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        self._known = None
        return int(self.inner.write(name, buffers, durable=durable))

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Buffer]], *, durable: bool) -> None:
        self._known = None
        self.inner.write_parts(name, length, parts, durable=durable)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        # At once: the order of changes is what makes a removal all or nothing.
        self.remove_all_now()
        self._known = None
        self.inner.replace(name, data, durable=durable)

    def move(self, old: str, new: str) -> None:
        self.remove_all_now()
        self._known = None
        self.inner.move(old, new)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        self.inner.make_folder(name, durable=durable)

    def sync_folder(self, name: str = "") -> None:
        self.inner.sync_folder(name)

    def where(self, name: str = "") -> str:
        return str(self.inner.where(name))

    def _plain(self, name: str) -> str:
        return inside(name, self.where())
