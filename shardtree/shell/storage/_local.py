"""A folder of a local or mounted file system, as a storage."""

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
        root: the folder's path.

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
        """What the file system refused: here, to all calls but saves."""
        return elsewhere

    @property
    def capabilities(self) -> Capabilities:
        """What a file system can do beyond `Storage`."""
        return _capabilities(self, self.refusals)

    def where(self, name: str = "") -> str:
        """Return the path of a name."""
        return _path(self.root, name)

    def write(self, name: str, buffers: Iterable[AnyBuffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        return self._write(name, buffers, name, durable=durable)

    def _write(self, name: str, buffers: Iterable[AnyBuffer], final: str, *, durable: bool) -> int:
        """Write a new file, of which errors speak as of the one that it is meant to be."""
        with self._storage_errors("write", final):
            descriptor = new_file(self.where(name))
            try:
                length = write_new(descriptor, buffers, self.where(final), durable=durable)
            finally:
                os.close(descriptor)
        return length

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, AnyBuffer]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes, of which other processes may write other parts."""
        with self._storage_errors("write", name):
            descriptor = os.open(self.where(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # All writers ask for the same length, so that it doesn't matter who comes first.
                os.ftruncate(descriptor, length)
                groups = adjacent(
                    parts_in_file(parts, length, self.where(name)), most_bytes=BATCH_BYTES, most_buffers=MOST_BUFFERS
                )
                begun = end = 0
                for byte, buffers in groups:
                    begun = begun if byte == end else byte  # what lies between may be another process's
                    end = write_at(descriptor, byte, buffers)
                    if durable:
                        begun = begin_writeback(descriptor, begun, end)
                if durable:
                    sync_file(descriptor, self.where(name))
            finally:
                os.close(descriptor)

    def move(self, old: str, new: str) -> None:
        """Give a file another name, in one step."""
        with self._storage_errors("move", old):
            os.replace(self.where(old), self.where(new))

    def open(self, name: str) -> LocalReader:
        """Open a file for reading."""
        return LocalReader(_path(self.root, name))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step: a temporary file beside it, renamed over it."""
        folder, _, last = inside(name, self.root).rpartition("/")
        # A random name: if two processes replace the file at the same time, each renames what it wrote itself.
        temporary = "/".join(filter(None, (folder, temporary_name(last))))
        try:
            self._write(temporary, [memoryview(data)], name, durable=durable)
            with self._storage_errors("replace", name):
                os.replace(self.where(temporary), self.where(name))
        except BaseException:
            with suppress(StorageError):
                self.remove(temporary)
            raise
        # The rename is an entry of the folder: without this, a power failure could bring the old file back.
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
            except MemoryError:  # a file with holes can claim any length, and costs its author nothing
                what = f"cannot read {self.where(name)!r}"
                raise StorageError(error_text(what, found="more bytes than there is memory for")) from None

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, None if there is no such file."""
        with self._storage_errors("look at", name):
            try:
                status = os.stat(self.where(name))
                # A folder or a pipe isn't a file, whatever its size is.
                return status.st_size if stat.S_ISREG(status.st_mode) else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the names of what is directly inside a folder, sorted."""
        with self._storage_errors("list", folder):
            try:
                return tuple(sorted(os.listdir(self.where(folder))))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder and those above it."""
        with self._storage_errors("make the folder", name):
            path = self.where(name)
            parents = parents_of_missing(path) if durable else []
            try:
                os.makedirs(path, exist_ok=True)
            except FileNotFoundError:  # another save that failed removed a parent folder meanwhile
                os.makedirs(path, exist_ok=True)
            if durable:
                # The checkpoint's own folder may have just been made by a process that didn't sync its parent.
                above = parents if name or parents else [os.path.dirname(os.path.realpath(path))]
                sync_above(above, self.refusals)

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name; a link to a folder that contains it doesn't count."""
        path = self.where(name)
        return os.path.isdir(path) and not (name and os.path.islink(path) and _is_cycle(path, self.root))

    def sync_folder(self, name: str = "") -> None:
        """Wait until what was made or removed in a folder is on the medium."""
        with self._storage_errors("sync", name):
            sync(self.where(name), self.refusals)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it isn't there, or lies behind a link to another folder."""
        with self._storage_errors("remove", name), suppress(FileNotFoundError):
            folders = inside(name, self.root).split("/")[:-1]
            parents = ("/".join(folders[: end + 1]) for end in range(len(folders)))
            # Guard: cleaning up a checkpoint must never remove files that a linked folder keeps elsewhere.
            if not any(map(self.is_link, parents)):
                unlink(self.where(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self.where(name))

    def changed(self, name: str) -> float | None:
        """Return when a file or folder was changed last, in seconds since 1970 by the file system's clock."""
        with self._storage_errors("look at", name):
            try:
                return os.stat(self.where(name)).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None

    def folder(self, name: str) -> LocalStorage:
        """Return a folder in this one."""
        return self._at(os.path.join(self.root, name))

    def _at(self, root: str) -> LocalStorage:
        # Not a subclass, whose constructor may take something else.
        return LocalStorage(root)

    def sibling(self, name: str) -> LocalSibling:
        """Return the folder beside this one that a save of that name takes."""
        return LocalSibling(self.root, name, self._at, self.refusals)

    def siblings(self) -> tuple[str, ...]:
        """Return the names of the saves that have taken a folder beside this one, sorted."""
        above, last = os.path.split(os.path.realpath(self.root))
        start = f".{last}."
        with suppress(OSError):
            return tuple(sorted(name.removeprefix(start) for name in os.listdir(above) if name.startswith(start)))
        return ()

    @contextmanager
    def locked(self, folder: str = "") -> Iterator[None]:
        """Hold the lock of a folder, which one thread or process of this machine has at a time."""
        with self._storage_errors("lock", folder):
            descriptor = lock_folder(self.where(folder))
        try:
            yield
        finally:
            unlock_folder(descriptor)

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link's."""
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
    """A local folder during one save, which keeps apart what the file system refuses to this save.

    Attributes:
        refusals: Refusals that the save goes on without, for its report.
    """

    refusals: Refusals = field(default_factory=Refusals, repr=False, compare=False)

    def _at(self, root: str) -> LocalStorage:
        return SavingStorage(root, self.refusals)


@lru_cache(maxsize=256)  # making them takes a tenth of a small read's time
def _capabilities(storage: LocalStorage, refusals: Refusals) -> Capabilities:
    folders = ("make_folder", "is_folder", "remove_folder", "sync_folder", "is_link", "folder", "sibling", "siblings")
    return Capabilities.of(storage, "move", "write_parts", *folders, "locked", refusals=refusals)


@lru_cache(maxsize=1024)  # finding out takes longer than opening the file
def _path(root: str, name: str) -> str:
    plain = inside(name, root)
    return os.path.join(root, plain) if plain else root


def _is_cycle(path: str, root: str) -> bool:
    """Return whether a link leads to one of its own parent folders: a recursive walk through it would never end."""
    target, folder = os.path.realpath(path), os.path.dirname(path)
    while len(folder) >= len(root):
        if os.path.realpath(folder) == target:
            return True
        folder = os.path.dirname(folder) if folder != os.path.dirname(folder) else ""
    return False
