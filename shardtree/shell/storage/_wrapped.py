"""Wrappers of storages that replace some calls, or answer from a single listing of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from ...errors import StorageError, error_text
from ._capabilities import Capabilities, Entry, Function, can, read_if_there, remove_files
from ._storage import CALLS, Buffer, Reader, Storage, inside
from ._threads import in_threads

_OTHERS: dict[str, Any] = {"folder": None, "sibling": None, "siblings": None}
"""Capabilities that return other storages. These wouldn't be wrapped, and a save in one would bypass the wrapper."""


class Wrapped:
    """A storage that replaces some calls of another one; `wrapped` and `around` make it.

    Attributes:
        inner: The storage that is wrapped.
        inside: Subfolder of `inner` that this storage stands for; "" for the whole of `inner`.
        capabilities: The wrapper's capabilities.
    """

    def __init__(self, inner: Storage, calls: Mapping[str, Function | None], inside: str = "") -> None:
        self.inner, self.inside = inner, inside
        for name in CALLS:
            setattr(self, name, calls.get(name) or getattr(inner, name))
        optional = {name: calls[name] for name in calls if name not in CALLS}
        self.capabilities: Capabilities = replace(can(inner), **(_OTHERS | optional))

    def __repr__(self) -> str:
        return f"wrapped({self.inner!r})"


def wrapped(storage: Storage, **calls: Function | None) -> Any:
    """Return a storage that replaces some methods of another one and forwards all others.

    Some capabilities access files without the methods of `Storage`, so replacing the methods isn't enough. To change
    what is read, replace the capabilities ``content`` and ``read_range`` too. To change what is written, replace
    ``write_parts``, ``move``, ``replace_if``, ``mark`` and ``remove_all`` too. A capability that is passed as None is
    switched off, and a method of `Storage` is used instead.

    Subfolders of the result are wrapped too. ``sibling`` and ``siblings`` aren't forwarded: without a replacement of
    both, the result refuses saves that replace a whole checkpoint by exchanging two folders.

    Args:
        storage: Storage to wrap, the result's attribute ``inner``.
        calls: Functions by the names of the methods of `Storage` or capabilities that they replace; None for a
            capability that the result lacks.

    Raises:
        StorageError: a name is unknown, or a method that every storage has is None.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> inner = MemoryStorage()
        >>> def remove(name):
        ...     print(f"removing {name}")
        ...     inner.remove(name)
        >>> wrapped(inner, remove=remove).remove("a")
        removing a
    """
    names = {*CALLS, *(capability.name for capability in fields(Capabilities))}
    wrong = [f"{name}: not a method of Storage or a capability" for name in calls if name not in names]
    wrong += [f"{name}: None, which only a capability may be" for name in CALLS if calls.get(name, wrapped) is None]
    if wrong:
        raise StorageError(error_text("wrapped: invalid methods", offenders=wrong, fix="Correct or omit these."))
    return Wrapped(storage, calls)


def around(storage: Storage, wrap: Callable[[str, Function], Function | None], inside: str = "") -> Any:
    """Return a wrapper of a storage, in which `wrap` has replaced each of the storage's methods and capabilities.

    Args:
        storage: Storage to wrap, the result's attribute ``inner``.
        wrap: Function from a method's name and the method to its replacement, or to None for a capability that the
            result lacks.
        inside: Subfolder of `storage` that the result stands for.

    Examples:
        >>> from functools import partial
        >>> from shardtree.storage import MemoryStorage
        >>> def counted(name, function, *rest, **options):
        ...     print(name)
        ...     return function(*rest, **options)
        >>> around(MemoryStorage(), lambda name, function: partial(counted, name, function)).names()
        names
        ()
    """
    functions = {name: getattr(storage, name) for name in CALLS} | can(storage).functions()
    functions.pop("folder", None)
    return Wrapped(storage, {name: wrap(name, function) for name, function in functions.items()}, inside)


_READERS = 16


@contextmanager
def listed(storage: Storage, *, deep: bool = True) -> Iterator[Storage]:
    """Yield a view of a storage that answers from one listing of its files, and collects removals.

    The removals are executed together, before a file is replaced or listed anew, and when the block ends. Changes by
    other programs stay unseen until something is written through the view, or until a file turns out to be missing.

    The storage itself is yielded if it can't list all files in few requests, or has empty folders, which a listing
    lacks.

    Args:
        storage: Storage to list.
        deep: Whether the content of subfolders is listed too; a large checkpoint may have many files there.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> with listed(storage) as seen:
        ...     seen is storage
        True
    """
    # A listing lacks empty folders, so storages that have them aren't listed.
    if can(storage).entries is None or can(storage).make_folder is not None:
        yield storage
        return
    listing = Listed(storage, deep)
    try:
        yield listing
    finally:
        listing.remove_all_now()


def settle(storage: Storage) -> None:
    """Execute now the removals that a storage has delayed; only storages that `listed` yields delay removals."""
    if isinstance(storage, Listed):
        storage.remove_all_now()


def prefetch(storage: Storage, names: Iterable[str]) -> None:
    """Read small files concurrently, before they are used, if the storage is a view that `listed` yields."""
    if isinstance(storage, Listed):
        storage.prefetch(names)


class Listed:
    """A storage that answers from one listing of another storage's files, and delays removals; `listed` makes it.

    Its only capabilities are `abort_uploads` and `late_requests`.
    """

    def __init__(self, inner: Storage, deep: bool = True) -> None:
        self.inner, self._deep = inner, deep
        self._listing: dict[str, Entry] | None = None
        self._removals: list[str] = []
        self._contents: dict[str, tuple[Entry, bytes]] = {}

    @property
    def capabilities(self) -> Capabilities:
        inner = can(self.inner)
        return Capabilities(abort_uploads=inner.abort_uploads, late_requests=inner.late_requests)

    def remove_all_now(self) -> None:
        """Execute the delayed removals."""
        names, self._removals = self._removals, []
        remove_files(self.inner, names)

    def _entries(self) -> dict[str, Entry]:
        if self._listing is None:
            self.remove_all_now()
            entries = can(self.inner).entries
            self._listing = {} if entries is None else entries(deep=self._deep)
        return self._listing

    def _beyond(self, plain: str) -> bool:
        """Return whether the listing can't tell if a file exists, so that `inner` must be asked.

        This is so for names in subfolders, if their content isn't listed, and for the name "" of a storage that is a
        single file.

        Args:
            plain: Normalised name of the file.
        """
        if not plain:  # the storage may be a single file; all files that can be opened have a dot in their names
            return not self._entries() and "." in self.where().rpartition("/")[2]
        return "/" in plain and not self._deep

    def prefetch(self, names: Iterable[str]) -> None:
        """Read small files concurrently for later calls of `read`; missing files are skipped."""
        there = [name for name in names if self.length(name) is not None and name not in self._contents]
        contents = in_threads(partial(read_if_there, self.inner), there, threads=_READERS)
        for name, data in zip(there, contents, strict=True):
            if data is not None:
                self._contents[name] = (self._entries()[name], data)

    def names(self, folder: str = "") -> tuple[str, ...]:
        plain = self._plain(folder)
        if plain and not self._deep:
            return self.inner.names(plain)
        start = f"{plain}/" if plain else ""
        names = (name[len(start) :].partition("/")[0] for name in self._entries() if name.startswith(start))
        return tuple(sorted({*names} - {""}))

    def length(self, name: str) -> int | None:
        plain = self._plain(name)
        if self._beyond(plain):
            return self.inner.length(plain)
        entry = self._entries().get(plain)
        return None if entry is None else entry.length

    def changed(self, name: str) -> float | None:
        plain = self._plain(name)
        if not self._deep:
            return self.inner.changed(plain)
        if plain in self._entries():
            return self._entries()[plain].changed
        start = f"{plain}/" if plain else ""
        return max((file.changed for key, file in self._entries().items() if key.startswith(start)), default=None)

    def remove(self, name: str) -> None:
        plain = self._plain(name)
        self._contents.pop(plain, None)
        if self._entries().pop(plain, None) is not None or self._beyond(plain):
            self._removals.append(plain)

    def read(self, name: str) -> bytes:
        entry, data = self._contents.get(name, (None, b""))
        if entry is not None and entry == self._entries().get(name):
            return data
        try:
            return self.inner.read(name)
        except StorageError:
            self._listing = None  # the file may have been removed since the listing
            raise

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self.inner.open(name)

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        self._listing = None
        return self.inner.write(name, buffers, durable=durable)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        # Removals aren't delayed past this point: their order relative to other changes makes a removal atomic.
        self.remove_all_now()
        self._listing = None
        self.inner.replace(name, data, durable=durable)

    def where(self, name: str = "") -> str:
        return self.inner.where(name)

    def _plain(self, name: str) -> str:
        return inside(name, self.where())
