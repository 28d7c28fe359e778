"""Which steps there are: finished checkpoints under a root, each with what its record says."""

from __future__ import annotations

import logging

from ...errors import CorruptCheckpoint, StorageError
from ...retention import SavedStep, sorted_steps
from ...storage import Storage, folder_in
from ...strategies import METADATA_FILE, Strategies, is_deciding
from .._open import is_checkpoint
from ._names import step_folder, step_number
from ._record import FileMark, Record, read_record

logger = logging.getLogger("shardtree")


def list_steps(root: Storage, names: str, strategies: Strategies | None) -> tuple[SavedStep, ...]:
    """Return the finished steps under a root, in the order of their numbers; unfinished and failed ones aren't there.

    Args:
        root: the folder of all steps.
        names: the format of their folders' names.
        strategies: the dispatch table; None for the process's.
    """
    found: dict[int, SavedStep] = {}
    for folder in root.names():
        number = step_number(names, folder)
        step = None if number is None else saved_step(root, folder, number, strategies)
        if step is None:
            continue
        if step.number in found:
            logger.warning("series: %s and %s are the same step", *map(root.where, (found[step.number].folder, folder)))
        if step.number not in found or folder == step_folder(names, step.number):
            found[step.number] = step
    return sorted_steps(found.values())


def saved_step(root: Storage, folder: str, number: int, strategies: Strategies | None) -> SavedStep | None:
    """Return a step if its folder holds a finished checkpoint that nobody has begun to remove."""
    try:
        if not is_checkpoint(folder_in(root, folder), strategies=strategies):
            return None
        record = sound_record(root, folder)
        if is_being_removed(root, folder, record):
            return None
        time = _changed(root, folder) if record.time is None or record.removing else record.time
    except StorageError:
        if root.is_folder(folder):
            raise
        return None  # removed in between
    if record.removing:
        record = Record()  # of the checkpoint that another one has replaced since
    return SavedStep(number, time, record.metrics, record.pinned, folder)


def sound_record(root: Storage, folder: str) -> Record:
    """Return what is known of a step; one whose record can't be read counts as pinned, which it may have been."""
    try:
        return read_record(root, folder) or Record()
    except CorruptCheckpoint as error:
        logger.warning("%s", error)
        return Record(pinned=True)


def is_being_removed(root: Storage, folder: str, record: Record) -> bool:
    """Return whether a removal of the checkpoint that is in a folder was begun, and wasn't finished.

    Where the file that decides is another one by now, a save that knew nothing of the removal has put a new checkpoint
    there.
    """
    if not record.removing:
        return False
    first = record.removing[0]
    return mark(root, folder, first.name) in (first, None)


def mark(root: Storage, folder: str, name: str) -> FileMark | None:
    """Return what tells a file from one that took its place, None if it isn't there."""
    full = f"{folder}/{name}"
    length = root.length(full)
    return None if length is None else FileMark(name, length, root.changed(full))


def _changed(root: Storage, folder: str) -> float:
    """Return when a checkpoint without a record was saved: when the files by which it is found were changed."""
    decider = root.changed(f"{folder}/{METADATA_FILE}")
    if decider is not None:
        return decider
    times = [root.changed(f"{folder}/{name}") for name in root.names(folder) if is_deciding(name)]
    return max((time for time in times if time is not None), default=0.0)
