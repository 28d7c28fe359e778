"""What dead saves left behind: found and removed by the next save that is committed, never those of a live one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import CheckpointingException
from ...storage import Exchanging, Storage, is_alive, is_temporary, release
from ...strategies import Draft, Strategies, is_left_over, is_save_folder, remove_save, stamp
from ._replace import remove_sibling

logger = logging.getLogger("shardtree")


def clean_up(draft: Draft, strategies: Strategies | None, *, removes_saves: bool) -> None:
    """Remove what a committed save replaced, and what dead saves have left in the folder and beside it; on rank 0.

    Args:
        draft: the save.
        strategies: the dispatch table; None for the process's.
        removes_saves: whether its format removes the folders of dead saves itself.
    """
    if draft.world.rank != 0:
        return
    release(draft.save_id)
    storage = draft.storage if draft.replaced is None else draft.replaced.storage
    with _told(storage):
        before = max((changed for *_, changed in stamp(storage)), default=0.0) - draft.options.stale_after
        _remove_siblings(draft, storage, before, strategies)
        for name in storage.names():
            if is_save_folder(name):
                if not removes_saves and name != draft.save_id and is_left_over(storage, name, before=before):
                    remove_save(storage, name)
            elif is_temporary(name) and (storage.changed(name) or 0.0) < before:
                storage.remove(name)


def _remove_siblings(draft: Draft, storage: Storage, before: float, strategies: Strategies | None) -> None:
    if not isinstance(storage, Exchanging):
        return
    for save_id in storage.siblings():
        if not is_save_folder(save_id):
            continue
        sibling = storage.sibling(save_id)
        alive = is_alive(sibling.note()) if save_id != draft.save_id else False
        if alive is None:
            alive = not (sibling.changed() or 0.0) < before
        if not alive:
            with _told(storage):
                remove_sibling(storage, sibling, strategies, durable=draft.options.durable)


@contextmanager
def _told(storage: Storage) -> Iterator[None]:
    try:
        yield
    except CheckpointingException as error:
        # The checkpoint is saved; what couldn't be removed is tried again by the next save.
        logger.warning("save: left-overs of earlier saves stay in or beside %s: %s", storage.where(), error)
