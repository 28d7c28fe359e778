"""Folders of a storage as storages of their own, and what some storages can do with a folder as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ._fsspec import FsspecStorage
from ._local import LocalStorage
from ._names import inside
from ._storage import Buffer, Reader, Storage


@runtime_checkable
class Renaming(Protocol):
    """A storage that can rename a folder in one step, and knows links. Errors are those of `Storage`."""

    def move_folder(self, old: str, new: str) -> None:
        """Give a folder another name, which nothing has, in one step."""

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link's."""


def is_link(storage: Storage, name: str) -> bool:
    """Return whether a name is a symbolic link's, where there are such.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> is_link(MemoryStorage(), "a")
        False
    """
    return isinstance(storage, Renaming) and storage.is_link(name)


def folder_in(storage: Storage, name: str) -> Storage:
    """Return a folder of a storage as a storage; it needn't be there yet.

    Examples:
        >>> folder_in(LocalStorage("/runs"), "step_10")
        LocalStorage(root='/runs/step_10')
    """
    if isinstance(storage, LocalStorage):
        return LocalStorage(os.path.join(storage.root, name))
    if isinstance(storage, FsspecStorage):
        return FsspecStorage(storage.files, f"{storage.root}/{name}", f"{storage.url}/{name}")
    return Subfolder(storage, name)


@dataclass(frozen=True, slots=True)
class Subfolder:
    """A folder of any storage: every name gets the folder's before it.

    Args:
        whole: the storage.
        folder: its name there.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> whole = MemoryStorage()
        >>> Subfolder(whole, "step_10").replace("a.txt", b"abc", durable=False)
        >>> whole.read("step_10/a.txt")
        b'abc'
    """

    whole: Storage
    folder: str

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        return self.whole.write(self._full(name), buffers, durable=durable)

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Buffer]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes."""
        self.whole.write_parts(self._full(name), length, parts, durable=durable)

    def move(self, old: str, new: str) -> None:
        """Give a file another name."""
        self.whole.move(self._full(old), self._full(new))

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""
        return self.whole.open(self._full(name))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step."""
        self.whole.replace(self._full(name), data, durable=durable)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return self.whole.read(self._full(name))

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, None if there is no such file."""
        return self.whole.length(self._full(name))

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the names of what is directly inside a folder, sorted."""
        return self.whole.names(self._full(folder))

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder and those above it."""
        self.whole.make_folder(self._full(name), durable=durable)

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name."""
        return self.whole.is_folder(self._full(name))

    def sync_folder(self, name: str = "") -> None:
        """Wait until what was made or removed in a folder is on the medium."""
        self.whole.sync_folder(self._full(name))

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it isn't there."""
        self.whole.remove(self._full(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        self.whole.remove_folder(self._full(name))

    def changed(self, name: str) -> float | None:
        """Return when a name was changed last, by the storage's own clock."""
        return self.whole.changed(self._full(name))

    def where(self, name: str = "") -> str:
        """Return a name as people and error messages should see it."""
        return self.whole.where(self._full(name))

    def _full(self, name: str) -> str:
        plain = inside(name, self.folder)  # the storage itself would let a name climb out of the folder
        return f"{self.folder}/{plain}" if plain else self.folder
