"""The report of `check_strategy`, and the texts of its failures."""

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
    """A backend refused a state that its format can't represent, with an error of ours and without a checkpoint."""


@dataclass(frozen=True, slots=True)
class RefusedCase:
    """A case that a format can't represent.

    Attributes:
        promise: of the case.
        case: its name.
        why: the first line of the error.
    """

    promise: str
    case: str
    why: str


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """The result of `check_strategy`; `str` returns it as a list.

    Attributes:
        backend: the format's name and version.
        kept: the promises that it keeps, in order.
        refused: the cases that it can't represent.
        left_out: the promises that it doesn't make, with the reason.
    """

    backend: tuple[str, int]
    kept: tuple[str, ...]
    refused: tuple[RefusedCase, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return what was kept, refused and left out, one line for each.

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


def failure_text(backend: tuple[str, int], broken: Sequence[Broken], kept: Sequence[str]) -> str:
    """Return the error's text: every broken promise, each with its simplest cases, and the names of those kept.

    What fails for a reason that was given before is only named: a backend's first fault often breaks most promises.

    Examples:
        >>> why = chr(10).join(["raised a raw KeyError: 'w'", "in load_sharded"])
        >>> broken = [Broken("scalars come back", 2, (("a zero", why),)), Broken("objects do", 1, (("one", why),))]
        >>> print(failure_text(("cards", 1), broken, ["tensors do"]))
        ('cards', 1) breaks 2 of 3 promises
          scalars come back: not in 1 of 2 cases
            a zero: raised a raw KeyError: 'w'
              in load_sharded
          objects do: not in 1 of 1 case
            one: as above: raised a raw KeyError: 'w'
          kept: tensors do
    """
    lines, given = [f"{backend} breaks {len(broken)} of {plural(len(broken) + len(kept), 'promise')}"], set[str]()
    for promise in broken:
        lines.append(f"  {promise.promise}: not in {len(promise.cases)} of {plural(promise.tried, 'case')}")
        for name, why in promise.cases[:_SHOWN]:
            first, *others = why.splitlines() or [""]
            repeated = bool(others) and why in given
            lines.append(f"    {name}: {f'as above: {first}' if repeated else _indented(why)}")
            given.add(why)
        if len(promise.cases) > _SHOWN:
            lines.append(f"    and {len(promise.cases) - _SHOWN} more")
    if kept:
        lines.append(f"  kept: {'; '.join(kept)}")
    return "\n".join(lines)


def is_refusal(error: BaseException) -> bool:
    """Return whether a save was refused, on this rank or another, since the format can't represent something.

    Examples:
        >>> is_refusal(UnsupportedValue("complex128")), is_refusal(TypeError("complex128"))
        (True, False)
    """
    return isinstance(error, _REFUSALS)


def failure_reason(error: BaseException) -> str:
    """Return what is wrong, in words: a law's message, or the exception that was raised."""
    if isinstance(error, Refused):
        return f"was refused, which no format may: {error}"
    if isinstance(error, AssertionError):
        return str(error) or "a check failed"
    if isinstance(error, RemoteError) and error.__cause__ is not None:
        error = error.__cause__  # the exception of this rank itself
    kind, raw = "our" if isinstance(error, CheckpointingException) else "a raw", _foreign_error(error)
    text = f"raised {kind} {type(error).__name__}: {str(error)[:_LONGEST]}"
    return text if raw is None else f"{text}\n{_traceback_of(raw)}"


def _foreign_error(error: BaseException) -> BaseException | None:
    """Return the original exception, of this or another rank, if it isn't an error of ours."""
    while isinstance(error, RemoteError) and error.__cause__ is not None:
        error = error.__cause__
    return None if isinstance(error, CheckpointingException) else error


def _traceback_of(error: BaseException) -> str:
    """Return the end of a traceback, from the backend's first frame: that is what its author has to look at."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if not _is_internal(frame.filename)), 0)
    return "".join(traceback.format_list(frames[max(first, len(frames) - _FRAMES) :])).rstrip()


def _is_internal(filename: str) -> bool:
    is_format = filename.startswith(str(_PACKAGE / "strategies")) or "site-packages" in filename
    return filename.startswith((str(_PACKAGE), _PYTHON)) and not is_format


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; for a RemoteError, that of the first rank that failed."""
    if isinstance(error, RemoteError) and error.failures:
        return next(iter(error.failures.values())).splitlines()[0]
    return (str(error).splitlines() or [type(error).__name__])[0]


def _indented(text: str) -> str:
    return "\n      ".join(text.splitlines())
