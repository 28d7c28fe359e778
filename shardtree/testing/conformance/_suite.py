"""`check_strategy`: tries every promise of a backend's rows, and reports all that are broken at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from ...errors import StrategyError, error_text
from ...storage import Directory, MemoryStorage
from ...strategies import Strategies, StrategyAction
from . import _files as _file_cases
from . import _layout_cases, _row_cases, _tensor_cases, _value_cases
from ._report import Broken, Refused, RefusedCase, StrategyReport, failure_reason, failure_text
from ._subject import Case, Promise, Subject, Writer, raising

# Plain named cases first, Hypothesis last: it finds unexpected cases, but that flat ranges, replicas and empty
# shards are where formats break is known. Named cases run in the same order each time, fail with a name, and need no
# shrinking.
_PROMISES: tuple[Promise, ...] = (
    *_row_cases.PROMISES,
    *_layout_cases.PROMISES,
    *_tensor_cases.PROMISES,
    *_value_cases.PROMISES,
    *_file_cases.PROMISES,
)


def check_strategy(
    backend: str,
    version: int,
    *,
    strategies: Strategies | None = None,
    directory: Callable[[], Directory] = MemoryStorage,
    save: Writer | None = None,
    examples: int = 10,
    only: Collection[str] = (),
) -> StrategyReport:
    """Check that a backend keeps every promise that its rows make, and return a report.

    A backend promises what it has rows for. It may refuse what its format can't represent, with `UnsupportedValue` (or
    `StrategyError`, `StorageError`) while it saves; it may not change it. A few plain tensors may not be refused.
    Cases are plain and fixed, simple ones first; if all of them pass, random states in random layouts are tried, and
    failures are shrunk. The same cases run each time.

    Args:
        backend: the format's name.
        version: the format's version.
        strategies: the dispatch table; also one that was made for this, such as ``default_strategies | {row: fn}``.
        directory: returns a new place for a checkpoint on each call: a path, a URL or a `Storage`.
        save: writes trees, one for each rank, to a place, for a format without a row for saving; without it such a
            format's loads aren't tried.
        examples: how many random states are tried.
        only: the names of the promises to try, for example while one of them is being fixed; all by default.

    Returns:
        The report: promises that are kept, cases that were refused, and promises that were left out, with reasons.

    Raises:
        AssertionError: names each broken promise, with its simplest cases.
        StrategyError: the table has no row for the backend.

    Examples:
        >>> print(check_strategy("safetensors", 1, only=["scalars come back", "flat ranges come back"]))
        ('safetensors', 1) keeps 2 promises
          kept: scalars come back
          kept: flat ranges come back
    """
    subject = Subject(backend, version, strategies, directory, save, examples)
    if not any(subject.has(action) for action in StrategyAction):
        fix = "Pass the table that has its rows as strategies=, or register them."
        raise StrategyError(error_text(f"check_strategy: no row is for {(backend, version)!r}", fix=fix))
    kept, refused, left_out, broken = [], list[RefusedCase](), dict[str, str](), list[Broken]()
    for promise in _selected(only):
        reason = _why_left_out(promise, subject)
        if not reason and promise in _layout_cases.RANDOM and broken:
            # Random states would fail for the same reasons, take longer and say less.
            reason = "plain cases fail already"
        if reason:
            left_out[promise.name] = reason
            continue
        failed, said, tried = _run_cases(promise, subject)
        refused += said
        if failed is not None:
            broken.append(failed)
        elif said and len(said) == tried:
            left_out[promise.name] = f"it is refused: {said[0].why}"
        else:
            kept.append(promise.name)
    if broken:
        raise AssertionError(failure_text((backend, version), broken, kept))
    return StrategyReport((backend, version), tuple(kept), tuple(refused), left_out)


def _selected(names: Collection[str]) -> list[Promise]:
    """Return the promises of these names; all if there are no names.

    Raises:
        StrategyError: there is no such promise.
    """
    every = [*_PROMISES, *_layout_cases.RANDOM]
    known = [promise.name for promise in every]
    unknown = [repr(name) for name in names if name not in known]
    if unknown:
        fix = "The names are those in the report: " + "; ".join(known)
        raise StrategyError(error_text("check_strategy: no such promise", offenders=unknown, fix=fix))
    return [promise for promise in every if not names or promise.name in names]


def _why_left_out(promise: Promise, subject: Subject) -> str:
    """Return why a backend doesn't make a promise, "" if it does."""
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
    """Yield a promise's cases; an error before the first one becomes a case."""
    try:
        yield from promise.cases(subject)
    except Exception as error:
        yield Case("what all cases begin with", partial(raising, error))


def _run_cases(promise: Promise, subject: Subject) -> tuple[Broken | None, list[RefusedCase], int]:
    """Run a promise's cases; return what is broken (or None), what was refused, and the number of cases."""
    failed, refused = list[tuple[str, str]](), list[RefusedCase]()
    cases = list(_cases(promise, subject))
    for case in cases:
        try:
            case.check()
        except Refused as error:
            # Reported rather than passed over, since the format doesn't keep what it refused.
            if not case.required:
                refused.append(RefusedCase(promise.name, case.name, str(error)))
                continue
            failed.append((case.name, failure_reason(error)))
        except Exception as error:
            failed.append((case.name, failure_reason(error)))
    return (Broken(promise.name, len(cases), tuple(failed)) if failed else None), refused, len(cases)
