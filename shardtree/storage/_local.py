"""Files of a local or mounted file system."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from ..errors import StorageError, error_text
from ._names import inside
from ._parts import checked, neighbours
from ._reserve import reserve
from ._storage import Buffer

_BATCH_BYTES = 1024 * 1024
_BATCH_BUFFERS = 1024  # IOV_MAX on Linux and macOS


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

    def where(self, name: str = "") -> str:
        """Return the path of a name."""
        plain = inside(name, self.root)
        return os.path.join(self.root, plain) if plain else self.root

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        with self._failures("write", name):
            descriptor = os.open(self.where(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                length = _write_batches(descriptor, _batches(buffers))
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return length

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Buffer]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes, of which other processes may write other parts."""
        with self._failures("write", name):
            descriptor = os.open(self.where(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                # All writers ask for the same length, so that it doesn't matter who comes first.
                os.ftruncate(descriptor, length)
                groups = neighbours(
                    checked(parts, length, self.where(name)), most_bytes=_BATCH_BYTES, most_buffers=_BATCH_BUFFERS
                )
                for byte, buffers in groups:
                    _write_at(descriptor, byte, buffers)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def move(self, old: str, new: str) -> None:
        """Give a file another name, in one step."""
        with self._failures("move", old):
            os.replace(self.where(old), self.where(new))

    @contextmanager
    def open(self, name: str) -> Iterator[_LocalReader]:
        """Open a file for reading."""
        with self._failures("open", name):
            # A pipe would be waited for, and a device read without end.
            descriptor = os.open(self.where(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StorageError(error_text(f"cannot open {self.where(name)!r}", found="no regular file"))
            yield _LocalReader(descriptor, self.where(name))
        finally:
            os.close(descriptor)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step: a temporary file beside it, renamed over it."""
        folder, _, last = inside(name, self.root).rpartition("/")
        temporary = f"{folder}/.{last}.new" if folder else f".{last}.new"
        self.write(temporary, [memoryview(data)], durable=durable)
        with self._failures("replace", name):
            os.replace(self.where(temporary), self.where(name))
        if durable:
            self.sync_folder(folder)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        opened = self.open(name)
        with opened as reader, self._failures("read", name), open(reader.descriptor, "rb", closefd=False) as file:
            return file.read()

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, None if there is no such file."""
        with self._failures("look at", name):
            try:
                found = os.stat(self.where(name))
                # A folder or a pipe isn't a file, whatever its size is.
                return found.st_size if stat.S_ISREG(found.st_mode) else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the names of what is directly inside a folder, sorted."""
        with self._failures("list", folder):
            try:
                return tuple(sorted(os.listdir(self.where(folder))))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder and those above it."""
        with self._failures("make the folder", name):
            path = self.where(name)
            parents = _parents_to_be(path) if durable else []
            os.makedirs(path, exist_ok=True)
            for parent in parents:
                with suppress(PermissionError):  # a parent that can't be listed can't be waited for
                    _sync(parent)

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name, other than a link back to one that it lies in."""
        path = self.where(name)
        return os.path.isdir(path) and not (name and os.path.islink(path) and _leads_back(path, self.root))

    def sync_folder(self, name: str = "") -> None:
        """Wait until what was made or removed in a folder is on the medium."""
        with self._failures("sync", name):
            _sync(self.where(name))

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it isn't there."""
        with self._failures("remove", name), suppress(FileNotFoundError):
            os.remove(self.where(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self.where(name))

    def changed(self, name: str) -> float | None:
        """Return when a file or folder was changed last, in seconds since 1970 by the file system's clock."""
        try:
            return os.stat(self.where(name)).st_mtime
        except OSError:
            return None

    @contextmanager
    def _failures(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                error_text(f"cannot {doing} {self.where(name)!r}", found=error.strerror or error)
            ) from error


@dataclass(frozen=True)
class _LocalReader:
    descriptor: int
    path: str

    @property
    def length(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        while pending:
            try:
                count = os.preadv(self.descriptor, pending[:_BATCH_BUFFERS], byte)
            except OSError as error:
                raise StorageError(
                    error_text(f"cannot read {self.path!r} at byte {byte}", found=error.strerror)
                ) from error
            if not count:
                missing = sum(buffer.nbytes for buffer in pending)
                raise StorageError(error_text(f"{self.path!r} ends at byte {byte}", expected=f"{missing} bytes more"))
            byte += count
            pending = _rest(pending, count)

    def mapped(self, begin: int = 0, end: int | None = None) -> Buffer:
        stretch = self._mapping[begin:end]
        if end is not None and stretch.nbytes < end - begin:
            what = f"{self.path!r} ends at byte {self._mapping.nbytes}"
            raise StorageError(error_text(what, expected=f"bytes {begin} to {end}"))
        return stretch

    @cached_property
    def _mapping(self) -> Buffer:
        # A private mapping is writable without touching the file, and tensors want writable memory.
        if not self.length:
            return memoryview(bytearray())
        try:
            mapped = mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise StorageError(error_text(f"cannot map {self.path!r}", found=error.strerror)) from error
        return memoryview(mapped)


def _leads_back(path: str, root: str) -> bool:
    """Return whether a link leads to a folder on the way to it: whoever walked through it would go round in circles."""
    target, folder = os.path.realpath(path), os.path.dirname(path)
    while len(folder) >= len(root):
        if os.path.realpath(folder) == target:
            return True
        folder = os.path.dirname(folder) if folder != os.path.dirname(folder) else ""
    return False


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parents_to_be(path: str) -> list[str]:
    """Return the parents of those folders on a path that aren't there yet."""
    parents = []
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
        parents.append(path)
    return parents


def _batches(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the buffers in groups that make one system call each."""
    batch: list[Buffer] = []
    size = 0
    for buffer in buffers:
        batch.append(buffer)
        size += buffer.nbytes
        if size >= _BATCH_BYTES or len(batch) == _BATCH_BUFFERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_batches(descriptor: int, batches: Iterable[list[Buffer]]) -> int:
    """Write to an empty file, with room reserved ahead where that can be had, and return how much was written."""
    length = reserved = 0
    for batch in batches:
        if length >= reserved:
            reserved = length + reserve(descriptor, length)
        length += _write_all(descriptor, batch)
    if reserved > length:
        os.ftruncate(descriptor, length)
    return length


def _write_all(descriptor: int, batch: list[Buffer]) -> int:
    pending = [buffer for buffer in batch if buffer.nbytes]
    total = sum(buffer.nbytes for buffer in pending)
    while pending:
        pending = _rest(pending, os.writev(descriptor, pending))
    return total


def _write_at(descriptor: int, byte: int, buffers: list[Buffer]) -> None:
    while buffers:
        count = os.pwritev(descriptor, buffers, byte) if len(buffers) > 1 else os.pwrite(descriptor, buffers[0], byte)
        byte += count
        buffers = _rest(buffers, count)


def _rest(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left of buffers when their first `count` bytes are done."""
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[position + 1 :]]
        count -= buffer.nbytes
    return []
