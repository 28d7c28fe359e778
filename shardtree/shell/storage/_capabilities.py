"""What a storage can do beyond `Storage`: a value beside it, and what is done instead where it can't."""

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
"""A call of a storage: it takes the name of a file or folder first."""

ReadRange = Callable[[str, int, int], tuple[Buffer, int]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a listing.

    Attributes:
        length: in bytes.
        changed: when it was changed last, in seconds by the storage's own clock.
    """

    length: int
    changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a storage can do beyond `Storage`: functions, None where it can't; a storage has it as its ``capabilities``.

    A storage without the attribute can do none of it. Functions that are described together come together. All raise
    StorageError, and name the file.

    Attributes:
        move: ``(old, new)``: renames a file, replacing the file of that name, in one step if the storage can. Else it
            is copied.
        write_parts: ``(name, length, parts, *, durable)``: writes into a file, at the same time as other ranks do.
            Parts are pairs of the byte that one begins at and its bytes. All writers give the same length, which the
            file has afterwards; bytes that none writes are zero in a new file and unchanged in an old one. Else a file
            has one writer, who writes it whole and in order.
        make_folder: ``(name, *, durable)``: makes a folder and those above it, if they aren't there, and waits until
            they are on the medium if `durable`. Else a folder is there as soon as a file is in it.
        is_folder: ``(name)``: whether there is a folder of that name, maybe an empty one.
        remove_folder: ``(name)``: removes a folder if it is empty.
        sync_folder: ``(name)``: waits until what was made or removed in a folder is on the medium. Else it is by then.
        is_link: ``(name)``: whether a name is a symbolic link.
        folder: ``(name)``: returns a folder in it as a storage that can do as much.
        sibling: ``(name)``: returns the `Sibling` that a save of that name makes, or has made, beside this folder.
        siblings: ``()``: returns the names of the saves that have made one, sorted.
        locked: ``(folder="")``: returns a context manager that waits for a folder's lock and holds it. Of the threads
            and processes of a machine one has it at a time; it isn't reentrant, and goes with the process.
        replace_if: ``(name, before, data)``: gives a file new content in one step if it has its old content, None if it
            isn't there. Returns whether an answer says that it was done. If False, the file has changed, or no answer
            came: then it may have the new content, or get it yet. The request isn't repeated.
        mark: ``(name, data)``: creates a file, and returns whether conditions are honoured: some servers pass over
            them, and a file that is created twice is created twice.
        entries: ``(folder="", *, deep=True)``: returns the `Entry` of each file in a folder by its name in it, however
            deep, by few requests. Without `deep`, those directly inside, and folders, whose names end in ``/``.
        content: ``(name, most=None)``: returns a file's bytes by one request, None if there is no such file; raises
            CorruptCheckpoint if it has more than `most` bytes, which aren't fetched.
        remove_all: ``(names)``: removes files; nothing happens to those that aren't there.
        read_range: ``(name, begin, end)``: returns these bytes, as far as the file has them, and its length, in any
            thread. Where it is there, each read is a request, which takes long, and many are made side by side.
        abort_uploads: ``(folder, is_left)``: gives up uploads that interrupted saves left open in a folder, if
            ``is_left(name, seconds)`` says so of the name of its file and its age.
        late_requests: whether a request may be carried out after whoever sent it has ended.
        latency: Duration of the last small request, in seconds; None if there was none, 0 if reading takes no request.
        refusals: what its file system has refused, such as to sync folders, and a save did without.
        request_scale: how many times as long as usual the requests are by which long files are moved.

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
        """Return capabilities that are a storage's methods of these names, and more by their names."""
        return cls(**{name: getattr(storage, name) for name in names}, **more)

    def functions(self) -> dict[str, Function]:
        """Return the functions that are there, by their names."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if callable(value)}


_NOTHING = Capabilities()


def can(storage: Storage) -> Capabilities:
    """Return what a storage can do beyond `Storage`."""
    capabilities: Capabilities = getattr(storage, "capabilities", _NOTHING)
    return capabilities


# What is done instead where a storage can't.


def move(storage: Storage, old: str, new: str) -> None:
    """Rename a file, replacing the file of that name.

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
        # As a whole: a file's name may be what makes it a checkpoint, and half of it would count as one.
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
        parts: Bytes, each with the place of the first.
        durable: Whether the file is on the medium when this returns.
        progress: Function that is called with the number of bytes written, once a MiB or all is.

    Raises:
        StorageError: the storage takes files whole, and the parts aren't a whole one.
    """
    parts = parts if progress is None else reported_parts(parts, progress)
    if (write := can(storage).write_parts) is not None:
        write(name, length, parts, durable=durable)
        return
    buffers = whole(parts, length, storage.where(name))
    # Taken first, so that an error about it is raised before anything is written.
    first = list(islice(buffers, 1))
    storage.write(name, SizedBuffers(length, chain(first, buffers)), durable=durable)


def make_folder(storage: Storage, name: str = "", *, durable: bool = True) -> None:
    """Make a folder and those above it, where a folder isn't there as soon as a file is in it."""
    if (make := can(storage).make_folder) is not None:
        make(name, durable=durable)


def is_folder(storage: Storage, name: str = "") -> bool:
    """Return whether there is a folder of that name.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> is_folder(MemoryStorage(), "a")
        False
    """
    look = can(storage).is_folder
    return bool(storage.names(name)) if look is None else look(name)


def remove_folder(storage: Storage, name: str) -> None:
    """Remove a folder if it is empty, where it doesn't go with its last file."""
    if (remove := can(storage).remove_folder) is not None:
        remove(name)


def sync_folder(storage: Storage, name: str = "") -> None:
    """Wait until what was made or removed in a folder is on the medium."""
    if (sync := can(storage).sync_folder) is not None:
        sync(name)


def siblings(storage: Storage) -> dict[str, Sibling]:
    """Return the folders that saves have made beside a storage's own, by the names of the saves, sorted."""
    sibling, names = can(storage).sibling, can(storage).siblings
    return {name: sibling(name) for name in names()} if sibling is not None and names is not None else {}


def locked(storage: Storage) -> AbstractContextManager[None]:
    """Return a context manager that holds the lock of a storage's own folder; one without effect where there is none.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> with locked(MemoryStorage()):
        ...     pass
    """
    lock = can(storage).locked
    return nullcontext() if lock is None else lock()


def is_link(storage: Storage, name: str) -> bool:
    """Return whether a name is a symbolic link; False on storages without links."""
    look = can(storage).is_link
    return look is not None and look(name)


_DEEPEST = 64  # levels of folders that are entered, so that the recursion is bounded


def files_in(
    storage: Storage, folder: str = "", takes: Callable[[str], object] = bool, depth: int = 0
) -> Iterator[str]:
    """Yield the names of all files in a folder and in folders in it, and of links without following them.

    Args:
        storage: where they are.
        folder: in it; "" for all.
        takes: whether what has some last part of its name is looked at.
        depth: of the folder.

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
    """Yield the name and length of each of `files_in`, or of the one file that a storage is.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("a/b", b"123", durable=False)
        >>> [*file_lengths(storage)]
        [('a/b', 3)]
    """
    names = files_in(storage) if storage.length("") is None else [""]
    # What has no length isn't a file: a link to a folder.
    yield from ((name, length) for name in names if (length := storage.length(name)) is not None)


def remove_files(storage: Storage, names: Sequence[str]) -> None:
    """Remove files in any order, by one request where that can be done.

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
    """Return a file's bytes, None if there is no such file.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> read_if_there(MemoryStorage(), "metadata.json") is None
        True
    """
    if (content := can(storage).content) is not None:
        return content(name)
    return None if storage.length(name) is None else storage.read(name)


def threads_of(storage: Storage, threads: int | None, requests: int = 16) -> int | None:
    """Return how many threads read a storage: those of the caller, else as many as requests may be in flight.

    Args:
        storage: where reads may be requests, which wait nearly all the time.
        threads: what the caller says; None for the usual number.
        requests: how many may be in flight.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> threads_of(MemoryStorage(), None) is None, threads_of(MemoryStorage(), 4)
        (True, 4)
    """
    return requests if threads is None and can(storage).read_range is not None else threads


def abort_open_uploads(storage: Storage, is_left: Callable[[str, float], bool]) -> None:
    """Give up uploads that interrupted saves have left open in a folder; nothing where there are no such.

    Args:
        storage: the folder.
        is_left: whether an upload may be given up, by the file's name and the seconds since it began.
    """
    if (abort := can(storage).abort_uploads) is not None:
        abort("", is_left)
