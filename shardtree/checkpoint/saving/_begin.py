"""The beginning of a save: it gets a name, and a folder that every rank sees."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace
from functools import partial
from typing import Any

from ...errors import AlreadyACheckpoint, CorruptCheckpoint, StorageError, error_text
from ...storage import Exchanging, Storage, claim, new_folder, release
from ...strategies import (
    MANIFEST_FILE,
    METADATA_FILE,
    Draft,
    Replaced,
    SaveOptions,
    Stamp,
    Strategies,
    StrategyAction,
    decode_metadata,
    disown,
    find_strategy,
    is_of_others,
    is_save_folder,
    make_save_folder,
    metadata_bytes,
    save_is_alive,
    stamp,
)
from ...world import World, on_rank_zero
from .._dispatch import DEFAULT_BACKEND, Backends, common_backend, sharded_backend
from .._open import recognized
from ._replace import make_sibling, sibling_of

logger = logging.getLogger("shardtree")


def begin(
    world: World,
    storage: Storage,
    options: SaveOptions,
    backends: Backends,
    strategies: Strategies,
    *,
    overwrite: bool,
) -> tuple[Draft, Stamp | None]:
    """Return the draft of a checkpoint, its folder made, and the stamp of what is exchanged in the end; collective.

    Each rank has still to find out whether it sees the folder.

    Args:
        world: who saves together.
        storage: where to.
        options: how.
        backends: of the shards and of the common state.
        strategies: the dispatch table.
        overwrite: whether a checkpoint that is already there may be replaced.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        StrategyError: it is given, and a format has files with fixed names where two folders can't be exchanged.
        StorageError: the folder can't be made, or another program's metadata.json is in it.
    """
    memo: dict[str, Any] = {}
    make = partial(_make_folder, storage, backends, strategies, memo, overwrite=overwrite, durable=options.durable)
    save_id, before, old = on_rank_zero(world, "save: make the folder", make)
    if world.rank == 0:
        memo["claim"] = claim(save_id)
    return Draft(storage, save_id, world, before, options, memo=memo), old


def end(draft: Draft) -> None:
    """Let a save count as ended, and remove the folder that it has made unless files are in it. Never raises."""
    if draft.world.rank != 0:
        return
    release(draft.save_id)
    storage = draft.storage if draft.replaced is None else draft.replaced.storage
    try:
        if draft.replaced is None:
            disown(storage, draft.save_id)
        if isinstance(storage, Exchanging) and storage.sibling(draft.save_id).is_exchanged() is False:
            storage.sibling(draft.save_id).remove()  # files or not: nothing but a draft is in it
    except Exception as error:
        # The save's own error is on its way; what stays is removed by a later save.
        logger.warning("save: what a failed save wrote stays in or beside %s: %s", storage.where(), error)


def _make_folder(
    storage: Storage,
    backends: Backends,
    strategies: Strategies,
    memo: dict[str, Any],
    *,
    overwrite: bool,
    durable: bool,
) -> tuple[str, bytes | None, Stamp | None]:
    """Return the name of a save that has its folder, metadata.json as it is, and the stamp of what is exchanged.

    What waits for the folder is put into `memo`: it is done beside the writing, where nobody else waits for it.
    """
    if storage.length("") is not None:
        raise StorageError(error_text(f"save: {storage.where()!r} is a file, not a folder", fix="Save to a folder."))
    before = metadata_bytes(storage)
    if before is not None and is_of_others(before):
        what = f"save: {storage.where(METADATA_FILE)!r} belongs to another program"
        raise StorageError(error_text(what, fix="Save to another folder: a checkpoint has a file of that name."))
    there = before is not None or recognized(storage, strategies) is not None
    if there and not overwrite:
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        raise AlreadyACheckpoint(error_text(f"save: {storage.where()!r} already holds a checkpoint", fix=fix))
    save_id = f"save-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"
    if there and not (_is_native(backends) and _leaves_room(before, strategies)):
        old = stamp(storage)
        make_sibling(storage, save_id, strategies, durable=durable)
        return save_id, None, old
    if not _is_native(backends) and storage.length(MANIFEST_FILE) is not None:
        what = f"save: {storage.where(MANIFEST_FILE)!r} tells of files that are there no more, or aren't a checkpoint"
        raise StorageError(error_text(what, fix="Remove it, or save to another folder: loads would check files by it."))
    memo["wait"] = new_folder(storage, durable=durable)
    make_save_folder(storage, save_id, durable=False)  # the commit waits for what is in the storage's own folder
    if not _is_native(backends):
        _check_alone(storage, save_id)
    return save_id, before, None


def _is_native(backends: Backends) -> bool:
    return {name for name, _ in backends} == {DEFAULT_BACKEND[0]}


def _leaves_room(before: bytes | None, strategies: Strategies) -> bool:
    """Return whether the checkpoint that is there goes when metadata.json does: its files are in its save's folder.

    That is taken for granted of formats that don't list their files, and of what can't be read anyway.
    """
    try:
        fields = decode_metadata(before, METADATA_FILE) if before is not None else None
    except CorruptCheckpoint:
        return True
    if fields is None:
        return False
    others = {sharded_backend(fields), common_backend(fields)} - {DEFAULT_BACKEND}
    return not any(find_strategy(StrategyAction.LIST_FILES, *each, strategies=strategies) for each in others)


def _check_alone(storage: Storage, save_id: str) -> None:
    """Raise where another save is on its way to the folder, and would write to files of the same names."""
    others = (name for name in storage.names() if is_save_folder(name) and name != save_id)
    if any(save_is_alive(storage, name) for name in others):
        release(save_id)
        disown(storage, save_id)
        fix = "Let only one save at a time go to a folder; wait for the other one, or abandon it."
        raise StorageError(error_text(f"save: another save is on its way to {storage.where()!r}", fix=fix))


def seen(draft: Draft, old: Stamp | None) -> Draft:
    """Return a draft that goes to the folder that rank 0 made for it, once it is known that this rank sees that.

    Args:
        draft: as `begin` gives it.
        old: the stamp of the checkpoint whose place the draft takes in the end, None where it has its place.

    Raises:
        StorageError: this rank doesn't see the folder.
    """
    storage, begun = draft.storage, draft
    if old is not None:
        sibling = sibling_of(storage, draft.save_id)
        begun = replace(draft, storage=sibling.storage, replaced=Replaced(storage, sibling, old))
    if not begun.storage.is_folder(draft.save_id):
        what = f"save: {storage.where()!r} is not shared: rank {draft.world.rank} doesn't see what rank 0 made in it"
        raise StorageError(error_text(what, fix="Save to a folder on storage that all ranks share."))
    return begun
