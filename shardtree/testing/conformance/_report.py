"""What a backend was asked, and how it answered: the report of a suite, and the text of its failure."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CheckpointingException, RemoteError, StorageError, StrategyError, UnsupportedValue, plural

_SHOWN = 3  # cases of one promise
_REFUSALS = (UnsupportedValue, StrategyError, StorageError)
_LONGEST = 300  # characters of what was raised: a traceback says the rest
_FRAMES = 6  # of that traceback, the innermost
_PACKAGE = Path(__file__).parents[2]
_PYTHON = sysconfig.get_path("stdlib")


class Refused(Exception):
    """A backend said, with an error of ours and before anything counted, that it can't hold what it was given."""


@dataclass(frozen=True, slots=True)
class RefusedCase:
    """What a format said that it can't hold.

    Attributes:
        promise: whose case it is.
        case: its name.
        why: the first line of the error.
    """

    promise: str
    case: str
    why: str


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """What a backend was asked. Its text is a list.

    Attributes:
        backend: the format's name and version.
        kept: the promises that it keeps, in order.
        refused: what it said it can't hold.
        left_out: the promises that it doesn't make, with why.
    """

    backend: tuple[str, int]
    kept: tuple[str, ...]
    refused: tuple[RefusedCase, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return what was kept, refused and left out, a line each.

        Examples:
            >>> print(StrategyReport(("cards", 1), ("scalars come back",), left_out={"objects come back": "no row"}))
            ('cards', 1) keeps 1 promise
              kept: scalars come back
              left out: objects come back: no row
        """
        cases: dict[tuple[str, str], list[str]] = {}
        for refusal in self.refused:
            cases.setdefault((refusal.promise, refusal.why), []).append(refusal.case)
        lines = [f"kept: {promise}" for promise in self.kept]
        lines += [f"refused: {promise}: {', '.join(names)}: {why}" for (promise, why), names in cases.items()]
        lines += [f"left out: {promise}: {why}" for promise, why in self.left_out.items()]
        return "\n  ".join([f"{self.backend} keeps {plural(len(self.kept), 'promise')}", *lines])


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that isn't kept.

    Attributes:
        promise: its name.
        tried: how many cases there are.
        cases: the names of those that fail, simple ones first, each with what is wrong.
    """

    promise: str
    tried: int
    cases: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the promise and its first failing cases."""
        lines = [f"{name}: {_indented(why)}" for name, why in self.cases[:_SHOWN]]
        more = [f"and {len(self.cases) - _SHOWN} more"] if len(self.cases) > _SHOWN else []
        head = f"{self.promise}: not in {len(self.cases)} of {plural(self.tried, 'case')}"
        return "\n    ".join([head, *lines, *more])


def failure_text(backend: tuple[str, int], broken: Sequence[Broken], promises: int) -> str:
    """Return the text that names every broken promise, each with its simplest cases."""
    head = f"{backend} breaks {len(broken)} of {plural(promises, 'promise')}"
    return "\n  ".join([head, *map(str, broken)])


def is_refusal(error: BaseException) -> bool:
    """Return whether a save said that a format can't hold something, on this rank or another.

    Examples:
        >>> is_refusal(UnsupportedValue("complex128")), is_refusal(TypeError("complex128"))
        (True, False)
    """
    return isinstance(error, _REFUSALS)


def told(error: BaseException) -> str:
    """Return what is wrong in words: what a law says, or what was raised in place of an answer."""
    if isinstance(error, Refused):
        return f"was refused, which no format may: {error}"
    if isinstance(error, AssertionError):
        return str(error) or "a check failed"
    if isinstance(error, RemoteError) and error.__cause__ is not None:
        error = error.__cause__  # this rank's own
    kind, raw = "our" if isinstance(error, CheckpointingException) else "a raw", _raw(error)
    text = f"raised {kind} {type(error).__name__}: {str(error)[:_LONGEST]}"
    return text if raw is None else f"{text}\n{_where(raw)}"


def _raw(error: BaseException) -> BaseException | None:
    """Return what was raised, or what a rank raised before all of them said so, if it isn't an error of ours."""
    while isinstance(error, RemoteError) and error.__cause__ is not None:
        error = error.__cause__
    return None if isinstance(error, CheckpointingException) else error


def _where(error: BaseException) -> str:
    """Return the end of an error's traceback, from the first frame that is neither ours nor Python's: the backend's."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if not _is_on_the_way(frame.filename)), 0)
    return "".join(traceback.format_list(frames[max(first, len(frames) - _FRAMES) :])).rstrip()


def _is_on_the_way(filename: str) -> bool:
    is_format = filename.startswith(str(_PACKAGE / "strategies")) or "site-packages" in filename
    return filename.startswith((str(_PACKAGE), _PYTHON)) and not is_format


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; of another rank's error where only that one failed."""
    if isinstance(error, RemoteError) and error.failures:
        return next(iter(error.failures.values())).splitlines()[0]
    return (str(error).splitlines() or [type(error).__name__])[0]


def _indented(text: str) -> str:
    return "\n      ".join(text.splitlines())
