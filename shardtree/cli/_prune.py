"""`shardtree series prune`, which lists and removes steps of a run; and `clean`, which removes leftovers of saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from ..errors import NotACheckpoint, plural
from ..series import CheckpointSeries, Removal
from ..series.policies import (
    Choose,
    RetentionPolicy,
    SavedStep,
    keep_any,
    keep_best,
    keep_every,
    keep_every_seconds,
    keep_for,
    keep_last,
    keep_steps,
)
from ..shell.storage import listed, storage_at
from ._names import did_you_mean, function_named
from ._output import json_text, printable, size, working
from ._series import find_series, no_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Options that say which steps stay.

    Attributes:
        last: Number of newest steps to keep, or None.
        every: Number whose multiples stay, or None.
        seconds: Greatest age in seconds, relative to the newest step, of steps that stay; or None.
        every_seconds: Least time in seconds between steps that stay, or None.
        best: Texts N:METRIC or N:METRIC:max, such as ``"1:loss"``: the N best steps by a metric stay.
        steps: Numbers of steps that stay.
        policies: Texts FILE.py:NAME, such as ``"policies.py:choose"``: functions that choose steps to keep.
    """

    last: int | None = None
    every: int | None = None
    seconds: float | None = None
    every_seconds: float | None = None
    best: Sequence[str] = ()
    steps: Sequence[int] = ()
    policies: Sequence[str] = ()


def run_prune(where: str, names: str | None, kept: Kept, *, is_removing: bool, as_json: bool) -> int:
    """Print the steps that stay and those that go, and remove the latter if requested.

    Args:
        where: Path or URL of the root.
        names: Format of the names of steps' folders, such as step_{:08d}; None for that of the finished steps.
        kept: Options that say which steps stay.
        is_removing: True to remove the steps that go.
        as_json: True to print JSON.

    Returns:
        The exit status: 1 if a step that should go stays, else 0.

    Raises:
        typer.BadParameter: An option is misspelt, or names a metric that no step has.
        NotACheckpoint: No step is finished.
        CheckpointingException: The steps can't be listed or removed.
    """
    series = find_series(where, names)
    with working("listing the steps"):
        steps = series.steps()
        if not steps:
            raise NotACheckpoint(no_step(where))
        removal = series.plan_removal(policy_of(kept, steps))
    removed: tuple[int, ...] = ()
    if not as_json:
        print(removal)
    if is_removing:
        with working("removing steps"):
            removed = series.remove(removal)
    if as_json:
        print(json_text(_document(where, removal, removed)))
    elif is_removing:
        nbytes = sum(step.nbytes for step in removal.going if step.number in removed)
        print(f"removed: {plural(len(removed), 'step')}, {size(nbytes)}")
    elif removal.going:
        print("nothing was removed: --yes removes what goes")
    return 1 if is_removing and (len(removed) < len(removal.going) or removal.irremovable) else 0


def policy_of(kept: Kept, steps: Sequence[SavedStep]) -> RetentionPolicy:
    """Return the policy that keeps each step that any option keeps.

    Args:
        kept: Options that say which steps stay.
        steps: Steps of the series, for the names of metrics.

    Raises:
        typer.BadParameter: An option is misspelt, or names a metric that no step has.

    Examples:
        >>> policy_of(Kept(last=3, best=["1:loss"]), [SavedStep(1, metrics={"loss": 0.5})])
        keep_any(keep_last(3), keep_best(1, 'loss'))
    """
    return keep_any(*_policies(kept, steps))


def _policies(kept: Kept, steps: Sequence[SavedStep]) -> Iterator[Choose]:
    if kept.last is not None:
        yield keep_last(kept.last)
    if kept.every is not None:
        yield keep_every(kept.every)
    if kept.seconds is not None:
        yield keep_for(kept.seconds)
    if kept.every_seconds is not None:
        yield keep_every_seconds(kept.every_seconds)
    metrics = {metric for step in steps for metric in step.metrics}
    for text in kept.best:
        yield _best(text, metrics)
    if kept.steps:
        yield keep_steps(kept.steps)
    for text in kept.policies:
        yield RetentionPolicy(text, function_named(text))


def _best(text: str, metrics: set[str]) -> RetentionPolicy:
    """Return the policy that keeps the N best steps, from a text N:METRIC[:max]; the metric may contain colons."""
    count, _, metric = text.partition(":")
    metric, is_max = metric.removesuffix(":max"), metric.endswith(":max")
    if not (count.isascii() and count.isdecimal()) or not metric:
        raise typer.BadParameter(f"{text!r} is not N:METRIC, such as 1:loss, or N:METRIC:max")
    # All steps without the metric stay, so that a wrong name would silently keep everything.
    if metrics and metric not in metrics:
        raise typer.BadParameter(f"no step has a metric {metric!r}. {did_you_mean(metric, metrics)}")
    return keep_best(int(count), metric, mode="max" if is_max else "min")


def _document(where: str, removal: Removal, removed: Sequence[int]) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    going = {step.number: step for step in removal.going}
    rows: list[dict[str, Any]] = []
    for step in removal.steps:
        files = going.get(step.number)
        rows.append(
            {
                "step": step.number,
                "folder": step.folder,
                "goes": files is not None,
                "kept_by": list(removal.kept.get(step.number, ())),
                "files": 0 if files is None else len(files.files),
                "bytes": 0 if files is None else files.nbytes,
                "others": [] if files is None else list(files.others),
            }
        )
    return {"root": where, "bytes": removal.nbytes, "removed": list(removed), "steps": rows}


def run_clean(where: str, names: str | None, *, stale_after: float, as_json: bool) -> int:
    """Remove the leftovers of killed saves; print the folders that were removed, and unfinished ones that remain.

    Args:
        where: Path or URL of the root.
        names: Format of the names of steps' folders, such as step_{:08d}; None for that of the finished steps.
        stale_after: Time in seconds without a change after which a save of another machine counts as killed.
        as_json: True to print JSON.

    Returns:
        The exit status: 1 if unfinished folders are left, else 0.

    Raises:
        CheckpointingException: The steps can't be listed, or files can't be removed.
    """
    series = find_series(where, names)
    with working("removing leftovers"):
        before = _folders(series)
        left = series.clean(stale_after=stale_after)
        removed = sorted(before - _folders(series))
    if as_json:
        print(json_text({"root": where, "removed": removed, "left": list(left)}))
        return 1 if left else 0
    for folder in removed:
        print(f"removed: {printable(folder)}")
    for folder in left:
        print(f"left: {printable(folder)}: a save may be in progress, or files are of another program")
    if not removed and not left:
        print("nothing was left of killed saves")
    return 1 if left else 0


def _folders(series: CheckpointSeries) -> set[str]:
    with listed(storage_at(series.root)) as storage:
        return set(storage.names())
