"""A folder that is made at once, waited for beside other work, and removed again where nothing came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import StorageError
from ._fsspec import FsspecStorage
from ._local import LocalStorage
from ._memory import MemoryStorage
from ._storage import Storage
from ._sync import parents_to_be


@dataclass(frozen=True, slots=True)
class NewFolder:
    """What can be done about a folder that was made.

    Attributes:
        wait: waits until it is on the medium, if it shall be; raises StorageError where that fails.
        remove: removes it, unless it was there before or something is in it by now. What was made above it
            stays: another save may be about to make its own folder there.
    """

    wait: Callable[[], None]
    remove: Callable[[], None]


def new_folder(storage: Storage, *, durable: bool) -> NewFolder:
    """Make a storage's own folder; in memory and on object stores the first file in it does that.

    A storage of another kind than a local one waits here, and its folder stays.

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
    if isinstance(storage, MemoryStorage | FsspecStorage):
        return NewFolder(_nothing, _nothing)
    if not isinstance(storage, LocalStorage):
        storage.make_folder(durable=durable)
        return NewFolder(_nothing, _nothing)
    parents = parents_to_be(storage.root)
    storage.make_folder(durable=False)
    # The folder itself may be of a moment ago, and made by somebody who didn't wait.
    waited_for = (parents or [os.path.dirname(os.path.realpath(storage.root))]) if durable else ()
    return NewFolder(partial(_wait_for, waited_for), partial(storage.remove_folder, "") if parents else _nothing)


def _nothing() -> None:
    pass


def _wait_for(folders: Sequence[str]) -> None:
    for folder in folders:
        try:
            LocalStorage(folder).sync_folder()
        except StorageError as error:
            # Other people's: one that can't be listed can't be waited for.
            if not isinstance(error.__cause__, PermissionError):
                raise
