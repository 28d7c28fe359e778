"""The storage of a path or URL, and storages of subfolders."""

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
    """Return the storage of a subfolder, which needn't exist yet.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> whole = MemoryStorage()
        >>> folder_in(whole, "step_10").replace("a.txt", b"abc", durable=False)
        >>> whole.read("step_10/a.txt"), folder_in(LocalStorage("/runs"), "step_10")
        (b'abc', LocalStorage(root='/runs/step_10'))
    """
    if not (plain := inside(name, storage.where())):
        return storage
    # The storage's own method keeps its abilities, such as exchanging whole folders; a wrapper would lose some.
    if (folder := can(storage).folder) is not None:
        return folder(plain)
    wrapper: Storage = around(storage, partial(_in_folder, plain), plain)
    return wrapper


def _in_folder(folder: str, call: str, function: Function) -> Function | None:
    # Siblings lie beside the storage's own folder, not beside this subfolder.
    return None if call in ("sibling", "siblings") else _InFolder(folder, call, function)


@dataclass(frozen=True, slots=True)
class _InFolder:
    """A method of a storage that prefixes a subfolder to all file names; a dataclass, so that it can be pickled."""

    folder: str
    call: str
    function: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.call == "remove_all":
            (names,) = (*args, *kwargs.values())
            return self.function([*map(self._full, names)])
        if not args:  # passed by position, since storages name this parameter differently; the default is the folder
            args = (kwargs.pop(next((key for key in ("name", "folder", "old") if key in kwargs), ""), ""),)
        return self.function(*map(self._full, args), **{key: self._full(value) for key, value in kwargs.items()})

    def _full(self, name: Any) -> Any:
        if not isinstance(name, str):
            return name
        plain = inside(name, self.folder)  # the storage checks its own root only: "../" could leave this folder
        return "/".join(filter(None, (self.folder, plain)))


# The storage of a path or URL.

Directory = str | os.PathLike[str] | Storage
"""Location of a checkpoint: a path, a URL of a file system that fsspec supports, or a storage."""


def storage_at(directory: Directory) -> Storage:
    """Return the storage of a directory. A relative path is resolved now, in case the process changes its directory.

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
        error_text("invalid directory", found=f"{directory!r} ({kind})", expected="a path, a URL or a Storage")
    )


def is_same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages are the same folder after resolving links.

    Examples:
        >>> is_same_place(storage_at("/runs/step_10"), storage_at("/runs/step_9/../step_10/"))
        True
    """
    return _place(one) == _place(other)


def _place(storage: Storage) -> tuple[object, str]:
    """Return the identity of a storage's folder: the innermost wrapped storage, and the folder within it.

    For local storages, it is their class and the folder's real path.
    """
    folder = ""
    inner: object = storage
    while isinstance(inner, Wrapped):
        folder = "/".join(filter(None, (inner.inside, folder)))
        inner = inner.inner
    if isinstance(inner, LocalStorage):
        return LocalStorage, os.path.realpath(os.path.join(inner.root, folder))
    return inner, folder


def _absolute(path: str) -> str:
    # os.path.abspath would drop "link/..", which is another folder if the link leads elsewhere.
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        text = error_text(f"{path!r} is relative, and the current directory was removed", fix="Pass an absolute path.")
        raise StorageError(text) from error


def with_own_refusals(storage: Storage) -> Storage:
    """Return a storage for a single save; if it is local, it has its own record of refused requests.

    The file system may refuse, for example, to sync a folder or to change its owner. The save goes on without that, and
    reports it as a `Refusal`. Storages that aren't local are returned unchanged.

    Examples:
        >>> with_own_refusals(storage_at("/runs/step_10"))
        SavingStorage(root='/runs/step_10')
    """
    return SavingStorage(storage.root) if type(storage) is LocalStorage else storage


def take_refusals(storage: Storage, *others: Storage) -> tuple[Refusal, ...]:
    """Return the refusals that were recorded during a save, and forget them; see `with_own_refusals`.

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
    # `elsewhere` is shared by all calls of the process: only refusals for this save's folders are taken from it.
    return refusals.take_of(item.where() for item in (storage, *others)) if refusals is elsewhere else refusals.take()


# A checkpoint's new folder is synced after it is made, and removed again if the save fails.


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A folder that was made for a save.

    Attributes:
        wait: Function that waits until the folder is on the medium if the save is durable, or raises StorageError.
        remove: Function that removes the folder, unless it existed before or isn't empty. New parents stay, since
            another save may be about to make its own folder there.
    """

    wait: Callable[[], None]
    remove: Callable[[], None]


def new_folder(storage: Storage, *, durable: bool) -> NewFolder:
    """Make a storage's own folder, and return functions that sync and remove it.

    Storages other than local ones sync at once, and their folder isn't removed again.

    Raises:
        StorageError: the folder can't be made.

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
    # The folder is synced while the data is written, before the commit. An existing folder is synced too: a process
    # that didn't sync its parent may have just made it.
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
