"""`shardtree series list`, `latest`, `pin` and `unpin`, and `shardtree inspect` for the steps of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer
from rich.text import Text

from ..errors import CheckpointingException, NotACheckpoint, error_text, plural, shorten
from ..inspection import open_checkpoint, step_prefix
from ..pictures import moment_text
from ..series import CheckpointSeries
from ..series.policies import SavedStep
from ..shell.storage import Storage, folder_in, listed, storage_at
from ..shell.world import one_process
from ._contents import plain
from ._files import Files, files_in, files_of
from ._output import Heading, Output, json_text, printable, show_table, size, working


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps under a root.

    Attributes:
        where: Path or URL of the root, as the user typed it.
        rows: Finished steps in ascending order, with their files; a run would resume from the last.
        unfinished: Folders that are named like steps, but aren't finished checkpoints.
    """

    where: str
    rows: tuple[tuple[SavedStep, Files], ...]
    unfinished: tuple[str, ...]

    @property
    def newest(self) -> str:
        """Path or URL of the newest step, as the user would type it."""
        return _path(self.where, self.rows[-1][0])


def find_steps(where: str, names: str | None = None) -> Steps | None:
    """Return the steps under a root; None if no step is finished.

    Args:
        where: Path or URL of the root.
        names: Format of the names of steps' folders; None for all names that end in a number, such as step_00000100,
            iter_0000100, checkpoint-100 or 100.
    """
    with listed(storage_at(where)) as storage:
        folders = _step_folders(storage)
        # Names may have different prefixes before the number; each prefix is a series.
        formats = sorted(set(folders.values())) if names is None else [names]
        steps = [step for form in formats for step in series_in(storage, form).steps()]
        steps.sort(key=lambda step: (step.number, step.folder))
        if not steps:
            return None
        # Opening a step takes reading its index, so that only the one that a run resumes from is opened.
        rows = tuple((step, _files(folder_in(storage, step.folder), is_opened=step is steps[-1])) for step in steps)
    unfinished = {folder for folder, form in folders.items() if names is None or _start(form) == _start(names)}
    return Steps(where, rows, tuple(sorted(unfinished - {step.folder for step in steps})))


def find_series(where: str, names: str | None) -> CheckpointSeries:
    """Return the series of steps under a root, for use by this process alone.

    Args:
        where: Path or URL of the root.
        names: Format of the names of steps' folders, such as step_{:08d}; None for that of the finished steps.

    Raises:
        NotACheckpoint: Finished steps have names of several formats, two folders have the same number, or no folder is
            named like a step.
    """
    if names is not None:
        return series_in(where, names)
    with listed(storage_at(where)) as storage:
        folders = _step_folders(storage)
        formats = sorted(set(folders.values()))
        if len(formats) > 1:
            # A folder with the name of a step may have other contents, such as the logs of a run.
            formats = _finished_formats(storage)
    if len(formats) == 1:
        _refuse_twins(where, [folder for folder, form in folders.items() if form == formats[0]])
        return series_in(where, formats[0])
    if not formats:
        raise NotACheckpoint(no_step(where))
    fix = f"Choose one of these series, for example with --names {shlex.quote(formats[0])}."
    raise NotACheckpoint(error_text(f"series: several series under {where!r}", found=", ".join(formats), fix=fix))


def _finished_formats(storage: Storage) -> list[str]:
    """Return the sorted formats, such as step_{}, of finished steps' folder names."""
    formats = sorted(set(_step_folders(storage).values()))
    return [form for form in formats if series_in(storage, form).latest() is not None]


def _refuse_twins(where: str, folders: Sequence[str]) -> None:
    """Raise if two folders have the same step number: only the run's own name format tells which one is meant."""
    by_number: dict[int, list[str]] = {}
    for folder in folders:
        by_number.setdefault(int(folder.removeprefix(str(step_prefix(folder)))), []).append(folder)
    twins = [", ".join(several) for several in by_number.values() if len(several) > 1]
    if twins:
        fix = "Pass the format of the run's own folders, such as --names 'step_{:08d}'."
        raise NotACheckpoint(error_text(f"series: repeated step numbers under {where!r}", offenders=twins, fix=fix))


def series_in(root: Storage | str, names: str) -> CheckpointSeries:
    """Return the series of the steps under a root, for this process alone; `names` is the format of folder names."""
    return CheckpointSeries(root, names, world=one_process())


def no_step(where: str) -> str:
    """Return the text of the error for a root without finished steps."""
    heading, expected = f"series: no finished step under {where!r}", "folders such as step_00000100 or iter_0000100"
    fix = "Pass the folder of a run, or the format of its folders' names, such as --names 'step_{:08d}'."
    return error_text(heading, expected=expected, fix=fix)


def _step_folders(storage: Storage) -> dict[str, str]:
    """Return the name format of each step's folder, by folder name: ``step_00000010`` has the format ``step_{}``."""
    prefixes = {name: prefix for name in storage.names() if (prefix := step_prefix(name)) is not None}
    return {name: prefix.replace("{", "{{").replace("}", "}}") + "{}" for name, prefix in prefixes.items()}


def _start(names: str) -> str:
    """Return the part of a name format before the number, such as step_ for step_{:08d}."""
    return re.split(r"(?<!\{)\{(?!\{)", names, maxsplit=1)[0]


def _files(folder: Storage, *, is_opened: bool) -> Files:
    """Return the number and total length of the files in a step's folder; with `is_opened`, also the missing files."""
    if not is_opened:
        return files_in(folder)
    try:
        return files_of(open_checkpoint(folder))
    except CheckpointingException:
        return replace(files_in(folder), is_readable=False)


def run_series(steps: Steps, *, limit: int | None, as_json: bool) -> int:
    """Print the steps under a root, and return the exit status 0."""
    if as_json:
        print(json_text(_document(steps, limit)))
        return 0
    console = Output()
    console.print(Text(printable(steps.where), style="bold"))
    console.print()
    metrics = list(dict.fromkeys(name for step, _ in steps.rows for name in step.metrics))
    headings = [
        Heading("step", style="bold"),
        Heading("saved (UTC)"),
        Heading("size", right=True, style="green"),
        *(Heading(printable(name), right=True) for name in metrics),
        Heading("", style="yellow"),
    ]
    cells = []
    for step, files in steps.rows:
        marks = ["newest"] * (step is steps.rows[-1][0]) + ["pinned"] * step.pinned
        marks += ["incomplete"] * (files.is_complete is False)
        length = ("" if files.is_all else "more than ") + size(files.length)
        values = (f"{step.metrics[name]:g}" if name in step.metrics else "" for name in metrics)
        cells.append((step.folder, moment_text(step.time) or "?", length, *values, ", ".join(marks)))
    show_table(console, headings, cells, limit)
    console.print()
    total = sum(files.length for _, files in steps.rows)
    console.print(Text(f"{plural(len(steps.rows), 'finished step')}, {size(total)}"))
    if steps.unfinished:
        folders = ", ".join(map(printable, shorten(steps.unfinished)))
        console.print(Text(f"unfinished, or not checkpoints: {folders}", style="yellow"))
    console.print(Text(f"shardtree inspect {printable(steps.newest)} shows the newest", style="dim"))
    return 0


def _document(steps: Steps, limit: int | None) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    return {
        "root": steps.where,
        "steps": [
            {
                **_fields(step),
                "newest": step is steps.rows[-1][0],
                "files": files.count,
                "bytes": files.length,
                "complete": files.is_complete,
                "missing": list(files.missing or ()),
            }
            for step, files in steps.rows[:limit]
        ],
        "unfinished": list(steps.unfinished),
    }


def run_list(where: str, names: str | None, *, limit: int | None, as_json: bool) -> int:
    """Print the finished steps under a root, and return the exit status 0.

    Raises:
        NotACheckpoint: No step is finished.
    """
    with working("listing the steps"):
        steps = find_steps(where, names)
    if steps is None:
        raise NotACheckpoint(no_step(where))
    return run_series(steps, limit=limit, as_json=as_json)


def run_latest(where: str, names: str | None, *, is_verified: bool, as_json: bool) -> int:
    """Print the path of the newest finished step, and return the exit status: 1 if there is none, else 0.

    Args:
        where: Path or URL of the root.
        names: Format of the names of steps' folders, such as step_{:08d}; None for that of the finished steps.
        is_verified: True to skip damaged steps; whole steps are then read, newest first, until one is undamaged.
        as_json: True to print JSON.

    Raises:
        NotACheckpoint: Finished steps have names of several formats.
    """
    with listed(storage_at(where)) as storage:
        # A run that hasn't saved yet has status 1 rather than an error.
        is_empty = names is None and not _finished_formats(storage)
    step = None
    if not is_empty:
        series = find_series(where, names)
        with working("reading the newest step" if is_verified else "looking for it"):
            step = series.latest_verified() if is_verified else series.latest()
    if as_json:
        fields = None if step is None else _fields(step)
        print(json_text({"root": where, "path": None if step is None else _path(where, step), "step": fields}))
    elif step is not None:
        print(_path(where, step))
    if step is None:
        typer.echo(f"shardtree series latest: no finished step under {printable(where)}", err=True)
    return 0 if step is not None else 1


def run_pin(where: str, names: str | None, numbers: Sequence[int], *, is_pinned: bool, as_json: bool) -> int:
    """Pin or unpin steps, print them, and return the exit status 0.

    Raises:
        NotACheckpoint: A step doesn't exist; then none is changed.
    """
    series = find_series(where, names)
    steps = {step.number: step for step in series.steps()}
    lost = [str(number) for number in numbers if number not in steps]
    if lost:
        existing = ", ".join(shorten([str(number) for number in steps])) or "no finished step"
        heading = f"series: no {'step' if len(lost) == 1 else 'steps'} {', '.join(shorten(lost))} under {where!r}"
        raise NotACheckpoint(error_text(heading, found=existing, fix="Pass the number of an existing step."))
    chosen = [steps[number] for number in dict.fromkeys(numbers)]
    for step in chosen:
        (series.pin if is_pinned else series.unpin)(step)
    if as_json:
        print(json_text({"root": where, "steps": [_fields(replace(step, pinned=is_pinned)) for step in chosen]}))
    else:
        folders = ", ".join(printable(step.folder) for step in chosen)
        print(f"{'pinned' if is_pinned else 'unpinned'}: {folders}")
    return 0


def _path(where: str, step: SavedStep) -> str:
    """Return the path or URL of a step's folder, as the user would type it."""
    return f"{where.rstrip('/')}/{step.folder}"


def _fields(step: SavedStep) -> dict[str, Any]:
    """Return the JSON object of a step."""
    return {
        "step": step.number,
        "folder": step.folder,
        "time": step.time,
        "metrics": {name: plain(value) for name, value in step.metrics.items()},
        "pinned": step.pinned,
    }
