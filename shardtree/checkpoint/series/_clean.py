"""What steps that were never finished left behind."""

from __future__ import annotations

import time

from ...storage import Storage, folder_in, is_link, is_temporary
from ...strategies import Strategies, is_left_over, is_save_folder, remove_save
from .._open import is_checkpoint
from ._files import is_being_saved
from ._names import step_number
from ._record import RECORD_FILE
from ._remove import finish_removals


def clean(root: Storage, names: str, strategies: Strategies | None, *, stale_after: float) -> tuple[str, ...]:
    """Finish removals that were cut short, remove what dead saves of unfinished steps left, and return what stays.

    Args:
        root: the folder of all steps.
        names: the format of their folders' names.
        strategies: the dispatch table; None for the process's.
        stale_after: seconds without a change after which a save of which nothing else is known counts as dead.

    Returns:
        The folders of unfinished steps that are still there: saves on their way, and files that nobody can tell the
        owner of.
    """
    finish_removals(root, names)
    before = time.time() - stale_after
    unfinished = [folder for folder in root.names() if _is_unfinished(root, folder, names, strategies)]
    for folder in unfinished:
        _clean_step(root, folder, before)
    return tuple(folder for folder in unfinished if root.is_folder(folder))


def _is_unfinished(root: Storage, folder: str, names: str, strategies: Strategies | None) -> bool:
    if step_number(names, folder) is None or is_link(root, folder) or not root.is_folder(folder):
        return False
    return not is_checkpoint(folder_in(root, folder), strategies=strategies)


def _clean_step(root: Storage, folder: str, before: float) -> None:
    storage = folder_in(root, folder)
    for name in storage.names():
        if is_save_folder(name) and is_left_over(storage, name, before=before):
            remove_save(storage, name)
    if is_being_saved(storage):
        return
    for name in storage.names():
        if name == RECORD_FILE or (is_temporary(name) and (storage.changed(name) or 0.0) < before):
            storage.remove(name)
    root.remove_folder(folder)
