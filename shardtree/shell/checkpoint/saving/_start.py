"""Step 2 of a save on rank 0: look at the destination, name the save, make the folder that every rank must see."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ....errors import AlreadyACheckpoint, CorruptCheckpoint, StorageError, error_text
from ...storage import (
    Claim,
    Directory,
    NewFolder,
    Storage,
    Task,
    can,
    claim,
    is_folder,
    new_folder,
    release,
    storage_at,
    with_own_refusals,
)
from ...table import (
    METADATA_FILE,
    PendingSave,
    Replaced,
    SaveOptions,
    Strategies,
    StrategyAction,
    deciding_files,
    decode_metadata,
    disown,
    find_strategy,
    is_of_others,
    is_save_folder,
    make_save_folder,
    manifests,
    metadata_bytes,
    new_save_id,
    stamp,
    traits_of,
)
from ...world import World, step
from .._dispatch import common_backend, sharded_backend
from .._open import recognize
from ._formats import Formats
from ._replace import make_sibling, sibling_of
from ._values import Save, Start

logger = logging.getLogger("shardtree")

T = TypeVar("T")


_FILE = re.compile(r".+\.(safetensors|bin|pt|pth)", re.DOTALL)


def named_file(where: Directory) -> str | None:
    """Return a destination's name if that is a single file's, as weights have; None for a folder's, or a storage.

    Examples:
        >>> named_file("/runs/model.safetensors"), named_file("/runs/step_10")
        ('model.safetensors', None)
    """
    if isinstance(where, Storage):
        return None
    name = os.fspath(where).rpartition("/")[2]
    return name if _FILE.fullmatch(name) and not is_folder(storage_at(where)) else None


def folder_at(where: Directory) -> Storage:
    """Return the storage of the folder that a save is to make or to write into.

    Raises:
        StorageError: it has a file's name, for which other programs would take it.
    """
    storage = storage_at(where)
    if named_file(where) is not None:
        fix = "Name a folder; convert(FOLDER, FILE, backend='huggingface') makes a single .safetensors file of it."
        raise StorageError(error_text(f"save: {storage.where()!r} names a file, and a save makes a folder", fix=fix))
    return with_own_refusals(storage)


def begin(save: Save, storage: Storage, undo: ExitStack) -> Save:
    """Return the save with `pending`, once its folder is made, and with what marks it as alive; on rank 0.

    Args:
        save: The save, its formats looked up.
        storage: The destination.
        undo: Stack that gets callbacks which remove the folder again, as long as nothing is in it.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and it may not be replaced.
        StrategyError: a checkpoint is to be replaced as a whole, and can't be.
        StorageError: the folder can't be made, or belongs to another program.
    """
    save_id = new_save_id()
    # Beside the look, where each takes a request: a checkpoint that is there won't refuse this save.
    at_once = save.overwrite and can(storage).replace_if is not None and save.formats.in_save_folder
    task = Task(partial(make_save_folder, storage, save_id, durable=False)) if at_once else None
    try:
        with step("save: look at the folder"):
            start = inspect_folder(storage, save.formats, overwrite=save.overwrite, save_id=save_id)
        pending = replace(pending_save(start, storage, save.world, save.options), overwrite=save.overwrite)
    except BaseException:
        if task is not None:
            task.drop()
            end(PendingSave(storage, save_id, save.world))
        raise
    with step("save: make the folder"):
        if task is None:
            own_claim, folder = make_folder(pending, save.formats, undo)
        else:
            own_claim, folder = task.result(), None
            undo.callback(end, pending)
    return replace(save, start=start, pending=pending, claim=own_claim, folder=folder)


def inspect_folder(storage: Storage, formats: Formats, *, overwrite: bool, save_id: str | None = None) -> Start:
    """Return the destination of a save, as it is before the save's folder is made. Nothing is changed.

    Args:
        storage: The destination.
        formats: The formats, looked up.
        overwrite: Whether a checkpoint that is already there may be replaced.
        save_id: The save's name; None for a new one.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        StorageError: another program's metadata.json is there, or no folder.
    """
    by_requests = can(storage).entries is not None
    is_file: Callable[[], int | None] = partial(storage.length, "")
    is_there: Callable[[], bool] = partial(is_recognized, storage, formats.strategies)
    if not overwrite:  # a new folder is likely, where all these looks are needed
        is_file, is_there = beside(storage, is_file), beside(storage, is_there)
    before = metadata_bytes(storage) if by_requests else None
    if before is None and is_file() is not None:
        raise StorageError(error_text(f"save: {storage.where()!r} is a file, not a folder", fix="Save to a folder."))
    if not by_requests:
        before = metadata_bytes(storage)
    if before is not None and is_of_others(before):
        what = f"save: {storage.where(METADATA_FILE)!r} belongs to another program"
        raise StorageError(error_text(what, fix="Save to another folder: a checkpoint has a file of that name."))
    there = before is not None or is_there()
    if there and not overwrite:
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        raise AlreadyACheckpoint(error_text(f"save: {storage.where()!r} already holds a checkpoint", fix=fix))
    save_id = new_save_id() if save_id is None else save_id
    # Files with fixed names can't be replaced one by one without a moment at which neither checkpoint is whole.
    if there and not (formats.in_save_folder and _goes_with_metadata(before, formats.strategies)):
        return save_id, None, stamp(storage, deciding_files(formats.strategies))
    names = () if formats.in_save_folder else manifests(formats.strategies)
    if (manifest := next((name for name in names if storage.length(name) is not None), None)) is not None:
        what = f"save: {storage.where(manifest)!r} lists files that no longer exist, or aren't a checkpoint"
        raise StorageError(error_text(what, fix="Remove it, or save to another folder: loads would check files by it."))
    return save_id, before, None


def beside(storage: Storage, look: Callable[[], T]) -> Callable[[], T]:
    """Return a look at a storage, which is begun at once, in another thread, if it takes a request."""
    return look if can(storage).entries is None else Task(look).result


def is_recognized(storage: Storage, strategies: Strategies | None) -> bool:
    """Return whether some format recognises a folder that has no metadata.json."""
    # Asking each format takes looks at many names, and an import of it: not for a new folder, or one of saves alone.
    if can(storage).entries is None and all(map(is_save_folder, storage.names())):
        return False
    return recognize(storage, strategies) is not None


def pending_save(start: Start, storage: Storage, world: World, options: SaveOptions) -> PendingSave:
    """Return the pending save on this rank; its folder is made later.

    Raises:
        StrategyError: a checkpoint is to be replaced as a whole, and two folders can't be exchanged there.
    """
    save_id, before, old = start
    if old is None:
        return PendingSave(storage, save_id, world, before, options)
    sibling = sibling_of(storage, save_id)
    return PendingSave(sibling.storage, save_id, world, before, options, replaced=Replaced(storage, sibling, old))


def pending_here(save: Save) -> PendingSave:
    """Return the pending save that rank 0 began, once this rank is known to see the folder that rank 0 made.

    Raises:
        StorageError: it doesn't see it.
    """
    if save.start is None:
        raise TypeError("rank 0 sent no place for the save")
    storage = storage_at(save.where)
    pending = pending_save(save.start, storage, save.world, save.options)
    if not is_folder(pending.storage, pending.save_id):
        what = f"save: {storage.where()!r} is not shared: rank {save.world.rank} doesn't see what rank 0 made in it"
        raise StorageError(error_text(what, fix="Save to a folder on storage that all ranks share."))
    return pending


def make_folder(pending: PendingSave, formats: Formats, undo: ExitStack) -> tuple[Claim, NewFolder | None]:
    """Return the mark that a save is alive, and the destination's own folder if it had to be made; on rank 0.

    Rank 0 waits after its own writing until the folder is on the medium, not here, where all others would wait too.

    Args:
        pending: The save, whose folder is made.
        formats: Its formats.
        undo: Stack that gets callbacks which remove what was made, as long as nothing is in it.

    Raises:
        StrategyError: a checkpoint is to be replaced as a whole, and can't be.
        StorageError: the folder can't be made, or another save to it is in progress.
    """
    durable, folder = pending.options.durable, None
    # Before any file: another save's clean-up removes what belongs to a save that isn't known to be alive.
    own_claim = claim(pending.save_id)
    if pending.replaced is None:
        folder = new_folder(pending.storage, durable=durable)
        # Only in a failed call: by the time a request is abandoned, its caller may rely on the folder.
        undo.callback(folder.remove)
    undo.callback(end, pending)
    if pending.replaced is None:
        # Not synced here: the save syncs the storage's own folder before it is published.
        make_save_folder(pending.storage, pending.save_id, durable=False, alone=not formats.in_save_folder)
    else:
        make_sibling(pending.replaced.storage, pending.save_id, formats.strategies, durable=durable)
    return own_claim, folder


def end(pending: PendingSave) -> None:
    """Mark a save of this process as ended, and remove its folder unless files are in it. Never raises."""
    release(pending.save_id)
    storage = pending.destination
    try:
        if pending.replaced is None:
            disown(storage, pending.save_id)
        if (sibling := can(storage).sibling) is not None and sibling(pending.save_id).is_exchanged() is False:
            sibling(pending.save_id).remove()  # with all files: they are this save's alone
    except Exception as error:
        # The save's own error is being raised, and must not be hidden; a later save removes what stays.
        logger.warning("save: what a failed save wrote stays in or beside %s: %s", storage.where(), error)


def _goes_with_metadata(before: bytes | None, strategies: Strategies | None) -> bool:
    """Return whether replacing metadata.json replaces the whole checkpoint, as its files are in its save's folder.

    That is assumed of formats that don't list their files, and of what can't be read anyway.
    """
    try:
        fields = decode_metadata(before, METADATA_FILE) if before is not None else None
    except CorruptCheckpoint:
        return True
    if fields is None:
        return False
    backends = {sharded_backend(fields), common_backend(fields)}
    others = [backend for backend in backends if not traits_of(*backend, strategies).in_save_folder]
    return not any(find_strategy(StrategyAction.LIST_FILES, *backend, strategies=strategies) for backend in others)
