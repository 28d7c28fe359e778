"""From what a caller calls a directory to the storage that keeps it, and folders within one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from ..errors import StorageError, error_text
from ._fsspec import FsspecStorage, fsspec_storage
from ._local import LocalStorage
from ._memory import MemoryStorage
from ._storage import Buffer, Reader, Storage, inside
from ._sync import parents_to_be

# Folders of a storage as storages of their own, and what some storages can do with a folder as a whole.


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


# From what a caller calls a directory to the storage that keeps it.

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


# A folder that is made at once, waited for beside other work, and removed again where nothing came of it.


@dataclass(frozen=True, slots=True)
class NewFolder:
    """What can be done about a folder that was made.

    Attributes:
        wait: waits until it is on the medium, if it shall be; raises StorageError where that fails.
        remove: removes it, unless it was there before or something is in it by now. What was made above it
            stays: another save may be about to make its own folder there.
    """

    wait: Callable[[], None]
    remove: Callable[[], None]


def new_folder(storage: Storage, *, durable: bool) -> NewFolder:
    """Make a storage's own folder; in memory and on object stores the first file in it does that.

    A storage of another kind than a local one waits here, and its folder stays.

    Raises:
        StorageError: it can't be made.

    Examples:
        >>> import tempfile
        >>> storage = LocalStorage(f"{tempfile.mkdtemp()}/runs/step_10")
        >>> made = new_folder(storage, durable=True)
        >>> storage.is_folder(), made.wait()
        (True, None)
        >>> made.remove()
        >>> storage.is_folder()
        False
    """
    if isinstance(storage, MemoryStorage | FsspecStorage):
        return NewFolder(_nothing, _nothing)
    if not isinstance(storage, LocalStorage):
        storage.make_folder(durable=durable)
        return NewFolder(_nothing, _nothing)
    parents = parents_to_be(storage.root)
    storage.make_folder(durable=False)
    # The folder itself may be of a moment ago, and made by somebody who didn't wait.
    waited_for = (parents or [os.path.dirname(os.path.realpath(storage.root))]) if durable else ()
    return NewFolder(partial(_wait_for, waited_for), partial(storage.remove_folder, "") if parents else _nothing)


def _nothing() -> None:
    pass


def _wait_for(folders: Sequence[str]) -> None:
    for folder in folders:
        try:
            LocalStorage(folder).sync_folder()
        except StorageError as error:
            # Other people's: one that can't be listed can't be waited for.
            if not isinstance(error.__cause__, PermissionError):
                raise
