"""What a series knows of a step beside the checkpoint itself: a small file in the step's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ...codec import canonical_json, parse_json
from ...errors import CorruptCheckpoint, MetadataError, StorageError, error_text
from ...storage import Storage

RECORD_FILE = "shardtree-step.json"

_VERSION = 1
_MOST_BYTES = 64 * 1024 * 1024
_NOT_FINITE = {"nan", "inf", "-inf"}


@dataclass(frozen=True, slots=True)
class FileMark:
    """A file as it was when a removal was planned: what has changed since is another file, and stays.

    Attributes:
        name: in the step's folder.
        nbytes: its length.
        changed: when it was changed last, by the storage's clock.
    """

    name: str
    nbytes: int
    changed: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """What the file says.

    Attributes:
        time: when the step was saved, in seconds since 1970; None where that isn't known.
        metrics: what was measured of it.
        pinned: whether it is kept whatever a policy says.
        removing: the files that are being removed, those that make it a checkpoint first; else none.
    """

    time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    removing: tuple[FileMark, ...] = ()


def encode_record(record: Record) -> bytes:
    """Return a record's bytes.

    Examples:
        >>> encode_record(Record(12.5, {"loss": float("nan")}))
        b'{"metrics":{"loss":"nan"},"pinned":false,"removing":[],"step_record":1,"time":12.5}'
    """
    metrics = {name: value if isfinite(value) else str(value) for name, value in record.metrics.items()}
    removing = [[mark.name, mark.nbytes, mark.changed] for mark in record.removing]
    fields = {"time": record.time, "metrics": metrics, "pinned": record.pinned, "removing": removing}
    return canonical_json({"step_record": _VERSION, **fields})


def decode_record(data: bytes, where: str) -> Record:
    """Return the record of a file's bytes.

    Raises:
        CorruptCheckpoint: they are no record, or a later version's.
    """
    fields = parse_json(data, where)
    try:
        if fields["step_record"] != _VERSION or type(fields["pinned"]) is not bool:
            raise ValueError("not a record of this version")
        metrics = {str(name): _number(value) for name, value in fields["metrics"].items()}
        removing = tuple(FileMark(_text(name), _whole(size), _time(when)) for name, size, when in fields["removing"])
        return Record(_time(fields["time"]), metrics, fields["pinned"], removing)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        fix = "It was damaged, or made by another program or a later version; the step is kept."
        raise CorruptCheckpoint(error_text(f"series: {where!r} is no record of a step", found=error, fix=fix)) from None


def read_record(root: Storage, folder: str) -> Record | None:
    """Return the record of a step, None if it has none.

    Raises:
        CorruptCheckpoint: it can't be read.
    """
    name = f"{folder}/{RECORD_FILE}"
    length = root.length(name)
    if length is None:
        return None
    if length > _MOST_BYTES:
        raise CorruptCheckpoint(
            error_text(f"series: {root.where(name)!r} is no record of a step", found=f"{length} bytes")
        )
    try:
        return decode_record(root.read(name), root.where(name))
    except StorageError:
        if root.length(name) is None:
            return None  # removed in between
        raise


def write_record(root: Storage, folder: str, record: Record) -> None:
    """Write the record of a step, in one step; the folder is there."""
    root.replace(f"{folder}/{RECORD_FILE}", encode_record(record), durable=True)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats; tensors with one element count as numbers.

    Raises:
        MetadataError: a name isn't text, or a value no number.

    Examples:
        >>> checked_metrics({"loss": 1})
        {'loss': 1.0}
    """
    if metrics is None:
        return {}
    try:
        if not all(isinstance(name, str) and name.isprintable() for name in metrics):
            raise TypeError("a name that isn't text")
        return {name: _metric(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        found, expected = str(error)[:200], "numbers by name, such as {'loss': 0.25}"
        raise MetadataError(error_text("series: these are no metrics", found=found, expected=expected)) from error


def _metric(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a value that is text: {value!r}")
    return float(value)


def _number(value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{value!r} isn't a number"[:200])


def _time(value: object) -> float | None:
    return None if value is None else _number(value)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} isn't a name"[:200])


def _whole(value: object) -> int:
    if type(value) is int:
        return value
    raise ValueError(f"{value!r} isn't a length"[:200])
