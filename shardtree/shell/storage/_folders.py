"""The storage of a path or URL, and folders within a storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.deferred import leaf
from ...errors import StorageError, error_text
from ._capabilities import Function, can, make_folder
from ._local import LocalStorage, SavingStorage
from ._local_files import parents_of_missing
from ._refusals import Refusal, Refusals, elsewhere, sync_above
from ._storage import Storage, inside
from ._wrapped import Wrapped, around

# Folders within a storage.


def folder_in(storage: Storage, name: str) -> Storage:
    """Return a folder of a storage as a storage; it needn't exist yet.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> whole = MemoryStorage()
        >>> folder_in(whole, "step_10").replace("a.txt", b"abc", durable=False)
        >>> whole.read("step_10/a.txt"), folder_in(LocalStorage("/runs"), "step_10")
        (b'abc', LocalStorage(root='/runs/step_10'))
    """
    if not (plain := inside(name, storage.where())):
        return storage
    # Of the same kind where that has one, so that it can do the same: exchange whole folders, for one.
    if (folder := can(storage).folder) is not None:
        return folder(plain)
    wrapper: Storage = around(storage, partial(_in_folder, plain), plain)
    return wrapper


def _in_folder(folder: str, call: str, function: Function) -> Function | None:
    # The folder that siblings are beside is another one.
    return None if call in ("sibling", "siblings") else _InFolder(folder, call, function)


@dataclass(frozen=True, slots=True)
class _InFolder:
    """A storage's call with the folder's name before all names that it is given; a value, so that it can be pickled."""

    folder: str
    call: str
    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.call == "remove_all":
            (names,) = (*args, *kwargs.values())
            return self.function([*map(self._full, names)])
        if not args:  # positional: storages call it by other names; the folder itself is the usual one
            args = (kwargs.pop(next((each for each in ("name", "folder", "old") if each in kwargs), ""), ""),)
        return self.function(*map(self._full, args), **{key: self._full(value) for key, value in kwargs.items()})

    def _full(self, name: Any) -> Any:
        if not isinstance(name, str):
            return name
        plain = inside(name, self.folder)  # the storage would check its own root only, and let "../" leave this folder
        return "/".join(filter(None, (self.folder, plain)))


# The storage of a path or URL.

Directory = str | os.PathLike[str] | Storage
"""Where a checkpoint is: a path, a URL of a file system that fsspec supports, or a storage."""


def storage_at(directory: Directory) -> Storage:
    """Return the storage of a directory; a relative path is made absolute now, in case the process changes directory.

    Raises:
        StorageError: the directory is neither a path, nor a URL, nor a storage.

    Examples:
        >>> storage_at("/checkpoints/step_10")
        LocalStorage(root='/checkpoints/step_10')
    """
    if isinstance(directory, (str, os.PathLike)):
        path = os.fspath(directory)
        if isinstance(path, str) and path and "\0" not in path:
            if "://" not in path:
                return LocalStorage(_absolute(path))
            remote: Storage = leaf("storage_behind")(path)
            return remote
    elif isinstance(directory, Storage):
        return directory
    kind = type(directory).__name__
    raise StorageError(
        error_text("where is the checkpoint?", found=f"{directory!r} ({kind})", expected="a path, a URL or a Storage")
    )


def is_same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages are the same folder, links resolved.

    Examples:
        >>> is_same_place(storage_at("/runs/step_10"), storage_at("/runs/step_9/../step_10/"))
        True
    """
    return _place(one) == _place(other)


def _place(storage: Storage) -> tuple[object, str]:
    """Return the storage that has the files, and the folder in it."""
    folder = ""
    inner: object = storage
    while isinstance(inner, Wrapped):
        folder = "/".join(filter(None, (inner.inside, folder)))
        inner = inner.inner
    if isinstance(inner, LocalStorage):
        return LocalStorage, os.path.realpath(os.path.join(inner.root, folder))
    return inner, folder


def _absolute(path: str) -> str:
    # Not os.path.abspath: it drops "link/..", which is another folder where the link leads elsewhere.
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        problem = "the current directory was removed"
        raise StorageError(error_text(f"where is {path!r}?", found=problem, fix="Name an absolute path.")) from error


def with_own_refusals(storage: Storage) -> Storage:
    """Return a storage that keeps what its file system refuses apart, for one save; itself if it isn't a local one.

    Examples:
        >>> with_own_refusals(storage_at("/runs/step_10"))
        SavingStorage(root='/runs/step_10')
    """
    return SavingStorage(storage.root) if type(storage) is LocalStorage else storage


def take_refusals(storage: Storage, *others: Storage) -> tuple[Refusal, ...]:
    """Return the refusals of a file system to one save, and forget them.

    Args:
        storage: Folder that the save writes.
        others: Other folders of the save, such as the one that is replaced.

    Examples:
        >>> storage = with_own_refusals(storage_at("/runs/step_10"))
        >>> storage.refusals.note("sync", "/runs", "Invalid argument")
        >>> [refusal.kind for refusal in take_refusals(storage)], take_refusals(storage)
        (['sync'], ())
    """
    if (refusals := can(storage).refusals) is None:
        return ()
    # Where all calls of the process share them, those of others are neither this save's nor lost to it.
    return refusals.take_of(one.where() for one in (storage, *others)) if refusals is elsewhere else refusals.take()


# Making a checkpoint's folder, which is synced later and removed again if the save fails.


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A folder that was made for a save.

    Attributes:
        wait: waits until it is on the medium, if the save is durable; raises StorageError where that fails.
        remove: removes it, unless it existed before or isn't empty. Parents that were made stay: another save may be
            about to make its own folder there.
    """

    wait: Callable[[], None]
    remove: Callable[[], None]


def new_folder(storage: Storage, *, durable: bool) -> NewFolder:
    """Make a storage's own folder, where it doesn't begin to exist with its first file.

    Other storages than local ones wait here, and their folder isn't removed again.

    Raises:
        StorageError: it can't be made.

    Examples:
        >>> import tempfile
        >>> storage = LocalStorage(f"{tempfile.mkdtemp()}/runs/step_10")
        >>> made = new_folder(storage, durable=True)
        >>> storage.is_folder(), made.wait()
        (True, None)
        >>> made.remove()
        >>> storage.is_folder()
        False
    """
    if not isinstance(storage, LocalStorage):
        make_folder(storage, durable=durable)
        return NewFolder(_do_nothing, _do_nothing)
    parents = parents_of_missing(storage.root)
    storage.make_folder(durable=False)
    # Not synced here: that is waited for while the data is written, and before the commit. Also if the folder exists:
    # it may have just been made by a process that didn't sync its parent.
    waited_for = (parents or [os.path.dirname(os.path.realpath(storage.root))]) if durable else ()
    remove = partial(storage.remove_folder, "") if parents else _do_nothing
    return NewFolder(partial(_wait_for, waited_for, storage.refusals), remove)


def _do_nothing() -> None:
    pass


def _wait_for(folders: Sequence[str], refusals: Refusals) -> None:
    for folder in folders:
        try:
            sync_above([folder], refusals)
        except OSError as error:
            raise StorageError(error_text(f"cannot sync {folder!r}", found=error.strerror)) from error
