"""`shardtree inspect` of a folder of steps: which are finished, how large, how good, and what stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from ..errors import CheckpointingException, plural, shorten
from ..inspection import open_checkpoint, step_prefix
from ..pictures import moment_text
from ..series import CheckpointSeries
from ..series.policies import SavedStep
from ..shell.storage import Storage, folder_in, listed, storage_at
from ..shell.world import one_process
from ._contents import plain
from ._files import Files, files_in, files_of
from ._output import Heading, Output, json_text, printable, show_table, size


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps under a root.

    Attributes:
        where: the root, as it was named.
        rows: the finished steps, by number, and the files of each; a run would resume from the last.
        unfinished: folders that are named like them, and aren't finished checkpoints.
    """

    where: str
    rows: tuple[tuple[SavedStep, Files], ...]
    unfinished: tuple[str, ...]

    @property
    def newest(self) -> str:
        """The newest step, as it would be named."""
        return f"{self.where.rstrip('/')}/{self.rows[-1][0].folder}"


def find_steps(where: str) -> Steps | None:
    """Return the steps under a root; None if it has no finished one.

    Steps are folders whose names end in a number: step_00000100, iter_0000100, checkpoint-100 or 100.
    """
    root, world = storage_at(where), one_process()
    with listed(root) as storage:
        folders = {name: prefix for name in storage.names() if (prefix := step_prefix(name)) is not None}
        # What stands before the number may differ: each beginning is a series of its own.
        names = [prefix.replace("{", "{{").replace("}", "}}") + "{}" for prefix in sorted(set(folders.values()))]
        steps = [step for one in names for step in CheckpointSeries(storage, one, world=world).steps()]
        steps.sort(key=lambda step: (step.number, step.folder))
        if not steps:
            return None
        # Each has an index to read: only the one that a run resumes from is opened.
        rows = tuple((step, _files(folder_in(storage, step.folder), is_opened=step is steps[-1])) for step in steps)
    return Steps(where, rows, tuple(sorted(folders.keys() - {step.folder for step in steps})))


def _files(folder: Storage, *, is_opened: bool) -> Files:
    """Return the files of a step's folder; which of them are missing too, if the step is to be opened."""
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
    """Return what docs/command-line.md describes."""
    return {
        "root": steps.where,
        "steps": [
            {
                "step": step.number,
                "folder": step.folder,
                "time": step.time,
                "metrics": {name: plain(value) for name, value in step.metrics.items()},
                "pinned": step.pinned,
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
