"""Removal of steps, so that a listing shows a step whole or not at all, even if the removal is interrupted.

First, a note with the files to remove replaces the step's record; this atomic write takes the step out of the listing.
Then the files are removed, beginning with those that make the folder a checkpoint, and the note last. If the process
dies in between, the note says what is left to do. Nothing is renamed: folders with other files can't be renamed away,
and object stores don't rename.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import CheckpointingException, StorageError, error_text
from ..shell.checkpoint import is_checkpoint
from ..shell.storage import (
    Listed,
    Storage,
    folder_in,
    is_folder,
    is_link,
    is_temporary,
    listed,
    prefetch,
    remove_folder,
    settle,
)
from ..shell.table import Strategies, is_save_folder, is_surely_orphaned, remove_interrupted
from ._listing import (
    RECORD_FILE,
    FileMark,
    StepRecord,
    is_being_removed,
    list_steps,
    mark,
    sound_record,
    step_number,
    write_record,
)
from ._removal import IRREMOVABLE, Removal, StepFiles, is_being_saved, step_files
from .policies import NEWEST, PINNED, Choose, SavedStep, kept_steps

logger = logging.getLogger("shardtree")


def plan_removal(root: Storage, names: str, policy: Choose, strategies: Strategies | None) -> Removal:
    """Return the plan to remove the finished steps that a policy doesn't keep; nothing is removed yet."""
    with listed(root) as listing:
        steps = list_steps(listing, names, strategies)
        return _plan(listing, steps, dict(kept_steps(policy, steps)), strategies)


def apply_policy(root: Storage, names: str, policy: Choose, strategies: Strategies | None, number: int) -> None:
    """Remove the steps that a policy doesn't keep, after step `number` was saved; this step stays in any case.

    If a step can't be removed, a warning is logged: the save itself succeeded, and the next one tries again. Errors of
    the policy are raised. `names` is the format string of the steps' folder names.
    """

    def choose(steps: Sequence[SavedStep]) -> set[int]:
        # After the run went back, higher numbers would count as newer, and the step would be removed at once.
        return {number, *kept_steps(policy, steps)} & {step.number for step in steps}

    try:
        removal = plan_removal(root, names, choose, strategies)
        _warn_of_irremovable(removal)
        remove_steps(root, names, removal, strategies)
    except StorageError as error:
        logger.warning("series: a step is saved, and others could not be removed: %s", error)


def _warn_of_irremovable(removal: Removal) -> None:
    for number in removal.irremovable:
        logger.warning("series: step %d stays: it %s", number, removal.kept[number][0])


def drop_after(root: Storage, names: str, number: int, strategies: Strategies | None) -> tuple[int, ...]:
    """Remove the finished steps with numbers above `number`, except pinned ones; return the removed numbers.

    The highest steps are removed first. `names` is the format string of the steps' folder names.

    Raises:
        StorageError: Some steps can't be removed; all others were removed.
    """
    with listed(root) as listing:
        steps = list_steps(listing, names, strategies)
        reasons: dict[int, tuple[str, ...]] = {
            step.number: (PINNED if step.pinned else "not after it",)
            for step in steps
            if step.pinned or step.number <= number
        }
        removal = _plan(listing, steps, reasons, strategies)
        _warn_of_irremovable(removal)
        return _remove_steps(listing, names, removal, strategies, newest=number)


def _plan(
    root: Storage, steps: tuple[SavedStep, ...], reasons: dict[int, tuple[str, ...]], strategies: Strategies | None
) -> Removal:
    going = []
    for step in steps:
        if step.number in reasons:
            continue
        answer = step_files(root, step.folder, step.number, strategies)
        if isinstance(answer, str):
            reasons[step.number] = (f"{IRREMOVABLE}: {answer}",)
        else:
            going.append(answer)
    return Removal(steps, reasons, tuple(going))


def remove_steps(root: Storage, names: str, removal: Removal, strategies: Strategies | None) -> tuple[int, ...]:
    """Finish interrupted removals, then execute a plan; return the numbers of the steps that were removed.

    A step of the plan stays if it was changed or pinned after the plan was made, if it is the newest step now, or if a
    save to it is in progress.

    Raises:
        StorageError: Some steps can't be removed; all others were removed.
    """
    with listed(root) as listing:
        return _remove_steps(listing, names, removal, strategies)


def _remove_steps(
    root: Storage, names: str, removal: Removal, strategies: Strategies | None, newest: int | None = None
) -> tuple[int, ...]:
    """Finish interrupted removals, then execute a plan; return the numbers of the steps that were removed.

    Args:
        root: Folder of all steps, from `listed`.
        names: Format string of the steps' folder names.
        removal: The plan.
        strategies: Dispatch table; None for the process's.
        newest: Number of the step that stays as the newest; then steps are removed in descending order. If None, the
            step that is the newest now stays, and steps are removed in ascending order.
    """
    failures = finish_removals(root, names)
    steps = list_steps(root, names, strategies)
    # Steps are looked up again, since the plan may be old: the newest by now, and pinned ones, stay.
    reasons = dict.fromkeys([step.number for step in steps[-1:]] if newest is None else [newest], NEWEST)
    reasons |= {step.number: PINNED for step in steps if step.pinned}
    going: list[StepFiles] = []
    for item in sorted(removal.going, key=lambda item: item.number, reverse=newest is not None):
        if item.number in reasons:
            logger.warning("series: step %d stays: by now it is %s", item.number, reasons[item.number])
        else:
            going.append(item)
    # If requests are expensive, one listing and a few removals in batches serve all steps; else steps go one by one.
    numbers: list[int] = []
    for items in [going] if isinstance(root, Listed) else [[item] for item in going]:
        numbers += [item.number for item in _remove_together(root, items, failures)]
    _raise_failures(root, failures)
    return tuple(numbers)


def _remove_together(root: Storage, items: list[StepFiles], failures: list[str]) -> list[StepFiles]:
    """Remove several steps together, each phase for all of them before the next; return the steps that were removed.

    Args:
        root: Folder of all steps.
        items: Files of the steps to remove.
        failures: List to which errors are added.
    """
    for phase in (_is_as_planned, _note, *_PHASES):
        items = [item for item in items if _attempt(root, item.folder, partial(phase, root, item), failures)]
        try:
            settle(root)
        except CheckpointingException as error:
            failures += [f"{item.folder}: {str(error).splitlines()[0]}" for item in items]
            return []
    return items


def finish_removals(root: Storage, names: str) -> list[str]:
    """Finish all interrupted removals under a root; return an error text for each that can't be finished."""
    failures: list[str] = []
    prefetch(root, (f"{name}/{RECORD_FILE}" for name in root.names()))
    for name in root.names():
        if step_number(names, name) is not None:
            _attempt(root, name, partial(finish_removal, root, name), failures)
    return failures


def finish_removal(root: Storage, name: str) -> bool:
    """Finish an interrupted removal in a step's folder; return False if no removal had begun there."""
    if root.length(f"{name}/{RECORD_FILE}") is None:
        if is_folder(root, name) and not root.names(name):
            remove_folder(root, name)  # interrupted between the removal of the note and that of the folder
        return False
    record = sound_record(root, name)
    begun = is_being_removed(root, name, record)
    for phase in _PHASES if begun else ():
        phase(root, StepFiles(0, name, record.removing))
        settle(root)
    return begun


def _is_as_planned(root: Storage, item: StepFiles) -> bool:
    """Return whether a step's files are unchanged since the plan was made, and no save to the step is in progress."""
    # The plan lists every file with length and time, so that the removal equals the dry run.
    if any(mark(root, item.folder, file.name) != file for file in item.files):
        if is_folder(root, item.folder):
            logger.warning("series: %s stays: it was changed since the plan", root.where(item.folder))
        return False
    if is_being_saved(folder_in(root, item.folder), [file.name for file in item.files]):
        logger.warning("series: %s stays: a save to it is in progress", root.where(item.folder))
        return False
    return True


def _note(root: Storage, item: StepFiles) -> bool:
    """Replace a step's record by a note with the files to remove; return False if another process removed the step."""
    try:
        write_record(root, item.folder, StepRecord(removing=item.files))
    except StorageError:
        if any(mark(root, item.folder, file.name) == file for file in item.files):
            raise
        return False
    return True


def _remove_files(root: Storage, item: StepFiles, *, part: slice) -> bool:
    """Remove the files `item.files[part]` of a step, except those that have changed since the plan was made.

    The result is True: the removal of the step goes on.
    """
    for file in item.files[part]:
        if mark(root, item.folder, file.name) == file:
            root.remove(f"{item.folder}/{file.name}")
    return True


def _remove_note(root: Storage, item: StepFiles) -> bool:
    """Remove a step's empty folders, and its note (the list of files to remove).

    The result is always True: the step is removed.
    """
    for name in root.names(item.folder):
        if is_temporary(name) and name.startswith(f".{RECORD_FILE}."):
            root.remove(f"{item.folder}/{name}")
    for inner in _folders(root, item.folder, item.files):
        remove_folder(root, f"{item.folder}/{inner}")
    root.remove(f"{item.folder}/{RECORD_FILE}")
    remove_folder(root, item.folder)
    return True


# In each phase, all files are gone before the next begins: first the file that makes the folder a checkpoint.
_PHASES = (partial(_remove_files, part=slice(1)), partial(_remove_files, part=slice(1, None)), _remove_note)


def _folders(root: Storage, folder: str, files: Sequence[FileMark]) -> list[str]:
    """Return the folders inside a step's folder that the removal of files may leave empty, inner ones first."""
    folders = {name for name in root.names(folder) if is_save_folder(name)}
    for file in files:
        parts = file.name.split("/")
        folders |= {"/".join(parts[:count]) for count in range(1, len(parts))}
    return sorted(folders, key=lambda name: (-name.count("/"), name))


def _attempt(root: Storage, folder: str, fn: Callable[[], bool], failures: list[str]) -> bool:
    """Return the result of `fn`, or False if it raises an error.

    The error is added to `failures`, unless the step's folder doesn't exist any more.
    """
    try:
        return fn()
    except CheckpointingException as error:
        if is_folder(root, folder):
            failures.append(f"{folder}: {str(error).splitlines()[0]}")
        return False


def _raise_failures(root: Storage, failures: Sequence[str]) -> None:
    if failures:
        fix = "Resolve the causes and call clean(): it finishes removals that have begun. Then repeat the others."
        raise StorageError(
            error_text(f"series: steps under {root.where()!r} cannot be removed", offenders=failures, fix=fix)
        )


# Orphaned files of steps that were never finished


def clean(root: Storage, names: str, strategies: Strategies | None, *, stale_after: float) -> tuple[str, ...]:
    """Finish interrupted removals, and remove orphaned files of steps that were never finished.

    Args:
        root: Folder of all steps.
        names: Format string of the steps' folder names.
        strategies: Dispatch table; None for the process's.
        stale_after: Seconds without a change after which a save counts as interrupted, if its process can't be seen.

    Returns:
        Folders of unfinished steps that still exist, because a save to them is in progress, or may be, or because they
        have files that shardtree doesn't know.
    """
    with listed(root) as listing:
        failures = finish_removals(listing, names)
        before = time.time() - stale_after
        folders = [folder for folder in listing.names() if _is_unfinished(listing, folder, names, strategies)]
        for folder in folders:
            _clean_step(listing, folder, before)
        _raise_failures(listing, failures)
        return tuple(folder for folder in folders if is_folder(listing, folder))


def _is_unfinished(root: Storage, folder: str, names: str, strategies: Strategies | None) -> bool:
    if step_number(names, folder) is None or is_link(root, folder) or not is_folder(root, folder):
        return False
    return not is_checkpoint(folder_in(root, folder), strategies=strategies)


def _clean_step(root: Storage, folder: str, before: float) -> None:
    storage = folder_in(root, folder)
    for name in storage.names():
        if is_save_folder(name) and is_surely_orphaned(storage, name, before=before):
            remove_interrupted(storage, name)
    if is_being_saved(storage):
        return
    for name in storage.names():
        if name == RECORD_FILE or (is_temporary(name) and (storage.changed(name) or 0.0) < before):
            storage.remove(name)
    remove_folder(root, folder)
