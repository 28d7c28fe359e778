"""Saving a step: its checkpoint, and the record file with its time, metrics and pin, committed together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..core.geometry import as_int
from ..errors import MetadataError, error_text
from ..shell.checkpoint import check_options, is_checkpoint
from ..shell.storage import Storage, folder_in, remove_folder
from ..shell.table import AsyncRequest, SaveOptions, Strategies
from ._listing import (
    RECORD_FILE,
    StepRecord,
    checked_metrics,
    read_record,
    sound_record,
    step_folder,
    step_number,
    write_record,
)
from ._remove import finish_removal
from .policies import SavedStep

logger = logging.getLogger("shardtree")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class SavePlace:
    """The destination of one save of a step.

    Attributes:
        root: Folder of all steps.
        folder: Name of the step's folder under the root.
        record: Metrics and pin to record with the step; the time is added when the record is written.
        strategies: Dispatch table; None for the process's.
    """

    root: Storage
    folder: str
    record: StepRecord
    strategies: Strategies | None

    @property
    def name(self) -> str:
        """Path of the step's record file, relative to the root."""
        return f"{self.folder}/{RECORD_FILE}"

    def is_finished(self) -> bool:
        """Return whether the step's folder holds a finished checkpoint."""
        return is_checkpoint(folder_in(self.root, self.folder), strategies=self.strategies)


def checked_step(number: object) -> int:
    """Return the number of a step as an int.

    Raises:
        MetadataError: The argument isn't a step's number.

    Examples:
        >>> import numpy
        >>> checked_step(100), checked_step(numpy.int64(100))
        (100, 100)
    """
    step = as_int(number)
    if step is not None and 0 <= step < 10**18:
        return step
    heading = "series: invalid step number"
    raise MetadataError(error_text(heading, found=repr(number)[:200], expected="an int, 0 or more"))


def check_save(step: object, metrics: Mapping[str, Any] | None, options: object) -> tuple[int, Mapping[str, float]]:
    """Return a step's number and metrics as plain numbers, after checking these and the save's options."""
    check_options("series: save", options, SaveOptions)
    return checked_step(step), checked_metrics(metrics)


def each_metric(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics under names such as ``metrics['loss']``, which an error shows if ranks differ.

    The result is empty for invalid metrics: `check_save` reports those.
    """
    # Metrics are compared as numbers: a tensor's text names its device, which differs between ranks.
    with suppress(MetadataError):
        return {f"metrics[{name!r}]": value for name, value in checked_metrics(metrics).items()}
    return {}


def alike_step(step: object) -> object:
    """Return a step's number as an int, for a comparison between ranks; other values are returned unchanged.

    Examples:
        >>> import numpy
        >>> alike_step(SavedStep(100)), alike_step(numpy.int64(100)), alike_step("latest")
        (100, 100, 'latest')
    """
    number = getattr(step, "number", step)
    found = as_int(number)
    return number if found is None else found


def folder_for(root: Storage, names: str, number: int) -> str:
    """Return the name of the folder to save a step to, after finishing an interrupted removal in it.

    A step that exists keeps its folder, whatever its number of leading zeros. A warning is logged if steps with higher
    numbers exist.

    Args:
        root: Folder of all steps.
        names: Format string of the steps' folder names.
        number: Number of the step.
    """
    usual = step_folder(names, number)
    numbers = {folder: step_number(names, folder) for folder in root.names()}
    there = [folder for folder, step in numbers.items() if step == number]
    ahead = sorted(step for step in numbers.values() if step is not None and step > number)
    if ahead:
        logger.warning(
            "series: step %d is saved behind step %d, which is still the newest to `latest` and to policies;"
            " if the run went back, `drop_after` removes the later steps",
            number,
            ahead[-1],
        )
    # A step may have been saved under another number of leading zeros, for example by Megatron-LM.
    folder = usual if usual in there or not there else there[0]
    if there:
        finish_removal(root, folder)
    return folder


def with_record(request: AsyncRequest[T], place: SavePlace) -> AsyncRequest[T]:
    """Return the request of a save with the step's record added: rank 0 writes it, and undoes it if the save fails."""
    if request.world.rank != 0:
        return request.add_finalize_fn(nothing)  # ranks finalize together, so each needs the same number of functions

    before: list[bytes | None] = []  # the old record, once a new one is written

    def write() -> T:
        result = request.async_fn()
        _announce(place, before)
        return result

    def abandon() -> None:
        request.abandon()
        while before:
            _take_back(place, before.pop())

    def confirm() -> None:
        write_record(place.root, place.folder, replace(place.record, time=time.time()))

    return replace(request, async_fn=write, finalize_fns=(*request.finalize_fns, confirm), abandon=abandon)


def nothing() -> None:
    """Do nothing: a finalizer for the ranks that have no task when others finalize."""


def _announce(place: SavePlace, before: list[bytes | None]) -> None:
    """Write the step's record before the save is committed.

    If the folder already holds a checkpoint of the step, the new record gets its time and metrics only after the
    commit: a crash in between must not leave the old checkpoint with the new metrics. Until then, the step is pinned if
    the old record or the new one says so.

    Args:
        place: Destination of the save.
        before: List that gets the content of the old record file, or None if there is none.
    """
    data = place.root.read(place.name) if place.root.length(place.name) is not None else None
    record = replace(place.record, time=time.time())
    if place.is_finished():
        # Metrics and time are left out: a crash before the commit must not leave the old checkpoint with the new one's.
        pinned = record.pinned or sound_record(place.root, place.folder).pinned
        record = StepRecord(pinned=pinned)
    before[:] = [data]  # before the write: if that fails, the old record is restored
    write_record(place.root, place.folder, record)


def _take_back(place: SavePlace, before: bytes | None) -> None:
    """Restore the old record file after a failed save, or remove the new one if none existed; never raises."""
    try:
        if before is not None:
            place.root.replace(place.name, before, durable=True)
        elif not place.is_finished():
            place.root.remove(place.name)
            remove_folder(place.root, place.folder)
    except Exception as error:
        logger.warning("series: the record of a failed save stays in %s: %s", place.root.where(place.folder), error)


def change_record(root: Storage, step: SavedStep, change: Callable[[StepRecord], StepRecord]) -> None:
    """Replace a finished step's record by a function's result for it, with the time of the save unchanged.

    Raises:
        CorruptCheckpoint: The existing record can't be read.
    """
    before = read_record(root, step.folder) or StepRecord()
    record = StepRecord() if before.removing else before
    write_record(root, step.folder, replace(change(record), time=step.time))
