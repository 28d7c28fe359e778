"""Removal of the orphaned files of interrupted saves, after the next commit; files of saves in progress are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ....errors import CheckpointingException
from ...storage import Storage, can, is_left_over, is_temporary, release, siblings
from ...table import (
    PendingSave,
    Strategies,
    deciding_files,
    disown,
    is_committed,
    is_orphaned,
    is_save_folder,
    remove_interrupted,
    stamp,
)
from ._replace import is_live, remove_sibling

logger = logging.getLogger("shardtree")


def clean_up(pending: PendingSave, strategies: Strategies | None, *, removes_saves: bool) -> None:
    """On rank 0, remove the files that a committed save replaced, and orphaned files in and beside its folder.

    Args:
        pending: The save.
        strategies: Dispatch table; None for the process's.
        removes_saves: Whether the format's own clean-up already removes the folders of interrupted saves.
    """
    if pending.world.rank != 0:
        return
    release(pending.save_id)
    storage = pending.destination
    if can(storage).replace_if is not None and removes_saves:
        return  # object stores have no temporary files that are moved to their places
    # Errors here don't fail the save, whose checkpoint is published by now.
    with _logging_failure(storage):
        if pending.replaced is None:
            disown(storage, pending.save_id)
        # The time of this commit is taken by the storage's clock, since this machine's may differ by hours.
        changes = (time for *_, time in stamp(storage, deciding_files(strategies)))
        before = max(changes, default=0.0) - pending.options.stale_after
        _remove_siblings(pending, storage, before, strategies)
        for name in storage.names():
            if is_save_folder(name):
                if removes_saves or name == pending.save_id or not is_orphaned(storage, name, before=before):
                    continue
                # A later save that was committed meanwhile has no note left, and its process may have ended.
                if not is_committed(storage, name):
                    remove_interrupted(storage, name)
            elif is_left_over(name) or (is_temporary(name) and (storage.changed(name) or 0.0) < before):
                storage.remove(name)


def _remove_siblings(pending: PendingSave, storage: Storage, before: float, strategies: Strategies | None) -> None:
    for save_id, sibling in siblings(storage).items():
        if not is_save_folder(save_id):
            continue
        if save_id == pending.save_id or not is_live(save_id, sibling, before=before):
            with _logging_failure(storage):
                remove_sibling(storage, sibling, strategies, durable=pending.options.durable)


@contextmanager
def _logging_failure(storage: Storage) -> Iterator[None]:
    try:
        yield
    except CheckpointingException as error:
        # The next save tries again.
        logger.warning("save: orphaned files of earlier saves stay in or beside %s: %s", storage.where(), error)
