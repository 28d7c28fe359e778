"""A folder that is made at once, and waited for beside other work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import StorageError
from ._local import LocalStorage
from ._storage import Storage
from ._sync import parents_to_be


def new_folder(storage: Storage, *, durable: bool) -> Callable[[], None]:
    """Make a storage's own folder, and return what waits until it is on the medium, if it shall be.

    A storage of another kind than a local one waits here.

    Raises:
        StorageError: it can't be made; or, of what is returned, it can't be waited for.

    Examples:
        >>> import tempfile
        >>> storage = LocalStorage(f"{tempfile.mkdtemp()}/runs/step_10")
        >>> wait = new_folder(storage, durable=True)
        >>> storage.is_folder(), wait()
        (True, None)
    """
    if not (durable and isinstance(storage, LocalStorage)):
        storage.make_folder(durable=durable)
        return partial(_wait_for, ())
    # The folder itself may be of a moment ago, and made by somebody who didn't wait.
    parents = parents_to_be(storage.root) or [os.path.dirname(os.path.realpath(storage.root))]
    storage.make_folder(durable=False)
    return partial(_wait_for, parents)


def _wait_for(folders: Sequence[str]) -> None:
    for folder in folders:
        try:
            LocalStorage(folder).sync_folder()
        except StorageError as error:
            # Other people's: one that can't be listed can't be waited for.
            if not isinstance(error.__cause__, PermissionError):
                raise
