"""A storage that numbers its calls: to fail at a chosen one, or to inspect the files after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import CheckpointingException, StorageError, StrategyError, error_text
from ..storage import Buffer, Exchanging, Reader, Renaming, Sibling, Storage

T = TypeVar("T")
Rest = ParamSpec("Rest")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a storage's method.

    Attributes:
        number: counted from 0.
        method: of `Storage`.
        name: of the file or folder.
    """

    number: int
    method: str
    name: str


def _do_nothing(_: Call) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStorage:
    """A storage that passes calls on to another one, and calls functions before and after each; one call at a time.

    Args:
        inner: the storage with the files.
        before: may raise; then the call isn't made, except that a write leaves half of its bytes, as if interrupted.
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
    before: Callable[[Call], None] = _do_nothing
    after: Callable[[Call], None] = _do_nothing
    _numbers: Any = field(default_factory=count)
    # Reentrant: `before` and `after` may look at the storage themselves.
    _lock: Any = field(default_factory=RLock)

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        """Write a new file."""
        with self._lock:
            call = self._call("write", name)
            try:
                self.before(call)
            except BaseException:
                # Half of the file, since that is what a process leaves that is killed while it writes.
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
                with suppress(CheckpointingException):  # storages that accept only whole files write nothing
                    self.inner.write_parts(name, length, pairs[: len(pairs) // 2], durable=False)
                raise
            self.inner.write_parts(name, length, parts, durable=durable)
            self.after(call)

    def move(self, old: str, new: str) -> None:
        """Give a file another name."""
        self.watched(self.inner.move, old, new)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a file for reading."""
        return self.watched(self.inner.open, name)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one step."""
        self.watched(self.inner.replace, name, data, durable=durable)

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        return self.watched(self.inner.read, name)

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes."""
        return self.watched(self.inner.length, name)

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return what is directly inside a folder."""
        return self.watched(self.inner.names, folder)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder."""
        self.watched(self.inner.make_folder, name, durable=durable)

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name."""
        return self.watched(self.inner.is_folder, name)

    def sync_folder(self, name: str = "") -> None:
        """Wait until a folder is on the medium."""
        self.watched(self.inner.sync_folder, name)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.watched(self.inner.remove, name)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        self.watched(self.inner.remove_folder, name)

    def changed(self, name: str) -> float | None:
        """Return when a file or folder was changed last."""
        return self.watched(self.inner.changed, name)

    def sibling(self, name: str) -> WatchedSibling:
        """Return the folder beside this one that a save of that name makes, watched too."""
        return WatchedSibling(self, self._exchanging.sibling(name), name)

    def siblings(self) -> tuple[str, ...]:
        """Return the names of the saves that have made a folder beside this one."""
        return self._exchanging.siblings()

    def move_folder(self, old: str, new: str) -> None:
        """Give a folder another name, if the inner storage can."""
        if not isinstance(self.inner, Renaming):
            raise StorageError(error_text(f"{self.where(old)!r} can't be renamed in one step"))
        self.watched(self.inner.move_folder, old, new)

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link."""
        return isinstance(self.inner, Renaming) and self.watched(self.inner.is_link, name)

    @property
    def _exchanging(self) -> Exchanging:
        if isinstance(self.inner, Exchanging):
            return self.inner
        raise StrategyError(error_text(f"{self.where()!r} can't be exchanged with a folder beside it"))

    def where(self, name: str = "") -> str:
        """Return a name as people should see it; it isn't counted."""
        return self.inner.where(name)

    def watched(
        self, method: Callable[Concatenate[str, Rest], T], name: str, *args: Rest.args, **options: Rest.kwargs
    ) -> T:
        """Call a method of the inner storage or its sibling, between `before` and `after`."""
        with self._lock:
            call = self._call(method.__name__, name)
            self.before(call)
            result = method(name, *args, **options)
            self.after(call)
        return result

    def _call(self, method: str, name: str) -> Call:
        return Call(next(self._numbers), method, name)


@dataclass(frozen=True, slots=True, eq=False)
class WatchedSibling:
    """A folder beside a watched storage; its calls are numbered together with the storage's.

    Args:
        owner: the watched storage.
        inner: the folder.
        name: of the save that makes it, and of the calls.
    """

    owner: WatchedStorage
    inner: Sibling
    name: str

    @property
    def storage(self) -> WatchedStorage:
        """The folder's files."""
        return replace(self.owner, inner=self.inner.storage)

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the folder."""
        self._call("make", lambda: self.inner.make(note, durable=durable))

    def note(self) -> bytes | None:
        """Return the owner's note."""
        return self._call("note", self.inner.note)

    def is_exchanged(self) -> bool | None:
        """Return whether the old files are in it."""
        return self._call("is_exchanged", self.inner.is_exchanged)

    def changed(self) -> float | None:
        """Return when something was made or removed in it last."""
        return self._call("changed", self.inner.changed)

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all old files."""
        return self._call("old_names", self.inner.old_names)

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise unless old files can be linked."""
        self._call("check_shareable", lambda: self.inner.check_shareable(names))

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Link old files into the new folder."""
        return self._call("share", lambda: self.inner.share(names, durable=durable))

    def exchange(self, *, durable: bool) -> None:
        """Exchange the two folders."""
        self._call("exchange", lambda: self.inner.exchange(durable=durable))

    def remove(self) -> None:
        """Remove the folder."""
        self._call("remove", self.inner.remove)

    def _call(self, method: str, fn: Callable[[], T]) -> T:
        def called(name: str) -> T:
            return fn()

        called.__name__ = f"sibling.{method}"
        return self.owner.watched(called, self.name)
