"""Step 2 of a save on rank 0: inspect the destination, name the save, make the folder that every rank must see."""

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
    """Return a destination's name if it looks like a file of weights; None for folders and storages.

    Examples:
        >>> named_file("/runs/model.safetensors"), named_file("/runs/step_10")
        ('model.safetensors', None)
    """
    if isinstance(where, Storage):
        return None
    name = os.fspath(where).rpartition("/")[2]
    return name if _FILE.fullmatch(name) and not is_folder(storage_at(where)) else None


def folder_at(where: Directory) -> Storage:
    """Return the storage of a save's destination folder, which needn't exist yet.

    Raises:
        StorageError: the destination has the name of a file of weights, so other programs would take it for a file.
    """
    storage = storage_at(where)
    if named_file(where) is not None:
        fix = "Pass a folder; convert(FOLDER, FILE, backend='huggingface') makes a single .safetensors file of it."
        raise StorageError(error_text(f"save: {storage.where()!r} names a file, and a save makes a folder", fix=fix))
    return with_own_refusals(storage)


def begin(save: Save, storage: Storage, undo: ExitStack) -> Save:
    """Inspect the destination and make the save's folder; on rank 0.

    Args:
        save: The save, with the backends of its formats.
        storage: The destination.
        undo: Stack that gets callbacks which remove the folder if it is still empty.

    Returns:
        The save with `start`, `pending`, `claim` and `folder` set.

    Raises:
        AlreadyACheckpoint: the destination holds a checkpoint that may not be replaced.
        StrategyError: the existing checkpoint can be replaced only by an exchange of folders, which isn't possible.
        StorageError: the folder can't be made, or belongs to another program.
    """
    save_id = new_save_id()
    # Both steps may take requests: if an existing checkpoint is no obstacle, the folder is made during the inspection.
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
    """Inspect a save's destination before the save's folder is made; changes nothing.

    Args:
        storage: The destination.
        formats: The formats, with their backends.
        overwrite: Whether an existing checkpoint may be replaced.
        save_id: The save's name; None to make one up.

    Returns:
        Three values: the save's name; the content of the metadata.json that the save will replace, or None; the `stamp`
        of the checkpoint that the save will replace by exchanging two folders, or None. A stamp has the names, lengths
        and times of the files that make a folder a checkpoint.

    Raises:
        AlreadyACheckpoint: the destination holds a checkpoint, and `overwrite` is False.
        StorageError: the destination is a file, or holds another program's metadata.json or manifest.
    """
    by_requests = can(storage).entries is not None
    is_file: Callable[[], int | None] = partial(storage.length, "")
    is_there: Callable[[], bool] = partial(is_recognized, storage, formats.strategies)
    if not overwrite:  # the folder is probably new, and then both looks are needed
        is_file, is_there = beside(storage, is_file), beside(storage, is_there)
    before = metadata_bytes(storage) if by_requests else None
    if before is None and is_file() is not None:
        raise StorageError(error_text(f"save: {storage.where()!r} is a file, not a folder", fix="Save to a folder."))
    if not by_requests:
        before = metadata_bytes(storage)
    if before is not None and is_of_others(before):
        heading = f"save: {storage.where(METADATA_FILE)!r} belongs to another program"
        raise StorageError(error_text(heading, fix="Save to another folder: a checkpoint needs its own metadata.json."))
    exists = before is not None or is_there()
    if exists and not overwrite:
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        raise AlreadyACheckpoint(error_text(f"save: {storage.where()!r} already holds a checkpoint", fix=fix))
    save_id = new_save_id() if save_id is None else save_id
    # If files with fixed names were replaced one by one, neither checkpoint would be whole in between.
    if exists and not (formats.in_save_folder and _goes_with_metadata(before, formats.strategies)):
        return save_id, None, stamp(storage, deciding_files(formats.strategies))
    names = () if formats.in_save_folder else manifests(formats.strategies)
    if (manifest := next((name for name in names if storage.length(name) is not None), None)) is not None:
        heading = f"save: {storage.where(manifest)!r} is a manifest, but its checkpoint is not in this folder"
        raise StorageError(error_text(heading, fix="Move that manifest, or save to another folder."))
    return save_id, before, None


def beside(storage: Storage, look: Callable[[], T]) -> Callable[[], T]:
    """Return `look`, or, on a remote storage, start it in a thread and return a function that waits for its result."""
    return look if can(storage).entries is None else Task(look).result


def is_recognized(storage: Storage, strategies: Strategies | None) -> bool:
    """Return whether any format recognises a checkpoint in a folder that has no metadata.json."""
    # Recognition looks at many names and imports formats, so it is skipped for folders that hold nothing but saves.
    if can(storage).entries is None and all(map(is_save_folder, storage.names())):
        return False
    return recognize(storage, strategies) is not None


def pending_save(start: Start, storage: Storage, world: World, options: SaveOptions) -> PendingSave:
    """Return this rank's description of the save, from rank 0's findings `start`; the folder is made separately.

    Raises:
        StrategyError: a checkpoint must be replaced as a whole folder, and the storage can't exchange two folders.
    """
    save_id, before, old = start
    if old is None:
        return PendingSave(storage, save_id, world, before, options)
    sibling = sibling_of(storage, save_id)
    return PendingSave(sibling.storage, save_id, world, before, options, replaced=Replaced(storage, sibling, old))


def pending_here(save: Save) -> PendingSave:
    """Return this rank's description of the save that rank 0 began; raise if this rank doesn't see the save's folder.

    Raises:
        StorageError: this rank doesn't see the folder.
    """
    if save.start is None:
        raise TypeError("rank 0 sent no destination for the save")
    storage = storage_at(save.where)
    pending = pending_save(save.start, storage, save.world, save.options)
    if not is_folder(pending.storage, pending.save_id):
        heading = f"save: {storage.where()!r} is not shared: rank {save.world.rank} does not see rank 0's folder in it"
        raise StorageError(error_text(heading, fix="Save to a folder on storage that all ranks share."))
    return pending


def make_folder(pending: PendingSave, formats: Formats, undo: ExitStack) -> tuple[Claim, NewFolder | None]:
    """Make a save's folder and the folders above it; only called on rank 0.

    The save's folder is in the checkpoint's folder at the destination. But if the save replaces a whole checkpoint by
    exchanging folders, it is in a sibling folder, beside the checkpoint's.

    A new folder at the destination isn't synced here, since all other ranks would wait for that: rank 0 syncs it after
    its own writes.

    Args:
        pending: The save.
        formats: Formats of the save, with their backends.
        undo: Stack that gets callbacks which remove the new folders if they are still empty.

    Returns:
        The save's claim, which marks it as alive, and the checkpoint's folder at the destination; None instead of that
        folder if the save writes to a sibling folder.

    Raises:
        StrategyError: the existing checkpoint can be replaced only by an exchange of folders, which isn't possible.
        StorageError: the folder can't be made, or another save to it is in progress.
    """
    durable, folder = pending.options.durable, None
    # The claim precedes any file: another save's clean-up removes files of saves that aren't known to be alive.
    own_claim = claim(pending.save_id)
    if pending.replaced is None:
        folder = new_folder(pending.storage, durable=durable)
        # The folder is removed only if this call fails: once a request exists, its caller may rely on the folder.
        undo.callback(folder.remove)
    undo.callback(end, pending)
    if pending.replaced is None:
        # It isn't synced here, since the save syncs the storage's own folder before it publishes.
        make_save_folder(pending.storage, pending.save_id, durable=False, alone=not formats.in_save_folder)
    else:
        make_sibling(pending.replaced.storage, pending.save_id, formats.strategies, durable=durable)
    return own_claim, folder


def end(pending: PendingSave) -> None:
    """Stop marking a save of this process as alive, and remove its folder if that is empty; never raises.

    A sibling folder of the save is removed with its files, unless it was exchanged with the checkpoint's folder.
    """
    release(pending.save_id)
    storage = pending.destination
    try:
        if pending.replaced is None:
            disown(storage, pending.save_id)
        if (sibling := can(storage).sibling) is not None and sibling(pending.save_id).is_exchanged() is False:
            sibling(pending.save_id).remove()  # with all files, since they belong to this save only
    except Exception as error:
        # This must not hide the save's own error; a later save removes the remaining files.
        logger.warning("save: files of a failed save stay in or beside %s: %s", storage.where(), error)


def _goes_with_metadata(before: bytes | None, strategies: Strategies | None) -> bool:
    """Return whether a new metadata.json alone replaces the whole old checkpoint, so that folders needn't be exchanged.

    That is so if all files of the old checkpoint are in its save's folder, to which the new metadata.json no longer
    refers. The result is also True if nobody can tell: a format doesn't list its files, or metadata.json is damaged.

    Args:
        before: Content of the old checkpoint's metadata.json; None if it has none, and then the result is False.
        strategies: Dispatch table; None for the process's.
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
