"""Replacing a whole checkpoint: the new one is written to a sibling folder, then the two folders are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from ....errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    StorageError,
    StrategyError,
    error_text,
)
from ...storage import (
    Sibling,
    Storage,
    can,
    is_alive,
    make_folder,
    maker_is_dead,
    owner_note,
)
from ...table import (
    METADATA_FILE,
    Checkpoint,
    PendingSave,
    Replaced,
    Strategies,
    StrategyAction,
    deciding_files,
    find_strategy,
    is_save_file,
    is_save_folder,
    stamp,
)
from ...world import one_process
from .._dispatch import common_backend, sharded_backend
from .._open import read_fields, traits_together

_ELSEWHERE = "Save to a new folder."


def sibling_of(storage: Storage, save_id: str) -> Sibling:
    """Return the sibling folder to which a save writes when it replaces a checkpoint.

    Raises:
        StrategyError: this storage can't exchange folders.
    """
    if (sibling := can(storage).sibling) is None:
        what = f"save: {storage.where()!r} already holds a checkpoint, and its storage cannot exchange two folders"
        raise StrategyError(error_text(what, fix=_ELSEWHERE))
    return sibling(save_id)


def make_sibling(storage: Storage, save_id: str, strategies: Strategies | None, *, durable: bool) -> None:
    """Make the sibling folder of a checkpoint, and check that the two can be exchanged; on rank 0.

    Raises:
        StrategyError: the folders can't be exchanged, or files of other programs couldn't be kept.
        CorruptCheckpoint: the old checkpoint can't be read, so the names of its files are unknown.
    """
    sibling = sibling_of(storage, save_id)
    try:
        sibling.make(owner_note(save_id), durable=durable)
        sibling.check_shareable(_others(storage, sibling, strategies))
        make_folder(sibling.storage, save_id, durable=durable)
    except BaseException as error:
        with suppress(CheckpointingException):  # the first error's cause may make this fail too
            sibling.remove()
        if isinstance(error, CorruptCheckpoint):
            error.add_note("save: the names of the old checkpoint's files are unknown; save to a new folder")
        raise


def check_same(old: Replaced, strategies: Strategies | None) -> None:
    """Raise if the checkpoint to replace has changed since the save began.

    Raises:
        CheckpointReplaced: another save replaced it meanwhile, or this save did already.
    """
    if stamp(old.storage, deciding_files(strategies)) != old.stamp:
        fix = "Run only one save to a folder at a time, and execute each AsyncRequest only once."
        what = f"save: {old.storage.where()!r} was changed by another save meanwhile"
        raise CheckpointReplaced(error_text(what, fix=fix))


def swap_folders(pending: PendingSave, old: Replaced, fields: Mapping[str, Any], strategies: Strategies | None) -> None:
    """Replace the old checkpoint by a finished save, and keep files of other programs; on rank 0.

    Raises:
        CheckpointReplaced: another save replaced the checkpoint first.
        StorageError: a file of another program has a name that the new checkpoint needs.
    """
    check_same(old, strategies)
    # A model's folder has a config.json and a tokenizer, a run's has logs. They are linked into the new folder before
    # the exchange: if they were moved after it, they would be missing for a moment, or after a crash for long.
    others = _others(old.storage, old.sibling, strategies)
    clashes = old.sibling.share(others, durable=pending.options.durable)
    if clashes:
        what = f"save: other files in {old.storage.where()!r} have names that the new checkpoint needs"
        raise StorageError(error_text(what, offenders=map(repr, clashes), fix="Move them, or save to a new folder."))
    # Another format may recognise a kept file, such as a lone safetensors file, first.
    backend = sharded_backend(read_fields(pending.storage, strategies))
    if backend != sharded_backend(fields):
        what = f"save: other files in {old.storage.where()!r} make the new checkpoint look like another format's"
        raise StorageError(error_text(what, found=repr(backend), fix="Move them, or save elsewhere."))
    old.sibling.exchange(durable=pending.options.durable)


def remove_sibling(storage: Storage, sibling: Sibling, strategies: Strategies | None, *, durable: bool) -> None:
    """Remove a sibling folder, which holds an unfinished save or the replaced checkpoint.

    Raises:
        StorageError: files of other programs in it would be lost, so the folder stays.
    """
    is_exchanged = sibling.is_exchanged()
    if is_exchanged is None and sibling.storage.names():
        what = f"save: unclear whether {sibling.storage.where()!r} is the old checkpoint or an unfinished new one"
        fix = "An interrupted save left this folder. Move it elsewhere, since it may have files that you need."
        raise StorageError(error_text(what, fix=fix))
    if is_exchanged:
        # The old folder is searched again, since files may have been made between the links and the exchange.
        others = _others(sibling.storage, sibling, strategies)
        if clashes := sibling.share(others, durable=durable):
            what = f"save: {storage.where()!r} is complete, but other files in the old folder have names of new files"
            fix = f"Move these files out of {sibling.storage.where()!r}; a later save then removes that old folder."
            raise StorageError(error_text(what, offenders=map(repr, clashes), fix=fix))
    sibling.remove()


def _others(old: Storage, sibling: Sibling, strategies: Strategies | None) -> tuple[str, ...]:
    """Return the names of files and empty folders that belong to other programs.

    These are the entries of the replaced checkpoint's folder that belong neither to it nor to another save.
    """
    own = own_files(old, strategies)
    folders = {str(above) for name in own for above in PurePosixPath(name).parents} - {"."}
    return tuple(name for name in sibling.old_names() if name not in own and not _is_of_saves(name, folders))


def _is_of_saves(name: str, folders: set[str]) -> bool:
    """Return whether a file or empty folder was made by a save of this library, as its name shows.

    Args:
        name: Name in the replaced checkpoint's folder; that of an empty folder ends in a slash.
        folders: Names of all folders in which the replaced checkpoint has files.
    """
    plain = PurePosixPath(name)
    if not name.endswith("/"):
        return is_save_file(name)
    return is_save_folder(str(plain)) or any(str(folder) in folders for folder in (plain, *plain.parents))


def own_files(storage: Storage, strategies: Strategies | None) -> set[str]:
    """Return the names of the files that a checkpoint's formats list as its own; some of them may not exist.

    Raises:
        NotACheckpoint: the storage holds no checkpoint.
        CorruptCheckpoint: the checkpoint can't be read, so the names of its files are unknown.
        StrategyError: the format doesn't list its files.
    """
    fields = read_fields(storage, strategies)
    traits = traits_together(fields, deciding_files(strategies), strategies)
    checkpoint = Checkpoint(storage, fields, one_process(), traits=traits)
    names = {METADATA_FILE}
    for backend in {sharded_backend(fields), common_backend(fields)}:
        list_files = find_strategy(StrategyAction.LIST_FILES, *backend, strategies=strategies)
        if list_files is None:
            what = f"save: the format of the checkpoint in {storage.where()!r} does not list its files"
            raise StrategyError(error_text(what, found=f"backend {backend!r} without list_files", fix=_ELSEWHERE))
        names |= {*list_files(checkpoint)}
    return names


def is_live(save_id: str, sibling: Sibling, *, before: float) -> bool:
    """Return whether the save that made a sibling folder is, or may be, in progress.

    Args:
        save_id: Name of the save.
        sibling: Folder of the save.
        before: Time by the storage's clock. A save whose process can't be seen, such as one on another machine, counts
            as interrupted if its files were last changed before that time.
    """
    # The process is decisive if it can be seen. By age alone, a save that waits an hour for its commit would count as
    # interrupted, and one that was killed a minute ago as alive.
    alive = is_alive(sibling.note())
    if alive is None and not maker_is_dead(save_id[-16:]):
        return not (sibling.changed() or 0.0) < before  # with a NaN for a time the save counts as alive
    return bool(alive)
