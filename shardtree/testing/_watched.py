"""A storage that counts what is asked of it: to fail on purpose, or to look at what is there after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import count
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import CheckpointingException
from ..storage import Buffer, Reader, Storage

T = TypeVar("T")
Rest = ParamSpec("Rest")


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that was asked of a storage.

    Attributes:
        number: counted from 0.
        method: of `Storage`.
        name: of the file or folder.
    """

    number: int
    method: str
    name: str


def _nothing(_: Call) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStorage:
    """A storage that calls a function before and after each call of another one, one call at a time.

    Args:
        inner: where the files are.
        before: may raise; then the call isn't made, but a write leaves half of its bytes, as one that breaks off does.
        after: may raise.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> calls = []
        >>> storage = WatchedStorage(MemoryStorage(), after=calls.append)
        >>> storage.make_folder("a")
        >>> calls
        [Call(number=0, method='make_folder', name='a')]
    """

    inner: Storage
    before: Callable[[Call], None] = _nothing
    after: Callable[[Call], None] = _nothing
    _numbers: Any = field(default_factory=count)
    _lock: Any = field(default_factory=RLock)

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a new file."""
        with self._lock:
            call = self._call("write", name)
            try:
                self.before(call)
            except BaseException:
                data = b"".join(buffers)
                self.inner.write(name, [memoryview(data[: len(data) // 2])], durable=False)
                raise
            length = self.inner.write(name, buffers, durable=durable)
            self.after(call)
        return length

    def write_parts(self, name: str, length: int, parts: Iterable[tuple[int, Buffer]], *, durable: bool) -> None:
        """Write parts of a file."""
        with self._lock:
            call = self._call("write_parts", name)
            try:
                self.before(call)
            except BaseException:
                pairs = list(parts)
                with suppress(CheckpointingException):  # a store that takes whole files only is left without one
                    self.inner.write_parts(name, length, pairs[: len(pairs) // 2], durable=False)
                raise
            self.inner.write_parts(name, length, parts, durable=durable)
            self.after(call)

    def move(self, old: str, new: str) -> None:
        """Give a file another name."""
        self._watched(self.inner.move, old, new)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""
        return self._watched(self.inner.open, name)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step."""
        self._watched(self.inner.replace, name, data, durable=durable)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return self._watched(self.inner.read, name)

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes."""
        return self._watched(self.inner.length, name)

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return what is directly inside a folder."""
        return self._watched(self.inner.names, folder)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder."""
        self._watched(self.inner.make_folder, name, durable=durable)

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name."""
        return self._watched(self.inner.is_folder, name)

    def sync_folder(self, name: str = "") -> None:
        """Wait until a folder is on the medium."""
        self._watched(self.inner.sync_folder, name)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._watched(self.inner.remove, name)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        self._watched(self.inner.remove_folder, name)

    def changed(self, name: str) -> float | None:
        """Return when a file or folder was changed last."""
        return self._watched(self.inner.changed, name)

    def where(self, name: str = "") -> str:
        """Return a name as people should see it; it isn't counted."""
        return self.inner.where(name)

    def _watched(
        self, method: Callable[Concatenate[str, Rest], T], name: str, *args: Rest.args, **options: Rest.kwargs
    ) -> T:
        with self._lock:
            call = self._call(method.__name__, name)
            self.before(call)
            result = method(name, *args, **options)
            self.after(call)
        return result

    def _call(self, method: str, name: str) -> Call:
        return Call(next(self._numbers), method, name)
