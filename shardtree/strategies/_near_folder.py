"""A folder that isn't there: the one beside it that may be meant."""

from __future__ import annotations

from contextlib import suppress

from ..errors import StorageError
from ..plans import near_names
from ..storage import LocalStorage, Storage


def near_folder(storage: Storage) -> str | None:
    """Return the sentence that names the folder beside a local one that isn't there whose name is most like it.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> LocalStorage(folder).make_folder("step-100")
        >>> near_folder(LocalStorage(f"{folder}/stpe-100")).removeprefix(f"Did you mean '{folder}")
        "/step-100'?"
    """
    above, sign, name = storage.where().rpartition("/")
    if not isinstance(storage, LocalStorage) or not sign:
        return None
    with suppress(StorageError):
        names = [one for one in LocalStorage(above or sign).names() if not one.startswith(".")]
        near = near_names([name], names).get(name)
        return None if near is None else f"Did you mean {f'{above}/{near}'!r}?"
    return None
