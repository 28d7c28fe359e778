"""The storage of a folder of a local or mounted file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache

from ...errors import StorageError, error_text
from ._capabilities import Capabilities
from ._local_files import (
    BATCH_BYTES,
    MOST_BUFFERS,
    LocalReader,
    begin_writeback,
    lock_folder,
    new_file,
    parents_of_missing,
    unlink,
    unlock_folder,
    write_at,
    write_new,
)
from ._local_sibling import LocalSibling
from ._refusals import Refusals, elsewhere, sync, sync_above, sync_file
from ._storage import AnyBuffer, adjacent, inside, parts_in_file, temporary_name


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """A folder of a local or mounted file system.

    Args:
        root: Path of the folder.

    Examples:
        >>> import tempfile
        >>> storage = LocalStorage(tempfile.mkdtemp())
        >>> storage.write("a.bin", [memoryview(b"abc")], durable=False)
        3
        >>> storage.read("a.bin")
        b'abc'
    """

    root: str

    @property
    def refusals(self) -> Refusals:
        """The process's record of requests that a file system refused, such as syncing a folder (see `Refusal`).

        A save to a `LocalStorage` has its own record instead, in a `SavingStorage`.
        """
        return elsewhere

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of a local file system."""
        return _capabilities(self, self.refusals)

    def where(self, name: str = "") -> str:
        """Return the path of a file or folder."""
        return _path(self.root, name)

    def write(self, name: str, buffers: Iterable[AnyBuffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        return self._write(name, buffers, name, durable=durable)

    def _write(self, name: str, buffers: Iterable[AnyBuffer], final: str, *, durable: bool) -> int:
        """Write a new file; errors name `final`, not the temporary name."""
        with self._storage_errors("write", final):
            descriptor = new_file(self.where(name))
            try:
                length = write_new(descriptor, buffers, self.where(final), durable=durable)
            finally:
                os.close(descriptor)
        return length

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, AnyBuffer]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes; other processes may write other parts."""
        with self._storage_errors("write", name):
            descriptor = os.open(self.where(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # All writers pass the same length, so that their order doesn't matter.
                os.ftruncate(descriptor, length)
                groups = adjacent(
                    parts_in_file(parts, length, self.where(name)), most_bytes=BATCH_BYTES, most_buffers=MOST_BUFFERS
                )
                begun = end = 0
                for byte, buffers in groups:
                    begun = begun if byte == end else byte  # bytes in between may belong to another process
                    end = write_at(descriptor, byte, buffers)
                    if durable:
                        begun = begin_writeback(descriptor, begun, end)
                if durable:
                    sync_file(descriptor, self.where(name))
            finally:
                os.close(descriptor)

    def move(self, old: str, new: str) -> None:
        """Rename a file atomically."""
        with self._storage_errors("move", old):
            os.replace(self.where(old), self.where(new))

    def open(self, name: str) -> LocalReader:
        """Open a file for reading."""
        return LocalReader(_path(self.root, name))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Replace a file's content atomically: write a temporary file beside it, and rename it to the file's name."""
        folder, _, last = inside(name, self.root).rpartition("/")
        # The name is unique: if two processes replace the file at the same time, each renames its own file.
        temporary = "/".join(filter(None, (folder, temporary_name(last))))
        try:
            self._write(temporary, [memoryview(data)], name, durable=durable)
            with self._storage_errors("replace", name):
                os.replace(self.where(temporary), self.where(name))
        except BaseException:
            with suppress(StorageError):
                self.remove(temporary)
            raise
        # The new name is an entry of the folder: without this sync, a power failure could bring the old file back.
        if durable:
            self.sync_folder(folder)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        with (
            self.open(name) as reader,
            self._storage_errors("read", name),
            open(reader.descriptor, "rb", closefd=False) as file,
        ):
            try:
                return file.read()
            except MemoryError:  # a sparse file can claim any length without taking any space
                heading = f"cannot read {self.where(name)!r}: out of memory"
                raise StorageError(error_text(heading, found="a file larger than the free memory")) from None

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, or None if there is no such file."""
        with self._storage_errors("look at", name):
            try:
                status = os.stat(self.where(name))
                # Folders and pipes have a size too, but aren't files.
                return status.st_size if stat.S_ISREG(status.st_mode) else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the sorted names of a folder's direct entries; empty if there is no such folder."""
        with self._storage_errors("list", folder):
            try:
                return tuple(sorted(os.listdir(self.where(folder))))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder and its parents."""
        with self._storage_errors("make the folder", name):
            path = self.where(name)
            parents = parents_of_missing(path) if durable else []
            try:
                os.makedirs(path, exist_ok=True)
            except FileNotFoundError:  # another save failed meanwhile and removed a parent folder
                os.makedirs(path, exist_ok=True)
            if durable:
                # A process that didn't sync the parent may have just made the checkpoint's own folder.
                above = parents if name or parents else [os.path.dirname(os.path.realpath(path))]
                sync_above(above, self.refusals)

    def is_folder(self, name: str = "") -> bool:
        """Return whether a folder of that name exists; links to one of their own parent folders don't count."""
        path = self.where(name)
        return os.path.isdir(path) and not (name and os.path.islink(path) and _is_cycle(path, self.root))

    def sync_folder(self, name: str = "") -> None:
        """Wait until all entries made or removed in a folder are on the medium."""
        with self._storage_errors("sync", name):
            sync(self.where(name), self.refusals)

    def remove(self, name: str) -> None:
        """Remove a file if it exists and isn't behind a link to another folder."""
        with self._storage_errors("remove", name), suppress(FileNotFoundError):
            folders = inside(name, self.root).split("/")[:-1]
            parents = ("/".join(folders[: end + 1]) for end in range(len(folders)))
            # Cleaning up a checkpoint must never remove files that a linked folder keeps elsewhere.
            if not any(map(self.is_link, parents)):
                unlink(self.where(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self.where(name))

    def changed(self, name: str) -> float | None:
        """Return the time of the last change of a file or folder, in seconds since 1970 by the file system's clock."""
        with self._storage_errors("look at", name):
            try:
                return os.stat(self.where(name)).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None

    def folder(self, name: str) -> LocalStorage:
        """Return the storage of a subfolder."""
        return self._at(os.path.join(self.root, name))

    def _at(self, root: str) -> LocalStorage:
        # A user's subclass isn't kept here, since its constructor may take other arguments.
        return LocalStorage(root)

    def sibling(self, name: str) -> LocalSibling:
        """Return a save's sibling folder, given the save's name; the folder needn't exist yet."""
        return LocalSibling(self.root, name, self._at, self.refusals)

    def siblings(self) -> tuple[str, ...]:
        """Return the sorted names of the saves that have made a sibling folder."""
        above, last = os.path.split(os.path.realpath(self.root))
        start = f".{last}."
        with suppress(OSError):
            return tuple(sorted(name.removeprefix(start) for name in os.listdir(above) if name.startswith(start)))
        return ()

    @contextmanager
    def locked(self, folder: str = "") -> Iterator[None]:
        """Hold the lock of a folder; one thread or process of this machine holds it at a time."""
        with self._storage_errors("lock", folder):
            descriptor = lock_folder(self.where(folder))
        try:
            yield
        finally:
            unlock_folder(descriptor)

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link."""
        return os.path.islink(self.where(name))

    @contextmanager
    def _storage_errors(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                error_text(f"cannot {doing} {self.where(name)!r}", found=error.strerror or error)
            ) from error


@dataclass(frozen=True, slots=True)
class SavingStorage(LocalStorage):
    """A local folder during one save, with the save's own record of refused requests; see `Refusal`.

    Attributes:
        refusals: Record of the refused requests.
    """

    refusals: Refusals = field(default_factory=Refusals, repr=False, compare=False)

    def _at(self, root: str) -> LocalStorage:
        return SavingStorage(root, self.refusals)


@lru_cache(maxsize=256)  # constructing the capabilities takes a tenth of a small read's time
def _capabilities(storage: LocalStorage, refusals: Refusals) -> Capabilities:
    folders = ("make_folder", "is_folder", "remove_folder", "sync_folder", "is_link", "folder", "sibling", "siblings")
    return Capabilities.of(storage, "move", "write_parts", *folders, "locked", refusals=refusals)


@lru_cache(maxsize=1024)  # computing the path takes longer than opening the file
def _path(root: str, name: str) -> str:
    plain = inside(name, root)
    return os.path.join(root, plain) if plain else root


def _is_cycle(path: str, root: str) -> bool:
    """Return whether a link leads to one of its own parent folders, so that a recursive walk would never end."""
    target, folder = os.path.realpath(path), os.path.dirname(path)
    while len(folder) >= len(root):
        if os.path.realpath(folder) == target:
            return True
        folder = os.path.dirname(folder) if folder != os.path.dirname(folder) else ""
    return False
