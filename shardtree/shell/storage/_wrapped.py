"""Storages around another one: calls that are done in another way, and answers from one listing of its files."""

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
"""Other storages that the inner one makes: they wouldn't be wrapped, and a save would go past the wrapper in one."""


class Wrapped:
    """What `wrapped` and `around` return.

    Attributes:
        inner: the storage that is wrapped.
        inside: the folder of it that this is, "" for all of it.
        capabilities: what it can do.
    """

    def __init__(self, inner: Storage, calls: Mapping[str, Function | None], inside: str = "") -> None:
        self.inner, self.inside = inner, inside
        for name in CALLS:
            setattr(self, name, calls.get(name) or getattr(inner, name))
        own = {name: calls[name] for name in calls if name not in CALLS}
        self.capabilities: Capabilities = replace(can(inner), **(_OTHERS | own))

    def __repr__(self) -> str:
        return f"wrapped({self.inner!r})"


def wrapped(storage: Storage, **calls: Function | None) -> Any:
    """Return a storage that does some calls in another way, and all others as another storage does.

    Some capabilities reach a file by another way than the calls of `Storage`. Who changes what is read passes his own
    ``content`` and ``read_range`` as well, and who changes what is written ``write_parts``, ``move``, ``replace_if``,
    ``mark`` and ``remove_all``; or None, and the calls of `Storage` are used instead. What makes other storages
    (``sibling``, ``siblings``) isn't taken from the inner one: where both aren't given, a save that would exchange two
    folders is refused. A folder in the result is wrapped like it.

    Args:
        storage: the other one, which the result has as its ``inner``.
        calls: functions by their names, of `Storage` or of `Capabilities`; None for a capability that the result lacks.

    Raises:
        StorageError: there is no call of such a name, or it is None and every storage has it.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> inner = MemoryStorage()
        >>> def remove(name):
        ...     print(f"removing {name}")
        ...     inner.remove(name)
        >>> wrapped(inner, remove=remove).remove("a")
        removing a
    """
    names = {*CALLS, *(each.name for each in fields(Capabilities))}
    wrong = [f"{name}: there is no such call" for name in calls if name not in names]
    wrong += [f"{name}: None, but every storage has it" for name in CALLS if calls.get(name, wrapped) is None]
    if wrong:
        raise StorageError(error_text("wrapped", offenders=wrong, fix="Pass functions, or None for a capability."))
    return Wrapped(storage, calls)


def around(storage: Storage, wrap: Callable[[str, Function], Function | None], inside: str = "") -> Any:
    """Return a storage whose every call, those of its capabilities too, is what a function makes of another's.

    Args:
        storage: the other one, which the result has as its ``inner``.
        wrap: from the name of a call and its function to the one that is called instead; None if it can't be done.
        inside: the folder of `storage` that the result is.

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
    """Yield a storage that answers from one listing, and removes files at the end; itself where it can't list them.

    What other programs change meanwhile isn't seen until something is written here, or a file turns out to be gone.

    Args:
        storage: to be looked at.
        deep: whether what is in its folders is listed too; a large checkpoint may have many files there.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> with listed(storage) as seen:
        ...     seen is storage
        True
    """
    # Folders that are there without files aren't in a listing.
    if can(storage).entries is None or can(storage).make_folder is not None:
        yield storage
        return
    listing = Listed(storage, deep)
    try:
        yield listing
    finally:
        listing.remove_all_now()


def settle(storage: Storage) -> None:
    """Carry out the removals that a listed storage has put off, so that those which follow come after them."""
    if isinstance(storage, Listed):
        storage.remove_all_now()


def prefetch(storage: Storage, names: Iterable[str]) -> None:
    """Let a listed storage read small files side by side, since they will be asked for; others do nothing."""
    if isinstance(storage, Listed):
        storage.prefetch(names)


class Listed:
    """A `Storage` that knows another one's listing; all that it can do beyond is what that one does late."""

    def __init__(self, inner: Storage, deep: bool = True) -> None:
        self.inner, self._deep = inner, deep
        self._listing: dict[str, Entry] | None = None
        self._removals: list[str] = []
        self._contents: dict[str, tuple[Entry, bytes]] = {}

    @property
    def capabilities(self) -> Capabilities:
        there = can(self.inner)
        return Capabilities(abort_uploads=there.abort_uploads, late_requests=there.late_requests)

    def remove_all_now(self) -> None:
        """Remove what was to be removed."""
        names, self._removals = self._removals, []
        remove_files(self.inner, names)

    def _entries(self) -> dict[str, Entry]:
        if self._listing is None:
            self.remove_all_now()
            entries = can(self.inner).entries
            self._listing = {} if entries is None else entries(deep=self._deep)
        return self._listing

    def _beyond(self, plain: str) -> bool:
        """Return whether a name isn't in the listing because it lies in a folder, or is the place itself."""
        if not plain:  # a file, maybe, such as a model's; of those that can be opened all have a dot in their names
            return not self._entries() and "." in self.where().rpartition("/")[2]
        return "/" in plain and not self._deep

    def prefetch(self, names: Iterable[str]) -> None:
        """Read small files side by side, for `read`; those that aren't there are passed over."""
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
        return max((one.changed for each, one in self._entries().items() if each.startswith(start)), default=None)

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
            self._listing = None  # it may have been removed since
            raise

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self.inner.open(name)

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        self._listing = None
        return self.inner.write(name, buffers, durable=durable)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        # At once: the order of changes is what makes a removal all or nothing.
        self.remove_all_now()
        self._listing = None
        self.inner.replace(name, data, durable=durable)

    def where(self, name: str = "") -> str:
        return self.inner.where(name)

    def _plain(self, name: str) -> str:
        return inside(name, self.where())
