"""A storage that notes which files are written through it, so that they can be checked or removed later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ...storage import Buffer, Reader, Storage


def _nothing(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class NotedStorage:
    """A storage that does what another one does, and notes what is written.

    Attributes:
        inner: where the files are.
        announce: is told a file's name before it is written for the first time.
        lengths: name → length in bytes of each file that was written.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = NotedStorage(MemoryStorage())
        >>> storage.write("a.bin", [memoryview(b"abc")], durable=True), storage.lengths
        (3, {'a.bin': 3})
    """

    inner: Storage
    announce: Callable[[str], None] = _nothing
    lengths: dict[str, int] = field(default_factory=dict)

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a new file and note its length."""
        self._announce(name)
        self.lengths[name] = self.inner.write(name, buffers, durable=durable)
        return self.lengths[name]

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Buffer]], *, durable: bool) -> None:
        """Write parts of a file and note its length."""
        self._announce(name)
        self.inner.write_parts(name, length, parts, durable=durable)
        self.lengths[name] = length

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content and note its length."""
        self._announce(name)
        self.inner.replace(name, data, durable=durable)
        self.lengths[name] = len(data)

    def move(self, old: str, new: str) -> None:
        """Give a file another name, and note that."""
        self._announce(new)
        self.inner.move(old, new)
        self.lengths.pop(old, None)
        found = self.inner.length(new)
        if found is not None:
            self.lengths[new] = found

    def remove(self, name: str) -> None:
        """Remove a file, and note that."""
        self.inner.remove(name)
        self.lengths.pop(name, None)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""
        return self.inner.open(name)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return self.inner.read(name)

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes."""
        return self.inner.length(name)

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return what is directly inside a folder."""
        return self.inner.names(folder)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder."""
        self.inner.make_folder(name, durable=durable)

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name."""
        return self.inner.is_folder(name)

    def sync_folder(self, name: str = "") -> None:
        """Wait until a folder is on the medium."""
        self.inner.sync_folder(name)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        self.inner.remove_folder(name)

    def changed(self, name: str) -> float | None:
        """Return when a file or folder was changed last."""
        return self.inner.changed(name)

    def where(self, name: str = "") -> str:
        """Return a name as people should see it."""
        return self.inner.where(name)

    def _announce(self, name: str) -> None:
        if name not in self.lengths:
            self.announce(name)
