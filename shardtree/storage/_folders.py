"""The storage of a path or URL, and folders within a storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from ..errors import StorageError, error_text
from ._capabilities import Conditional
from ._fsspec import FsspecStorage, fsspec_storage
from ._local import LocalStorage
from ._memory import MemoryStorage
from ._object_store import ObjectStorage
from ._object_uploads import abort_uploads
from ._object_url import SCHEMES, object_storage
from ._secrets import without_secrets
from ._storage import Buffer, Reader, Storage, inside
from ._sync import parents_of_missing

# Folders within a storage.


@runtime_checkable
class Renaming(Protocol):
    """A storage that can rename a folder in one step, and has symbolic links. Errors are those of `Storage`."""

    def move_folder(self, old: str, new: str) -> None:
        """Rename a folder in one step; nothing may have the new name."""

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link."""


def is_link(storage: Storage, name: str) -> bool:
    """Return whether a name is a symbolic link; False on storages without links.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> is_link(MemoryStorage(), "a")
        False
    """
    return isinstance(storage, Renaming) and storage.is_link(name)


def folder_in(storage: Storage, name: str) -> Storage:
    """Return a folder of a storage as a storage; it needn't exist yet.

    Examples:
        >>> folder_in(LocalStorage("/runs"), "step_10")
        LocalStorage(root='/runs/step_10')
    """
    # The same kind rather than a `Subfolder`, so that the folder keeps what that kind can do beyond `Storage`: exchange
    # whole folders, map files, fetch ranges side by side.
    if isinstance(storage, LocalStorage):
        return LocalStorage(os.path.join(storage.root, name))
    if isinstance(storage, FsspecStorage):
        return FsspecStorage(storage.files, f"{storage.root}/{name}", f"{storage.url}/{name}")
    if isinstance(storage, ObjectStorage):
        return storage.folder(name)
    return Subfolder(storage, name)


@dataclass(frozen=True, slots=True)
class Subfolder:
    """A folder of any storage: every name is prefixed by the folder's.

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
        plain = inside(name, self.folder)  # the storage would check its own root only, and let "../" leave this folder
        return f"{self.folder}/{plain}" if plain else self.folder


def takes_late_requests(storage: Storage) -> bool:
    """Return whether a storage may carry out a request after whoever sent it has ended.

    Examples:
        >>> takes_late_requests(LocalStorage("/runs"))
        False
    """
    return isinstance(_unwrapped(storage)[0], Conditional | FsspecStorage)


def takes_files_whole(storage: Storage) -> bool:
    """Return whether a storage takes a file from one writer only, whole and in order: nothing writes into a file there.

    Examples:
        >>> takes_files_whole(LocalStorage("/runs"))
        False
    """
    return isinstance(_unwrapped(storage)[0], Conditional | FsspecStorage)


def _unwrapped(storage: Any) -> tuple[Any, str]:
    """Return the storage that has the files, and the folder's name in it."""
    folder = ""
    while True:
        if isinstance(storage, Subfolder):
            storage, folder = storage.whole, "/".join(filter(None, (storage.folder, folder)))
        elif (inner := getattr(storage, "inner", None)) is not None:  # as listings and records have it
            storage = inner
        else:
            return storage, folder


def abort_open_uploads(storage: Storage, is_left: Callable[[str, float], bool]) -> None:
    """Give up uploads that interrupted saves have left open in a folder; nothing where there are no such.

    Args:
        storage: the folder.
        is_left: whether an upload may be given up, by the file's name and the seconds since it began.

    Examples:
        >>> abort_open_uploads(LocalStorage("/runs"), lambda name, age: True)
    """
    inner, folder = _unwrapped(storage)
    if isinstance(inner, ObjectStorage):
        root = "/".join(filter(None, (inner.root, folder)))
        abort_uploads(inner.url, root, inner.secrets, is_left)


# The storage of a path or URL.

Directory = str | os.PathLike[str] | Storage
"""Where a checkpoint is: a path, a URL of a file system that fsspec supports, or a storage."""


def storage_at(directory: Directory) -> Storage:
    """Return the storage of a directory; a relative path is made absolute now, in case the process changes directory.

    Raises:
        StorageError: the directory is neither a path, nor a URL, nor a storage.

    Examples:
        >>> storage_at("/checkpoints/step_10")
        LocalStorage(root='/checkpoints/step_10')
    """
    if isinstance(directory, (str, os.PathLike)):
        path = os.fspath(directory)
        if isinstance(path, str) and path and "\0" not in path:
            return _behind(path) if "://" in path else LocalStorage(_absolute(path))
    elif isinstance(directory, Storage):
        return directory
    kind = type(directory).__name__
    raise StorageError(
        error_text("where is the checkpoint?", found=f"{directory!r} ({kind})", expected="a path, a URL or a Storage")
    )


def _behind(url: str) -> Storage:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StorageError(error_text(f"not a URL: {without_secrets(url)!r}", found=str(error))) from None
    # A signed URL's query goes with every request, which obstore can't do.
    if parts.scheme in SCHEMES and not parts.query and find_spec("obstore") is not None:
        return object_storage(url)
    return fsspec_storage(url)


def is_same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages are the same folder, links resolved.

    Examples:
        >>> is_same_place(storage_at("/runs/step_10"), storage_at("/runs/step_9/../step_10/"))
        True
    """
    if isinstance(one, LocalStorage) and isinstance(other, LocalStorage):
        return os.path.realpath(one.root) == os.path.realpath(other.root)
    return one == other


def _absolute(path: str) -> str:
    # Not os.path.abspath: it drops "link/..", which is another folder where the link leads elsewhere.
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        found = "the current directory was removed"
        raise StorageError(error_text(f"where is {path!r}?", found=found, fix="Name an absolute path.")) from error


# Making a checkpoint's folder, which is synced later and removed again if the save fails.


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A folder that was made for a save.

    Attributes:
        wait: waits until it is on the medium, if the save is durable; raises StorageError where that fails.
        remove: removes it, unless it existed before or isn't empty. Parents that were made stay: another save may be
            about to make its own folder there.
    """

    wait: Callable[[], None]
    remove: Callable[[], None]


def new_folder(storage: Storage, *, durable: bool) -> NewFolder:
    """Make a storage's own folder; in memory and on object stores it begins to exist with its first file.

    Other storages than local ones wait here, and their folder isn't removed again.

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
    if isinstance(storage, MemoryStorage | FsspecStorage | ObjectStorage):
        return NewFolder(_do_nothing, _do_nothing)
    if not isinstance(storage, LocalStorage):
        storage.make_folder(durable=durable)
        return NewFolder(_do_nothing, _do_nothing)
    parents = parents_of_missing(storage.root)
    storage.make_folder(durable=False)
    # Not synced here: that is waited for while the data is written, and before the commit. Also if the folder exists:
    # it may have just been made by a process that didn't sync its parent.
    waited_for = (parents or [os.path.dirname(os.path.realpath(storage.root))]) if durable else ()
    return NewFolder(partial(_wait_for, waited_for), partial(storage.remove_folder, "") if parents else _do_nothing)


def _do_nothing() -> None:
    pass


def _wait_for(folders: Sequence[str]) -> None:
    for folder in folders:
        try:
            LocalStorage(folder).sync_folder()
        except StorageError as error:
            # Parents can belong to other users: a folder that may not be opened can't be synced.
            if not isinstance(error.__cause__, PermissionError):
                raise
