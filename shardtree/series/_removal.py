"""The plan of a removal of steps, as a value. Printing it is the dry run; executing it removes exactly those files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from ..core.deferred import notebook_html
from ..errors import CorruptCheckpoint, NotACheckpoint, StrategyError, plural
from ..shell.checkpoint.saving import is_live, own_files
from ..shell.storage import Storage, files_in, folder_in, is_folder, is_link, is_temporary, siblings
from ..shell.table import (
    METADATA_FILE,
    Strategies,
    deciding_files,
    is_deciding,
    is_of_others,
    is_save_file,
    is_save_folder,
    is_surely_orphaned,
)
from ._listing import RECORD_FILE, FileMark, mark
from .policies import SavedStep

IRREMOVABLE = "cannot be removed"
"""Start of the reason why a step stays although no policy keeps it."""


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The files that a removal takes from one step, and those that it leaves.

    Attributes:
        number: Number of the step.
        folder: Name of the step's folder under the root.
        files: Files to remove: the checkpoint's own, beginning with those that make the folder a checkpoint.
        others: Names of other files in the folder, which stay.
    """

    number: int
    folder: str
    files: tuple[FileMark, ...]
    others: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes to remove in this step."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Removal:
    """A plan of the steps to remove and to keep, with reasons. Printing it is the dry run.

    Attributes:
        steps: All finished steps when the plan was made, in the order of their numbers.
        kept: Reasons for keeping a step, by the step's number.
        going: Files of each step to remove.

    Examples:
        >>> from shardtree.retention import keep_last, kept_steps
        >>> steps = tuple(SavedStep(number, time=1.8e9) for number in (100, 200))
        >>> going = (StepFiles(100, "step_100", (FileMark("metadata.json", 300, 1.8e9),), ("notes.txt",)),)
        >>> print(Removal(steps, kept_steps(keep_last(1), steps), going))
        step  saved (UTC)
         100  2027-01-15 08:00:00  goes: 300 bytes in 1 file; 1 other file stays
         200  2027-01-15 08:00:00  stays: the newest, keep_last(1)
        1 step goes, 300 bytes; 1 step stays
    """

    steps: tuple[SavedStep, ...]
    kept: Mapping[int, tuple[str, ...]]
    going: tuple[StepFiles, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes to remove in all steps."""
        return sum(step.nbytes for step in self.going)

    @property
    def irremovable(self) -> tuple[int, ...]:
        """Numbers of the steps that stay only because they can't be removed, such as one that is being saved."""
        return tuple(number for number, reasons in self.kept.items() if reasons[0].startswith(IRREMOVABLE))

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return notebook_html(self)


def _lines(removal: Removal) -> Iterator[str]:
    going = {step.number: step for step in removal.going}
    width = max([4, *(len(str(step.number)) for step in removal.steps)])
    yield f"{'step':>{width}}  saved (UTC)"
    for step in removal.steps:
        fate = _goes(going[step.number]) if step.number in going else f"stays: {', '.join(removal.kept[step.number])}"
        yield f"{step.number:>{width}}  {_moment(step.time)}  {fate}"
    count, stays = len(going), plural(len(removal.steps) - len(going), "step")
    leaves = f"{plural(count, 'step')} {'goes' if count == 1 else 'go'}, {removal.nbytes:,} bytes"
    yield f"{leaves}; {stays} {'stays' if stays.startswith('1 ') else 'stay'}"


def _goes(step: StepFiles) -> str:
    text = f"goes: {step.nbytes:,} bytes in {plural(len(step.files), 'file')}"
    count = len(step.others)
    return f"{text}; {plural(count, 'other file')} {'stays' if count == 1 else 'stay'}" if count else text


def _moment(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time!r:>19}"


# The files of a step's folder that a removal may take: the checkpoint's own, and no others

STALE_AFTER = 3600.0
"""Seconds without a change after which a save counts as interrupted, if its process can't be seen."""


def step_files(root: Storage, folder: str, number: int, strategies: Strategies | None) -> StepFiles | str:
    """Return the files that a removal of a step takes, or the reason why the step can't be removed.

    Args:
        root: Folder of all steps.
        folder: Folder of the step.
        number: Number of the step.
        strategies: Dispatch table; None for the process's.
    """
    if is_link(root, folder):
        return "its folder is a link"
    if not is_folder(root, folder):
        return "it is a single file"
    storage = folder_in(root, folder)
    try:
        checkpoint_files = _own(storage, strategies)
    except CorruptCheckpoint:
        return "it is damaged, so that it is not known which files are its own"
    except StrategyError:
        return "its format does not say which files are its own"
    except NotACheckpoint:
        return "it is gone"
    if is_being_saved(storage, checkpoint_files):
        return "a save to it is in progress"
    names = tuple(name.removeprefix(f"{folder}/") for name in files_in(root, folder))
    # Files left by crashed saves of this step go too, but only those with names that a save gives.
    ours = [
        name
        for name in names
        if name in checkpoint_files or is_save_file(name) or is_temporary(name.rpartition("/")[2])
    ]
    # Removing through a link could empty another checkpoint.
    links = [name for name in names if is_link(root, f"{folder}/{name}")]
    if any(name == link or name.startswith(f"{link}/") for link in links for name in (*checkpoint_files, *ours)):
        return "some of its files are links"
    order = partial(_order, deciding_files(strategies))
    marks = (mark(root, folder, name) for name in sorted(ours, key=order))
    others = tuple(name for name in names if name not in {*ours, RECORD_FILE})
    return StepFiles(number, folder, tuple(file_mark for file_mark in marks if file_mark is not None), others)


def is_being_saved(storage: Storage, own: Iterable[str] = ()) -> bool:
    """Return whether a save to a folder is in progress, or may be.

    Args:
        storage: The folder.
        own: Files of the finished checkpoint in the folder; their save counts as finished.
    """
    before = time.time() - STALE_AFTER
    own_folders = {name.partition("/")[0] for name in own}
    inside = (name for name in storage.names() if is_save_folder(name) and name not in own_folders)
    if any(not is_surely_orphaned(storage, name, before=before) for name in inside):
        return True
    beside = siblings(storage).items()
    return any(is_save_folder(name) and is_live(name, sibling, before=before) for name, sibling in beside)


def _own(storage: Storage, strategies: Strategies | None) -> set[str]:
    try:
        own = own_files(storage, strategies)
    except CorruptCheckpoint:
        # A native checkpoint's files are known by their names, even if its metadata or index is damaged.
        if not any(is_save_folder(name) for name in storage.names()):
            raise
        return {METADATA_FILE}
    if storage.length(METADATA_FILE) is not None and is_of_others(storage.read(METADATA_FILE)):
        own.discard(METADATA_FILE)
    return own


def _order(decided_by: tuple[str, ...], name: str) -> tuple[int, str]:
    """Return the sort key of a file in a removal: files that make the folder a checkpoint come first.

    Args:
        decided_by: Patterns for the names of files that make a folder a checkpoint.
        name: Name of the file.
    """
    return (0 if name == METADATA_FILE else 1 if is_deciding(name, decided_by) else 2), name
