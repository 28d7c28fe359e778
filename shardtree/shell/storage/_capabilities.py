"""Optional abilities of a storage beyond `Storage`, and the fallbacks for storages that lack them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import Any

from ._blocks import reported_parts
from ._refusals import Refusals
from ._storage import Buffer, Sibling, SizedBuffers, Storage, whole

Function = Callable[..., Any]
"""A storage's method; its first argument is the name of a file or folder."""

ReadRange = Callable[[str, int, int], tuple[Buffer, int]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a listing.

    Attributes:
        length: Length in bytes.
        changed: Time of the last change, in seconds by the storage's own clock.
    """

    length: int
    changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Optional abilities of a storage, in its attribute ``capabilities``; a function that is None isn't supported.

    A storage without the attribute supports none of them. Related functions, such as those on folders, are
    supported together. On failure, each function raises a StorageError that names the file.

    Attributes:
        move: ``(old, new)``: rename a file, replacing any file of the new name, atomically if possible. Without it,
            files are copied.
        write_parts: ``(name, length, parts, *, durable)``: write parts of a file while other ranks write others.
            Parts are (offset, bytes) pairs. All writers pass the same length, which the file has afterwards; bytes
            that nobody writes are zero in a new file and unchanged in an old one. Without it, a file has a single
            writer that writes it whole and in order.
        make_folder: ``(name, *, durable)``: make a folder and its parents if they are missing, and wait until they are
            on the medium if `durable`. Without it, a folder exists as soon as a file is in it.
        is_folder: ``(name)``: whether a folder of that name exists, possibly an empty one.
        remove_folder: ``(name)``: remove a folder if it is empty.
        sync_folder: ``(name)``: wait until all entries made or removed in a folder are on the medium. Without it, they
            are on the medium already.
        is_link: ``(name)``: whether a name is a symbolic link.
        folder: ``(name)``: the storage of a subfolder, with the same abilities.
        sibling: ``(name)``: the `Sibling` of the save that is called `name`. Its folder needn't exist yet.
        siblings: ``()``: the sorted names of the saves that have made a sibling.
        locked: ``(folder="")``: a context manager that waits for a folder's lock and holds it. On one machine, only one
            thread of one process holds it at a time. The lock isn't reentrant, and ends with the process.
        replace_if: ``(name, before, data)``: replace a file's content atomically if the content is still `before`
            (None: if there is no file), and return whether an answer confirms it. False means that the file has
            changed, or that no answer came: then it may have the new content, or still get it. The request isn't
            repeated.
        mark: ``(name, data)``: create a file, and return whether the storage honours conditional requests. To find
            out, the function may try to create the file a second time, on condition that there is none: servers that
            ignore conditions let this succeed.
        entries: ``(folder="", *, deep=True)``: the `Entry` of each file in a folder and its subfolders, by relative
            name, in few requests. Without `deep`: of the files directly inside, and of folders, whose names end in
            ``/``.
        content: ``(name, most=None)``: a file's bytes by a single request, or None if there is no such file; raises
            CorruptCheckpoint, before fetching them, if there are more than `most` bytes.
        remove_all: ``(names)``: remove files; missing ones are ignored.
        read_range: ``(name, begin, end)``: the bytes of that range as far as the file reaches, and the file's length;
            callable from any thread. A storage with this function reads by requests with a long latency, so that many
            are in flight at once.
        abort_uploads: ``(folder, is_left)``: abort uploads in a folder that interrupted saves left open, if
            ``is_left(name, seconds)`` is true for the file's name and the upload's age.
        late_requests: Whether a request may be carried out after the process that sent it has ended.
        latency: Duration of the last small request, in seconds; None if there was none, 0 if reading takes no request.
        refusals: Record of refused requests that saves don't depend on, such as syncing a folder.
        request_scale: Factor on the usual number of bytes per request, for long files read or written in parts.

    Examples:
        >>> from shardtree.storage import LocalStorage
        >>> can(LocalStorage("/runs")).sibling is None, can(LocalStorage("/runs")).replace_if is None
        (False, True)
    """

    move: Callable[[str, str], None] | None = None
    write_parts: Function | None = None

    make_folder: Function | None = None
    is_folder: Callable[[str], bool] | None = None
    remove_folder: Callable[[str], None] | None = None
    sync_folder: Callable[[str], None] | None = None

    is_link: Callable[[str], bool] | None = None
    folder: Callable[[str], Storage] | None = None

    sibling: Callable[[str], Sibling] | None = None
    siblings: Callable[[], tuple[str, ...]] | None = None

    locked: Callable[..., AbstractContextManager[None]] | None = None
    replace_if: Callable[[str, bytes | None, bytes], bool] | None = None
    mark: Callable[[str, bytes], bool] | None = None

    entries: Callable[..., dict[str, Entry]] | None = None
    content: Callable[..., bytes | None] | None = None
    remove_all: Callable[[Sequence[str]], None] | None = None

    read_range: ReadRange | None = None
    abort_uploads: Callable[[str, Callable[[str, float], bool]], None] | None = None
    late_requests: bool = False
    latency: float | None = None
    refusals: Refusals | None = None
    request_scale: int = 1

    @classmethod
    def of(cls, storage: Storage, *names: str, **more: Any) -> Capabilities:
        """Return capabilities: the methods of a storage with the given names, and the fields in `more`."""
        return cls(**{name: getattr(storage, name) for name in names}, **more)

    def functions(self) -> dict[str, Function]:
        """Return the supported functions by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if callable(value)}


_NOTHING = Capabilities()


def can(storage: Storage) -> Capabilities:
    """Return the capabilities of a storage; empty if it declares none."""
    capabilities: Capabilities = getattr(storage, "capabilities", _NOTHING)
    return capabilities


# Calls of capabilities, with fallbacks for storages that lack them.


def move(storage: Storage, old: str, new: str) -> None:
    """Rename a file, replacing any file of the new name.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("a", b"1", durable=False)
        >>> move(storage, "a", "b"), storage.names()
        (None, ('b',))
    """
    if (rename := can(storage).move) is not None:
        rename(old, new)
    else:
        # The copy is atomic: the new name may make the file a checkpoint, and half a file would then count as one.
        storage.replace(new, storage.read(old), durable=True)
        storage.remove(old)


def write_parts(
    storage: Storage,
    name: str,
    length: int,
    parts: Iterable[tuple[int, Buffer]],
    *,
    durable: bool,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write parts of a file, in order.

    Args:
        storage: Folder of the file.
        name: Name of the file.
        length: Length of the whole file, in bytes.
        parts: (offset, bytes) pairs.
        durable: Whether to return only after the file is on the medium.
        progress: Function that is called with the number of bytes written since its last call, after each MiB and at
            the end.

    Raises:
        StorageError: the storage takes only whole files, but the parts leave gaps or aren't in order.
    """
    parts = parts if progress is None else reported_parts(parts, progress)
    if (write := can(storage).write_parts) is not None:
        write(name, length, parts, durable=durable)
        return
    buffers = whole(parts, length, storage.where(name))
    # The first part is taken beforehand, so that an error about it is raised before anything is written.
    first = list(islice(buffers, 1))
    storage.write(name, SizedBuffers(length, chain(first, buffers)), durable=durable)


def make_folder(storage: Storage, name: str = "", *, durable: bool = True) -> None:
    """Make a folder and its parents; does nothing if the storage has no empty folders."""
    if (make := can(storage).make_folder) is not None:
        make(name, durable=durable)


def is_folder(storage: Storage, name: str = "") -> bool:
    """Return whether a folder of that name exists.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> is_folder(MemoryStorage(), "a")
        False
    """
    look = can(storage).is_folder
    return bool(storage.names(name)) if look is None else look(name)


def remove_folder(storage: Storage, name: str) -> None:
    """Remove an empty folder; does nothing on a storage that can't have empty folders, such as an object store."""
    if (remove := can(storage).remove_folder) is not None:
        remove(name)


def sync_folder(storage: Storage, name: str = "") -> None:
    """Wait until all entries made or removed in a folder are on the medium."""
    if (sync := can(storage).sync_folder) is not None:
        sync(name)


def siblings(storage: Storage) -> dict[str, Sibling]:
    """Return the siblings that saves have made beside a storage's own folder, by save name, sorted."""
    sibling, names = can(storage).sibling, can(storage).siblings
    return {name: sibling(name) for name in names()} if sibling is not None and names is not None else {}


def locked(storage: Storage) -> AbstractContextManager[None]:
    """Return a context manager that holds the lock of a storage's own folder; it does nothing if the storage has none.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> with locked(MemoryStorage()):
        ...     pass
    """
    lock = can(storage).locked
    return nullcontext() if lock is None else lock()


def is_link(storage: Storage, name: str) -> bool:
    """Return whether a name is a symbolic link; always False on storages without links."""
    look = can(storage).is_link
    return look is not None and look(name)


_DEEPEST = 64  # maximum depth of folders, which bounds the recursion


def files_in(
    storage: Storage, folder: str = "", takes: Callable[[str], object] = bool, depth: int = 0
) -> Iterator[str]:
    """Yield the names of all files and links (not followed) in a folder and its subfolders.

    Args:
        storage: Storage of the files.
        folder: Folder within the storage; "" for the whole storage.
        takes: Predicate on the last part of a name; files and folders that fail it are skipped.
        depth: Depth of the folder, for the recursion.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> _ = storage.write("a/b", [memoryview(b"c")], durable=False)
        >>> list(files_in(storage))
        ['a/b']
    """
    for last in filter(takes, storage.names(folder)):
        name = f"{folder}/{last}" if folder else last
        if depth == _DEEPEST or is_link(storage, name) or not is_folder(storage, name):
            yield name
        else:
            yield from files_in(storage, name, takes, depth + 1)


def file_lengths(storage: Storage) -> Iterator[tuple[str, int]]:
    """Yield name and length of each file of a storage, or of the storage itself if it is a single file.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("a/b", b"123", durable=False)
        >>> [*file_lengths(storage)]
        [('a/b', 3)]
    """
    names = files_in(storage) if storage.length("") is None else [""]
    # A name without a length isn't a file but a link to a folder.
    yield from ((name, length) for name in names if (length := storage.length(name)) is not None)


def remove_files(storage: Storage, names: Sequence[str]) -> None:
    """Remove files in any order; by a single request where the storage supports it.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("a", b"", durable=False)
        >>> remove_files(storage, ["a", "b"]), storage.names()
        (None, ())
    """
    if (remove_all := can(storage).remove_all) is not None:
        remove_all(names)
    else:
        for name in names:
            storage.remove(name)


def read_if_there(storage: Storage, name: str) -> bytes | None:
    """Return a file's bytes, or None if there is no such file.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> read_if_there(MemoryStorage(), "metadata.json") is None
        True
    """
    if (content := can(storage).content) is not None:
        return content(name)
    return None if storage.length(name) is None else storage.read(name)


def threads_of(storage: Storage, threads: int | None, requests: int = 16) -> int | None:
    """Return the number of threads that read a storage; None for the usual number.

    It is the caller's number, if there is one. Otherwise, a storage that is read by requests gets a thread for each
    request in flight, and other storages get the usual number.

    Args:
        storage: Storage that is read.
        threads: Number that the caller asked for; None for the usual one.
        requests: Maximum number of requests in flight, for storages that read by requests.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> threads_of(MemoryStorage(), None) is None, threads_of(MemoryStorage(), 4)
        (True, 4)
    """
    return requests if threads is None and can(storage).read_range is not None else threads


def abort_open_uploads(storage: Storage, is_left: Callable[[str, float], bool]) -> None:
    """Abort uploads that interrupted saves have left open in a folder; does nothing on storages without uploads.

    Args:
        storage: Storage of the folder.
        is_left: Function from a file's name and the age of its upload in seconds to whether the upload may be aborted.
    """
    if (abort := can(storage).abort_uploads) is not None:
        abort("", is_left)
