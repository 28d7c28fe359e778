"""Step 2 of a save on rank 0: look at the destination, name the save, make the folder that every rank must see."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ....core.layouts import ShardColumns
from ....core.trees import comparable, without_holes
from ....errors import AlreadyACheckpoint, CorruptCheckpoint, MetadataError, StorageError, error_text
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
    Stamp,
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
from .._dispatch import Backends, Choice, alike, alike_choices, common_backend, sharded_backend
from .._open import recognize
from ._replace import make_sibling, sibling_of

logger = logging.getLogger("shardtree")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class SaveCall:
    """A call of `save`, with its defaults filled in.

    Attributes:
        world: the ranks that save together.
        choices: what the caller named as formats of the shards and of the common state.
        validate: whether shards must tile their tensors, and common states agree.
        common_view: returns what of the common state is compared; None for all of it.
        options: how it is saved.
        overwrite: whether a checkpoint that is already there may be replaced.
        layout: all ranks' shards, where the caller gave them.
        strategies: the dispatch table; None for the process's.
        is_async: whether the request is returned instead of run.
    """

    world: World
    choices: tuple[Choice, Choice]
    validate: bool
    common_view: Callable[[Any], Any] | None
    options: SaveOptions
    overwrite: bool
    layout: ShardColumns | None
    strategies: Strategies | None
    is_async: bool

    @property
    def describes(self) -> bool:
        """Whether each rank gets a description of the others' shards."""
        return self.validate or self.options.check_replicas or self.layout is not None

    @property
    def alike_arguments(self) -> dict[str, object]:
        """The arguments that have to be the same on all ranks, where they aren't the usual ones."""
        if self.world.size == 1:
            return {}
        flags = {"overwrite": self.overwrite, "async_sharded_save": self.is_async}
        unusual = {name: flag for name, flag in flags.items() if flag}
        return alike(self.options) | unusual | alike_choices(*self.choices)


def check_union(call: SaveCall) -> None:
    """Raise unless common states may differ in the way that the options say, and are compared if it is their union.

    Raises:
        MetadataError: there is no such way, or some or all of the common states wouldn't be compared.
    """
    if call.options.common not in ("same", "union"):
        expected = "'same' or 'union'"
        raise MetadataError(error_text("save: no such common", found=repr(call.options.common), expected=expected))
    if call.options.common == "union" and (call.common_view is not None or not call.validate):
        fix = "Leave out preprocess_common_before_consistancy_check and validate_access_integrity=False."
        raise MetadataError(error_text("save: a union needs the whole common states compared", fix=fix))


def common_part(call: SaveCall, common: Any) -> Any:
    """Return what of a rank's common tree must be the same on all ranks, or fit together."""
    if not call.validate:
        return None
    # `comparable` drops empty containers: a list of shards is empty on a rank that holds none of them. Holes in dicts
    # don't count either, since ranks may hold different shards.
    common = comparable(common)
    return common if call.common_view is None else without_holes(call.common_view(common))


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


@dataclass(frozen=True, slots=True)
class SaveStart:
    """The destination of a save, as rank 0 found it and sends it to the others.

    Attributes:
        save_id: the save's name.
        before: metadata.json as it is, None if there is none.
        old: the stamp of the checkpoint whose folder is exchanged in the end, None if the save writes into the folder.
    """

    save_id: str
    before: bytes | None
    old: Stamp | None


@dataclass(slots=True, eq=False)
class RunningSave:
    """A save that a rank has begun and not ended: what marks it as alive, and how far its request has come.

    Attributes:
        claim: marks the save as alive; on rank 0 alone.
        folder: the storage's own folder, where this save had to make it.
        has_run: whether the request was run before.
        has_written: whether the request has begun to write, and what it wrote wasn't removed since.
        common: returns the fields of the common state's format, where that is written beside the shards.
    """

    claim: Claim | None = None
    folder: NewFolder | None = None
    has_run: bool = False
    has_written: bool = False
    common: Callable[[], Any] | None = None


def begin(call: SaveCall, storage: Storage, backends: Backends, running: RunningSave, undo: ExitStack) -> PendingSave:
    """Return the pending save whose folder is made; on rank 0.

    Args:
        call: the call of `save`.
        storage: where to.
        backends: of the shards and of the common state.
        running: gets the claim on the save, and the folder.
        undo: gets a callback that removes the folder again, as long as nothing is in it.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and it may not be replaced.
        StrategyError: a checkpoint is to be replaced as a whole, and can't be.
        StorageError: the folder can't be made, or belongs to another program.
    """
    save_id = new_save_id()
    # Beside the look, where each takes a request: a checkpoint that is there won't refuse this save.
    at_once = call.overwrite and can(storage).replace_if is not None and in_save_folder(backends, call.strategies)
    task = Task(partial(make_save_folder, storage, save_id, durable=False)) if at_once else None
    try:
        with step("save: look at the folder"):
            start = inspect_folder(storage, backends, call.strategies, overwrite=call.overwrite, save_id=save_id)
        pending = replace(pending_save(start, storage, call.world, call.options), overwrite=call.overwrite)
    except BaseException:
        if task is not None:
            task.drop()
            end(PendingSave(storage, save_id, call.world), RunningSave(claim(save_id)))
        raise
    undo.callback(_undo, pending, running)
    with step("save: make the folder"):
        if task is None:
            make_folder(pending, running, backends, call.strategies)
        else:
            running.claim = task.result()
    return pending


def inspect_folder(
    storage: Storage,
    backends: Backends,
    strategies: Strategies | None,
    *,
    overwrite: bool,
    save_id: str | None = None,
) -> SaveStart:
    """Return what is known of a save before its folder is made. Nothing is changed.

    Args:
        storage: where to.
        backends: of the shards and of the common state.
        strategies: the dispatch table; None for the process's.
        overwrite: whether a checkpoint that is already there may be replaced.
        save_id: the save's name; None for a new one.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        StorageError: another program's metadata.json is there, or no folder.
    """
    by_requests = can(storage).entries is not None
    is_file: Callable[[], int | None] = partial(storage.length, "")
    is_there: Callable[[], bool] = partial(is_recognized, storage, strategies)
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
    if there and not (in_save_folder(backends, strategies) and _goes_with_metadata(before, strategies)):
        return SaveStart(save_id, None, stamp(storage, deciding_files(strategies)))
    names = () if in_save_folder(backends, strategies) else manifests(strategies)
    if (manifest := next((name for name in names if storage.length(name) is not None), None)) is not None:
        what = f"save: {storage.where(manifest)!r} lists files that no longer exist, or aren't a checkpoint"
        raise StorageError(error_text(what, fix="Remove it, or save to another folder: loads would check files by it."))
    return SaveStart(save_id, before, None)


def beside(storage: Storage, look: Callable[[], T]) -> Callable[[], T]:
    """Return a look at a storage, which is begun at once, in another thread, if it takes a request."""
    return look if can(storage).entries is None else Task(look).result


def is_recognized(storage: Storage, strategies: Strategies | None) -> bool:
    """Return whether some format recognises a folder that has no metadata.json."""
    # Asking each format takes looks at many names, and an import of it: not for a new folder, or one of saves alone.
    if can(storage).entries is None and all(map(is_save_folder, storage.names())):
        return False
    return recognize(storage, strategies) is not None


def pending_save(start: SaveStart, storage: Storage, world: World, options: SaveOptions) -> PendingSave:
    """Return the pending save on this rank; its folder is made later.

    Raises:
        StrategyError: a checkpoint is to be replaced as a whole, and two folders can't be exchanged there.
    """
    if start.old is None:
        return PendingSave(storage, start.save_id, world, start.before, options)
    sibling = sibling_of(storage, start.save_id)
    old = Replaced(storage, sibling, start.old)
    return PendingSave(sibling.storage, start.save_id, world, start.before, options, replaced=old)


def pending_here(start: SaveStart | None, storage: Storage, world: World, options: SaveOptions) -> PendingSave:
    """Return the pending save that rank 0 began, once this rank is known to see the folder that rank 0 made.

    Raises:
        StorageError: it doesn't see it.
    """
    if start is None:
        raise TypeError("rank 0 sent no place for the save")
    pending = pending_save(start, storage, world, options)
    if not is_folder(pending.storage, pending.save_id):
        what = f"save: {storage.where()!r} is not shared: rank {world.rank} doesn't see what rank 0 made in it"
        raise StorageError(error_text(what, fix="Save to a folder on storage that all ranks share."))
    return pending


def start_of(pending: PendingSave) -> SaveStart:
    """Return what rank 0 sends the others of a pending save."""
    return SaveStart(pending.save_id, pending.before, None if pending.replaced is None else pending.replaced.stamp)


def make_folder(pending: PendingSave, running: RunningSave, backends: Backends, strategies: Strategies | None) -> None:
    """Make a save's folder, and hold it.

    Rank 0 waits after its own writing until the folder is on the medium, not here, where all others would wait too.

    Raises:
        StrategyError: a checkpoint is to be replaced as a whole, and can't be.
        StorageError: the folder can't be made, or another save to it is in progress.
    """
    durable = pending.options.durable
    # Before any file: another save's clean-up removes what belongs to a save that isn't known to be alive.
    running.claim = claim(pending.save_id)
    if pending.replaced is not None:
        make_sibling(pending.replaced.storage, pending.save_id, strategies, durable=durable)
        return
    running.folder = new_folder(pending.storage, durable=durable)
    # Not synced here: the commit syncs the storage's own folder.
    alone = not in_save_folder(backends, strategies)
    make_save_folder(pending.storage, pending.save_id, durable=False, alone=alone)


def _undo(pending: PendingSave, running: RunningSave) -> None:
    end(pending, running)
    # Only here, in a failed call: by the time a request is abandoned, its caller may rely on the folder.
    if running.folder is not None:
        running.folder.remove()


def end(pending: PendingSave, running: RunningSave) -> None:
    """Mark a save as ended, and remove the folder that it made unless files are in it. Never raises."""
    if running.claim is None:  # only rank 0 has one
        return
    release(pending.save_id)
    storage = pending.storage if pending.replaced is None else pending.replaced.storage
    try:
        if pending.replaced is None:
            disown(storage, pending.save_id)
        if (sibling := can(storage).sibling) is not None and sibling(pending.save_id).is_exchanged() is False:
            sibling(pending.save_id).remove()  # with all files: they are this save's alone
    except Exception as error:
        # The save's own error is being raised, and must not be hidden; a later save removes what stays.
        logger.warning("save: what a failed save wrote stays in or beside %s: %s", storage.where(), error)


def in_save_folder(backends: Iterable[tuple[str, int]], strategies: Strategies | None) -> bool:
    """Return whether all files that formats write are in the save's own folder, so that no other save's files are."""
    return all(traits_of(*each, strategies).in_save_folder for each in backends)


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
    others = [
        each for each in {sharded_backend(fields), common_backend(fields)} if not in_save_folder([each], strategies)
    ]
    return not any(find_strategy(StrategyAction.LIST_FILES, *each, strategies=strategies) for each in others)
