"""`check_strategy`, which tests every promise that a backend makes by its rows in the dispatch table."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from ...errors import CheckpointingException, RemoteError, StrategyError, error_text, plural
from ...shell.storage import Directory
from ...shell.table import Strategies, StrategyAction
from ...stores import MemoryStorage
from . import _layout_cases, _row_cases
from ._promises import PROMISES, added_promises, refuse_unknown
from ._subject import ActionCheck, Case, Promise, Refused, Subject, Writer, raising


@dataclass(frozen=True, slots=True)
class RefusedCase:
    """A case that a format can't represent.

    Attributes:
        promise: Promise that the case tests.
        case: Name of the case.
        why: First line of the error.
    """

    promise: str
    case: str
    why: str


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """The result of `check_strategy`; `str` lists the promises, one on each line.

    Attributes:
        backend: Name and version of the format.
        kept: Promises that the backend keeps, in order.
        refused: Cases that the format can't represent.
        left_out: Promises that the backend doesn't make, with the reason.
    """

    backend: tuple[str, int]
    kept: tuple[str, ...]
    refused: tuple[RefusedCase, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the kept promises, the refused cases and the promises that are left out, one line for each.

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
class _BrokenPromise:
    """A promise that isn't kept.

    Attributes:
        promise: Name of the promise.
        count: Number of cases.
        cases: Names of the failing cases, simple ones first, each with its fault.
    """

    promise: str
    count: int
    cases: tuple[tuple[str, str], ...]


def check_strategy(
    backend: str,
    version: int,
    *,
    strategies: Strategies | None = None,
    directory: Callable[[], Directory] = MemoryStorage,
    save: Writer | None = None,
    examples: int = 10,
    only: Collection[str] = (),
    promises: Mapping[Enum, ActionCheck] | None = None,
    protocols: Mapping[Enum, type] | None = None,
) -> StrategyReport:
    """Check that a backend keeps every promise that its rows make, and return a report.

    A row is the backend's function for an action, and makes the promises of this action; an action that the caller
    added needs a check in `promises`. While it saves, a backend may refuse values that its format can't represent, with
    `UnsupportedValue` (or `StrategyError`, `StorageError`), but must not change them. It must not refuse a few plain
    tensors. Cases are plain and fixed, simple ones first; if all of them pass, random states in random layouts are
    tried, and failures are shrunk. The same cases run each time.

    Args:
        backend: Name of the format.
        version: Version of the format.
        strategies: Dispatch table, such as ``default_strategies | {row: fn}``; None for the process's.
        directory: Function that returns a new place for a checkpoint at each call: a path, a URL or a `Storage`.
        save: Function that writes trees, one for each rank, to a place, for a format without a row for saving. Without
            it, loads of such a format aren't tried.
        examples: Number of random states to try.
        only: Names of the promises to try, for example while one of them is being fixed; all by default.
        promises: Checks of added actions, by action: a member of an Enum of the caller's, whose value is a string. A
            check is called as ``check(function, save)``, with the row's function and a ``save`` that takes trees, one
            for each rank, and returns their `Checkpoint` in this backend. It raises AssertionError if the function is
            wrong. In `only` and the report, the promise is named after the action's value, as in the example.
        protocols: Protocols of added actions, by action: signatures that the rows' functions must match. Without a
            protocol, the signature isn't checked.

    Returns:
        The report: kept promises, refused cases, and promises that were left out, with reasons.

    Raises:
        AssertionError: The backend breaks promises; the error names each, with its simplest failing cases.
        StrategyError: The table has no row for the backend, or has one for an added action without a check.

    Examples:
        >>> print(check_strategy("safetensors", 1, only=["scalars come back", "flat ranges come back"]))
        ('safetensors', 1) keeps 2 promises
          kept: scalars come back
          kept: flat ranges come back

        An added action, with a wrong row:

        >>> from shardtree import default_strategies
        >>> Added = Enum("Added", {"COUNT": "count_tensors"})
        >>> table = default_strategies | {(Added.COUNT, "safetensors", 1): lambda checkpoint: 1}
        >>> def check(count, save):
        ...     assert count(save({"step": 3})) == 0, "counts what is not there"
        >>> only = ["count_tensors keeps its promise"]
        >>> check_strategy("safetensors", 1, strategies=table, promises={Added.COUNT: check}, only=only)
        Traceback (most recent call last):
        AssertionError: ('safetensors', 1) breaks 1 of 1 promise
          count_tensors keeps its promise: not in 1 of 1 case
            its check: counts what is not there
    """
    checks = promises or {}
    subject = Subject(backend, version, strategies, directory, save, examples, protocols or {})
    if not subject.actions():
        heading = f"check_strategy: the dispatch table has no rows for {(backend, version)!r}"
        fix = "Register the backend's functions, or pass them by strategies=default_strategies | {...}."
        raise StrategyError(error_text(heading, fix=fix))
    refuse_unknown(subject, checks)
    names, refusals, left_out, failures = [], list[RefusedCase](), dict[str, str](), list[_BrokenPromise]()
    for promise in _select(only, [*PROMISES, *added_promises(checks), *_layout_cases.RANDOM]):
        reason = _why_left_out(promise, subject)
        if not reason and promise in _layout_cases.RANDOM and failures:
            # Random states would fail for the same reasons, take longer and say less.
            reason = "plain cases fail already"
        if reason:
            left_out[promise.name] = reason
            continue
        failure, refused, count = _run_cases(promise, subject)
        refusals += refused
        if failure is not None:
            failures.append(failure)
        elif refused and len(refused) == count:
            left_out[promise.name] = f"it is refused: {refused[0].why}"
        else:
            names.append(promise.name)
    if failures:
        raise AssertionError(_failure_text((backend, version), failures, names))
    return StrategyReport((backend, version), tuple(names), tuple(refusals), left_out)


def _select(names: Collection[str], every: Sequence[Promise]) -> list[Promise]:
    """Return the promises with these names; all promises if there are no names.

    Raises:
        StrategyError: A name is unknown.
    """
    names_of_all = [promise.name for promise in every]
    unknown = [repr(name) for name in names if name not in names_of_all]
    if unknown:
        fix = "Pass names of promises: " + "; ".join(names_of_all)
        raise StrategyError(error_text("check_strategy: unknown promises in only=", offenders=unknown, fix=fix))
    return [promise for promise in every if not names or promise.name in names]


def _why_left_out(promise: Promise, subject: Subject) -> str:
    """Return the reason why a backend doesn't make a promise; empty if it does."""
    missing = sorted(action.value for action in promise.rows if not subject.has(action))
    if missing:
        return f"no row for {', '.join(missing)}"
    can_save = subject.has(StrategyAction.SAVE_SHARDED) or subject.has(StrategyAction.SAVE_COMMON)
    if promise.saves and not can_save:
        return "no row for saving"
    if promise not in _row_cases.PROMISES and not can_save and subject.save is None:
        return "no row for saving; pass save="
    return ""


def _cases(promise: Promise, subject: Subject) -> Iterator[Case]:
    """Yield a promise's cases; an error while they are prepared becomes a case."""
    try:
        yield from promise.cases(subject)
    except Exception as error:
        yield Case("preparing the cases", partial(raising, error))


def _run_cases(promise: Promise, subject: Subject) -> tuple[_BrokenPromise | None, list[RefusedCase], int]:
    """Run a promise's cases; return the broken promise (or None), the refused cases, and the number of cases."""
    failures, refusals = list[tuple[str, str]](), list[RefusedCase]()
    cases = list(_cases(promise, subject))
    for case in cases:
        try:
            case.check()
        except Refused as error:
            # A refusal is reported, since the format doesn't store the refused state.
            if not case.required:
                refusals.append(RefusedCase(promise.name, case.name, str(error)))
                continue
            failures.append((case.name, _failure_reason(error)))
        except Exception as error:
            failures.append((case.name, _failure_reason(error)))
    return (_BrokenPromise(promise.name, len(cases), tuple(failures)) if failures else None), refusals, len(cases)


# Texts of failures.

_SHOWN = 3  # cases of one promise
_LONGEST = 300  # characters of an error's text; a traceback shows the rest
_FRAMES = 6  # innermost frames of that traceback
_PACKAGE = Path(__file__).parents[2]
_PYTHON = sysconfig.get_path("stdlib")


def _failure_text(backend: tuple[str, int], failures: Sequence[_BrokenPromise], names: Sequence[str]) -> str:
    """Return the error's text: every broken promise with its simplest failing cases, and the names of kept promises.

    A reason that was given before is shortened to its first line, since one fault of a backend often breaks most
    promises.

    Examples:
        >>> why = chr(10).join(["raised a raw KeyError: 'w'", "in load_sharded"])
        >>> scalars = _BrokenPromise("scalars come back", 2, (("a zero", why),))
        >>> failures = scalars, _BrokenPromise("objects do", 1, (("one", why),))
        >>> print(_failure_text(("cards", 1), failures, ["tensors do"]))
        ('cards', 1) breaks 2 of 3 promises
          scalars come back: not in 1 of 2 cases
            a zero: raised a raw KeyError: 'w'
              in load_sharded
          objects do: not in 1 of 1 case
            one: as above: raised a raw KeyError: 'w'
          kept: tensors do
    """
    lines = [f"{backend} breaks {len(failures)} of {plural(len(failures) + len(names), 'promise')}"]
    reasons = set[str]()
    for promise in failures:
        lines.append(f"  {promise.promise}: not in {len(promise.cases)} of {plural(promise.count, 'case')}")
        for name, why in promise.cases[:_SHOWN]:
            first, *others = why.splitlines() or [""]
            text = f"as above: {first}" if others and why in reasons else "\n      ".join(why.splitlines())
            lines.append(f"    {name}: {text}")
            reasons.add(why)
        if len(promise.cases) > _SHOWN:
            lines.append(f"    and {len(promise.cases) - _SHOWN} more")
    if names:
        lines.append(f"  kept: {'; '.join(names)}")
    return "\n".join(lines)


def _failure_reason(error: BaseException) -> str:
    """Return the fault in words: a law's message, or the exception that was raised."""
    if isinstance(error, Refused):
        return f"was refused, but no format may refuse it: {error}"
    if isinstance(error, AssertionError):
        return str(error) or "a check failed"
    if isinstance(error, RemoteError) and error.__cause__ is not None:
        error = error.__cause__  # this rank's own exception
    kind, raw = "our" if isinstance(error, CheckpointingException) else "a raw", _foreign_error(error)
    text = f"raised {kind} {type(error).__name__}: {str(error)[:_LONGEST]}"
    return text if raw is None else f"{text}\n{_traceback_of(raw)}"


def _foreign_error(error: BaseException) -> BaseException | None:
    """Return the original exception of this or another rank, if it isn't an error of this library."""
    while isinstance(error, RemoteError) and error.__cause__ is not None:
        error = error.__cause__
    return None if isinstance(error, CheckpointingException) else error


def _traceback_of(error: BaseException) -> str:
    """Return the end of a traceback, from the backend's first frame on, where its author has to look."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if not _is_internal(frame.filename)), 0)
    return "".join(traceback.format_list(frames[max(first, len(frames) - _FRAMES) :])).rstrip()


def _is_internal(filename: str) -> bool:
    is_format = filename.startswith(str(_PACKAGE / "formats")) or "site-packages" in filename
    return filename.startswith((str(_PACKAGE), _PYTHON)) and not is_format
