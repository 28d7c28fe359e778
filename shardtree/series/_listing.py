"""The listing of a series: finished checkpoints under a root, each with the file that records its time and metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from string import Formatter
from typing import Any

from ..core import limits
from ..core.codec import canonical_json, parse_json
from ..errors import CorruptCheckpoint, MetadataError, StorageError, error_text
from ..shell.checkpoint import is_checkpoint
from ..shell.storage import Storage, folder_in, is_folder, listed, prefetch
from ..shell.table import METADATA_FILE, Strategies, deciding_files, is_deciding
from .policies import SavedStep, sorted_steps

# Names of steps' folders


def check_names(names: object) -> None:
    """Raise an error unless `names` is a format of folders' names from which the step number can be parsed.

    Raises:
        MetadataError: It isn't such a format.
    """
    try:
        fine = isinstance(names, str) and all(step_number(names, step_folder(names, one)) == one for one in (0, 12345))
    except (ValueError, LookupError, AttributeError):
        fine = False
    if not fine or "/" in str(names) or "\0" in str(names):
        expected = "text with one placeholder for the step, such as 'step_{:08d}', 'iter_{:07d}' or '{}'"
        raise MetadataError(error_text("series: invalid value of names=", found=repr(names)[:200], expected=expected))


def step_folder(names: str, number: int) -> str:
    """Return the name of a step's folder, made with the format `names`.

    Examples:
        >>> step_folder("step_{:08d}", 42)
        'step_00000042'
    """
    return names.format(number)


def step_number(names: str, folder: str) -> int | None:
    """Return the step number in a folder's name; None if the name doesn't have the format `names`.

    The number may have more or fewer leading zeros than in the format.

    Examples:
        >>> step_number("step_{:08d}", "step_42"), step_number("step_{:08d}", "notes")
        (42, None)
    """
    match = _pattern(names).fullmatch(folder)
    return int(match[1]) if match else None


@cache
def _pattern(names: str) -> re.Pattern[str]:
    (before, name, *_), *rest = Formatter().parse(names)
    if name is None or any(field is not None for _, field, *_ in rest):
        raise ValueError("not one number")
    after = "".join(text for text, *_ in rest)
    # Digits are limited: parsing a number takes time that grows with the square of its length.
    return re.compile(f"{re.escape(before)}([0-9]{{1,18}}){re.escape(after)}")


# The record of a step is a file of its own in the step's folder. Inside the checkpoint's files, only our own format
# could hold it, and under the root it would stay behind when the folder is copied or moved.

RECORD_FILE = "shardtree-step.json"

_VERSION = 1
_NOT_FINITE = {"nan", "inf", "-inf"}


@dataclass(frozen=True, slots=True)
class FileMark:
    """The state of a file when a removal was planned. A file that has changed since isn't removed.

    Attributes:
        name: Name in the step's folder.
        nbytes: Length in bytes.
        changed: Time of the file's last change, by the storage's clock.
    """

    name: str
    nbytes: int
    changed: float | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The content of the file `shardtree-step.json` in a step's folder.

    Attributes:
        time: Time of the save, in seconds since 1970; None if it isn't known.
        metrics: Metrics by name.
        pinned: Whether every policy keeps the step.
        removing: Files to remove, beginning with those that make the folder a checkpoint, if a removal of the step has
            begun; otherwise empty.
    """

    time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    removing: tuple[FileMark, ...] = ()


def encode_record(record: StepRecord) -> bytes:
    """Return the bytes of a step's record, which are JSON.

    Examples:
        >>> encode_record(StepRecord(12.5, {"loss": float("nan")}))
        b'{"metrics":{"loss":"nan"},"pinned":false,"removing":[],"step_record":1,"time":12.5}'
    """
    # JSON has no NaN and no infinity.
    metrics = {name: value if isfinite(value) else str(value) for name, value in record.metrics.items()}
    removing = [[mark.name, mark.nbytes, mark.changed] for mark in record.removing]
    fields = {"time": record.time, "metrics": metrics, "pinned": record.pinned, "removing": removing}
    return canonical_json({"step_record": _VERSION, **fields})


def decode_record(data: bytes, where: str) -> StepRecord:
    """Return the step's record that bytes of a file contain.

    Args:
        data: Bytes of the file.
        where: Path of the file, for errors.

    Raises:
        CorruptCheckpoint: The bytes aren't a record, or were written by a later version.
    """
    fields = parse_json(data, where)
    try:
        if fields["step_record"] != _VERSION or type(fields["pinned"]) is not bool:
            raise ValueError("not a record of this version")
        metrics = {str(name): _number(value) for name, value in fields["metrics"].items()}
        removing = tuple(FileMark(_text(name), _whole(size), _time(when)) for name, size, when in fields["removing"])
        return StepRecord(_time(fields["time"]), metrics, fields["pinned"], removing)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        fix = "If a later version of shardtree wrote the record, update shardtree; else restore the file from a copy.\n"
        fix += "  Until the record can be read, no policy removes the step."
        heading = f"series: {where!r} is not a record of a step"
        raise CorruptCheckpoint(error_text(heading, found=error, fix=fix)) from None


def read_record(root: Storage, folder: str) -> StepRecord | None:
    """Return a step's record; None if the step's folder has no record file.

    Raises:
        CorruptCheckpoint: The record can't be read.
    """
    name = f"{folder}/{RECORD_FILE}"
    length = root.length(name)
    if length is None:
        return None
    if length > limits.SIDE_FILE_BYTES:
        heading, expected = f"series: {root.where(name)!r} is too large", f"at most {limits.SIDE_FILE_BYTES}"
        fix = (
            "Restore this file, the record of a step, from a copy of the step. Until it can be read, no policy removes "
            "the step."
        )
        raise CorruptCheckpoint(error_text(heading, found=f"{length} bytes", expected=expected, fix=fix))
    try:
        return decode_record(root.read(name), root.where(name))
    except StorageError:
        if root.length(name) is None:
            return None  # removed in between
        raise


def write_record(root: Storage, folder: str, record: StepRecord) -> None:
    """Replace the record of a step atomically; its folder must exist."""
    root.replace(f"{folder}/{RECORD_FILE}", encode_record(record), durable=True)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats by name; a value may be a number or a tensor with one element.

    Raises:
        MetadataError: A name isn't a printable string, or a value isn't a number.

    Examples:
        >>> checked_metrics({"loss": 1})
        {'loss': 1.0}
    """
    if metrics is None:
        return {}
    try:
        if not all(isinstance(name, str) and name.isprintable() for name in metrics):
            raise TypeError("a name that is not text")
        return {name: _metric(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        problem, expected = str(error)[:200], "names and numbers, such as {'loss': 0.25}"
        raise MetadataError(
            error_text("series: metrics is not a dict from names to numbers", found=problem, expected=expected)
        ) from error


def _metric(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a value that is text: {value!r}")
    return float(value)


def _number(value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{value!r} is not a number"[:200])


def _time(value: object) -> float | None:
    return None if value is None else _number(value)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not a name"[:200])


def _whole(value: object) -> int:
    if type(value) is int:
        return value
    raise ValueError(f"{value!r} is not a length"[:200])


logger = logging.getLogger("shardtree")


def list_steps(root: Storage, names: str, strategies: Strategies | None) -> tuple[SavedStep, ...]:
    """Return the finished steps under a root, in the order of their numbers.

    Steps whose save isn't finished, or whose removal has begun, are left out.

    Args:
        root: Folder of all steps.
        names: Format of their folders' names.
        strategies: Dispatch table; None for the process's.
    """
    # The steps are listed anew each time: a cached listing would miss other processes' saves, and a thousand steps take
    # only some tenths of a second.
    steps: dict[int, SavedStep] = {}
    with listed(root) as listing:
        folders = [folder for folder in listing.names() if step_number(names, folder) is not None]
        prefetch(listing, (f"{folder}/{file}" for folder in folders for file in (METADATA_FILE, RECORD_FILE)))
        for folder in folders:
            step = saved_step(listing, folder, step_number(names, folder) or 0, strategies)
            if step is None:
                continue
            if step.number in steps:
                first, second = map(root.where, (steps[step.number].folder, folder))
                logger.warning("series: %s and %s are the same step", first, second)
            if step.number not in steps or folder == step_folder(names, step.number):
                steps[step.number] = step
    return sorted_steps(steps.values())


def newest_step(root: Storage, names: str, strategies: Strategies | None) -> SavedStep | None:
    """Return the finished step with the highest number; None if there is none. Older steps aren't read.

    Args:
        root: Folder of all steps.
        names: Format of their folders' names.
        strategies: Dispatch table; None for the process's.
    """
    with listed(root) as listing:
        pairs = [(number, folder) for folder in listing.names() if (number := step_number(names, folder)) is not None]
        # If two folders hold one step, the one with its usual name counts.
        order = sorted(pairs, key=lambda each: (each[0], each[1] == step_folder(names, each[0])), reverse=True)
        steps = (saved_step(listing, folder, number, strategies) for number, folder in order)
        return next((step for step in steps if step is not None), None)


def saved_step(root: Storage, folder: str, number: int, strategies: Strategies | None) -> SavedStep | None:
    """Return the step in a folder; None if the folder has no finished checkpoint, or its removal has begun."""
    try:
        if not is_checkpoint(folder_in(root, folder), strategies=strategies):
            return None
        record = sound_record(root, folder)
        if is_being_removed(root, folder, record):
            return None
        time = _save_time(root, folder, strategies) if record.time is None or record.removing else record.time
    except StorageError:
        if is_folder(root, folder):
            raise
        return None  # removed in between
    if record.removing:
        record = StepRecord()  # the old record belonged to a checkpoint that another save has replaced since
    return SavedStep(number, time, record.metrics, record.pinned, folder)


def sound_record(root: Storage, folder: str) -> StepRecord:
    """Return a step's record, or an empty one if the step has none.

    If the record can't be read, the result is pinned, so that no policy removes a step that may be pinned.
    """
    try:
        return read_record(root, folder) or StepRecord()
    except CorruptCheckpoint as error:
        logger.warning("%s", error)
        return StepRecord(pinned=True)


def is_being_removed(root: Storage, folder: str, record: StepRecord) -> bool:
    """Return whether a removal of the checkpoint in a folder has begun and isn't finished.

    The answer is False if the file that makes the folder a checkpoint was replaced after the removal began: then a save
    that didn't know of the removal has put a new checkpoint there.
    """
    if not record.removing:
        return False
    first = record.removing[0]
    return mark(root, folder, first.name) in (first, None)


def mark(root: Storage, folder: str, name: str) -> FileMark | None:
    """Return a file's present length and time of last change, to compare later; None if it doesn't exist."""
    full = f"{folder}/{name}"
    length = root.length(full)
    return None if length is None else FileMark(name, length, root.changed(full))


def _save_time(root: Storage, folder: str, strategies: Strategies | None) -> float:
    """Return an estimate of a checkpoint's save time: the last change of the files that make it a checkpoint."""
    decider = root.changed(f"{folder}/{METADATA_FILE}")
    if decider is not None:
        return decider
    decided_by = deciding_files(strategies)
    times = [root.changed(f"{folder}/{name}") for name in root.names(folder) if is_deciding(name, decided_by)]
    return max((time for time in times if time is not None), default=0.0)
