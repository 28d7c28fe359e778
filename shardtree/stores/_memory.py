"""Files in this process's memory, for tests, and to pass on a checkpoint without a disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar
from weakref import WeakValueDictionary

from ..errors import StorageError, error_text, plural
from ..kit import AnyBuffer, Buffer, Capabilities, Sibling, byte_view, inside, parts_in_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MemoryStorage:
    """A folder in memory, shared by all threads that use the same object.

    Times of changes are ticks: numbers of a counter, not seconds.

    Attributes:
        lock: Lock that is held during changes.
        beside: Sibling folders that saves have made, by the saves' names.

    Examples:
        >>> storage = MemoryStorage()
        >>> storage.write("folder/a.bin", [memoryview(b"abc")], durable=True)
        3
        >>> storage.names("folder")
        ('a.bin',)
    """

    _files: dict[str, tuple[bytearray, float]] = field(default_factory=dict)
    _folders: dict[str, float] = field(default_factory=dict)
    _ticks: Iterator[int] = field(default_factory=count)
    lock: threading.RLock = field(default_factory=threading.RLock)
    beside: dict[str, MemorySibling] = field(default_factory=dict)
    _siblings: WeakValueDictionary[str, MemorySibling] = field(default_factory=WeakValueDictionary)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        # The files aren't shown: in a traceback or a notebook they would be a whole model.
        return f"MemoryStorage({plural(len(self._files), 'file')})"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of a folder in memory."""
        folders = ("make_folder", "is_folder", "remove_folder")
        return Capabilities.of(self, "move", "write_parts", *folders, "sibling", "siblings", "locked", latency=0.0)

    def where(self, name: str = "") -> str:
        """Return the name of a file or folder for messages: its path with the prefix ``memory:``."""
        return f"memory:{_plain(name)}"

    def write(self, name: str, buffers: Iterable[AnyBuffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length."""
        # The buffers are joined before the lock is taken, since a save may produce them slowly.
        plain, where = _plain(name), self.where(name)
        data = bytearray().join(byte_view(buffer, where) for buffer in buffers)
        with self.lock:
            self._files[plain] = (data, next(self._ticks))
        return len(data)

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, AnyBuffer]], *, durable: bool) -> None:
        """Write parts of a file of `length` bytes; other threads may write other parts."""
        plain = _plain(name)
        self._resize(plain, length)
        for byte, buffer in parts_in_file(parts, length, self.where(name)):
            with self.lock:
                self._resize(plain, length)[byte : byte + buffer.nbytes] = buffer

    def move(self, old: str, new: str) -> None:
        """Rename a file atomically."""
        with self.lock:
            data = self._data(old)
            del self._files[_plain(old)]
            self._files[_plain(new)] = (data, next(self._ticks))

    @contextmanager
    def open(self, name: str) -> Iterator[BytesReader]:
        """Open a file for reading."""
        yield BytesReader(memoryview(self._data(name)), self.where(name))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Replace a file's content atomically."""
        self.write(name, [memoryview(data)], durable=durable)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return bytes(self._data(name))

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, or None if there is no such file."""
        with self.lock:
            entry = self._files.get(_plain(name))
        return None if entry is None else len(entry[0])

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the sorted names of a folder's direct entries."""
        start = f"{plain}/" if (plain := _plain(folder)) else ""
        with self.lock:
            paths = [name[len(start) :] for name in (*self._files, *self._folders) if name.startswith(start)]
        return tuple(sorted({name.partition("/")[0] for name in paths} - {""}))

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder; the storage's own folder always exists."""
        with self.lock:
            if plain := _plain(name):
                self._folders.setdefault(plain, next(self._ticks))

    def is_folder(self, name: str = "") -> bool:
        """Return whether a folder of that name exists."""
        plain = _plain(name)
        return not plain or plain in self._folders or bool(self.names(name))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self.lock:
            self._files.pop(_plain(name), None)

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        if not self.names(name):
            with self.lock:
                self._folders.pop(_plain(name), None)

    def changed(self, name: str) -> float | None:
        """Return the tick of a file's last change, or of a folder's creation; None if there is none of that name."""
        with self.lock:
            entry = self._files.get(_plain(name))
            return self._folders.get(_plain(name)) if entry is None else entry[1]

    def sibling(self, name: str) -> Sibling:
        """Return the sibling of the save `name`: the folder that the save fills, and then exchanges with this one."""
        # All ranks share the object, but only rank 0 makes the folder; if it never does, the object is freed with the
        # save.
        with self.lock:
            return self._siblings.setdefault(name, MemorySibling(self, name))

    def siblings(self) -> tuple[str, ...]:
        """Return the sorted names of the saves that have made a sibling folder; see `sibling`."""
        return tuple(sorted(self.beside))

    @contextmanager
    def locked(self, folder: str = "") -> Iterator[None]:
        """Hold a lock that only one thread can hold at a time.

        All folders share it. It does not prevent changes of files by other threads.
        """
        with self._turn:
            yield

    def clear(self) -> None:
        """Remove all files and folders."""
        with self.lock:
            self._files.clear()
            self._folders.clear()

    def empty(self) -> MemoryStorage:
        """Return a new empty folder that shares the counter of changes and the lock with this one."""
        return MemoryStorage(_ticks=self._ticks, lock=self.lock)

    def all_names(self) -> tuple[str, ...]:
        """Return the names of all files, including those in subfolders."""
        with self.lock:
            return tuple(sorted(self._files))

    def share(self, name: str, other: MemoryStorage) -> bool:
        """Add a file of another folder, without a copy; return False if this one has a different file of that name."""
        with self.lock:
            entry = other._files.get(_plain(name))
            return entry is None or self._files.setdefault(_plain(name), entry)[0] is entry[0]

    def swap(self, other: MemoryStorage) -> None:
        """Exchange all files and folders with another folder."""
        with self.lock:
            _swap(self._files, other._files)
            _swap(self._folders, other._folders)

    def _resize(self, plain: str, length: int) -> bytearray:
        """Set the length of a file, and return its bytes."""
        with self.lock:
            data = self._files.get(plain, (bytearray(), 0.0))[0]
            if len(data) != length:
                # A bytearray can't be resized while a reader has a memoryview of it, so a new one is made.
                data = bytearray(data[:length]).ljust(length, b"\0")
            self._files[plain] = (data, next(self._ticks))
        return data

    def _data(self, name: str) -> bytearray:
        with self.lock:
            entry = self._files.get(_plain(name))
        if entry is None:
            raise StorageError(error_text(f"cannot open {self.where(name)!r}", found="no such file"))
        return entry[0]


def _swap(one: dict[str, T], other: dict[str, T]) -> None:
    both = dict(one), dict(other)
    one.clear()
    other.clear()
    one.update(both[1])
    other.update(both[0])


def _plain(name: str) -> str:
    return inside(name, "memory:")


@dataclass(frozen=True, slots=True)
class BytesReader:
    """An open file whose bytes are all in memory: a `Reader` for storages that can only read whole files.

    Attributes:
        data: Content of the file.
        path: Name of the file, for messages.

    Examples:
        >>> part = bytearray(2)
        >>> BytesReader(memoryview(b"abcd"), "letters").read_into(1, [memoryview(part)])
        >>> part
        bytearray(b'bc')
    """

    data: Buffer
    path: str

    @property
    def length(self) -> int:
        """The file's length in bytes."""
        return self.data.nbytes

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers in order from consecutive bytes."""
        for buffer in buffers:
            part = self.data[byte : byte + buffer.nbytes]
            if part.nbytes < buffer.nbytes:
                missing = buffer.nbytes - part.nbytes
                heading = f"cannot read {missing} more bytes: {self.path!r} ends at byte {self.length}"
                raise StorageError(error_text(heading))
            buffer[:] = part
            byte += buffer.nbytes

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a copy of a byte range of the file."""
        part = memoryview(bytearray((self.length if end is None else end) - begin))
        self.read_into(begin, [part])
        return part


# A folder in memory that replaces another one as a whole.


@dataclass(slots=True, eq=False, weakref_slot=True)
class MemorySibling:
    """A folder in memory that a save fills, and that is then exchanged with the folder of the checkpoint.

    Attributes:
        target: Folder of the checkpoint, which is replaced.
        name: Name of the save.
        storage: Storage of this folder: it has the new files until `exchange`, then the old files.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> target = MemoryStorage()
        >>> target.replace("old.txt", b"old", durable=False)
        >>> sibling = MemorySibling(target, "save-1")
        >>> sibling.make(b"note", durable=False)
        >>> sibling.storage.replace("new.txt", b"new", durable=False)
        >>> sibling.exchange(durable=False)
        >>> target.names(), sibling.storage.names()
        (('new.txt',), ('old.txt',))
    """

    target: MemoryStorage
    name: str
    storage: MemoryStorage = field(init=False)
    _note: bytes | None = None
    _exchanged: bool = False

    def __post_init__(self) -> None:
        """Create the sibling's empty folder; it shares the lock and the counter of changes with the target."""
        self.storage = self.target.empty()

    def make(self, note: bytes, *, durable: bool) -> None:
        """Add this sibling to `target.beside`, and store the bytes `note`, which identify the saving process."""
        with self.target.lock:
            self.target.beside[self.name] = self
            self._note = note

    def note(self) -> bytes | None:
        """Return the bytes that `make` stored to identify the saving process, or None if there are none."""
        return self._note

    def is_exchanged(self) -> bool | None:
        """Return whether this folder holds the old checkpoint's files; None before `make` and after `remove`."""
        return self._exchanged if self.name in self.target.beside else None

    def changed(self) -> float | None:
        """Return the tick (see `MemoryStorage`) of the last change of a file in this folder; None without files."""
        names = self.storage.all_names()
        return max((self.storage.changed(name) or 0.0 for name in names), default=None)

    def old_names(self) -> tuple[str, ...]:
        """Return the names of the old checkpoint's files, which `exchange` moves from the target to this folder."""
        return (self.storage if self._exchanged else self.target).all_names()

    def check_shareable(self, names: Sequence[str]) -> None:
        """Do nothing, since files in memory can always be shared (see `share`)."""

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Add files of the old checkpoint to the new one, without a copy; return names that new files already have."""
        pair = (self.target, self.storage)
        new, old = pair if self._exchanged else pair[::-1]
        return tuple(name for name in names if not new.share(name, old))

    def exchange(self, *, durable: bool) -> None:
        """Exchange all files of the target, the checkpoint's folder, with those of this folder."""
        with self.target.lock:
            self.target.swap(self.storage)
            self._exchanged = not self._exchanged

    def remove(self) -> None:
        """Remove the sibling folder and its content."""
        with self.target.lock:
            self.target.beside.pop(self.name, None)
            self.storage.clear()
            self._note, self._exchanged = None, False
