"""Progress bars: one a rank, while processes write or read, and one for a command that moves bytes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ._output import size

_MOST = 8  # bars; more ranks share one


@contextmanager
def bars(console: Console, expected: Sequence[int], *, then: str) -> Iterator[Callable[[Sequence[int]], None]]:
    """Yield a function that shows how far the ranks are, given their counts; bars are gone afterwards.

    Args:
        console: where they are drawn; nothing is where it isn't a terminal.
        expected: bytes by rank.
        then: what a rank does when it has counted all of them.
    """
    names = [f"rank {rank}" for rank in range(len(expected))]
    totals = list(expected)
    if len(totals) > _MOST:
        names, totals = [f"{len(totals)} ranks"], [sum(totals)]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = [progress.add_task(name, total=None, amount="starting") for name in names]

        def show(counts: Sequence[int]) -> None:
            ones = list(counts) if len(tasks) == len(counts) else [sum(counts)]
            for task, count, total in zip(tasks, ones, totals, strict=True):
                if count >= 0:
                    amount = f"{size(count)} of {size(total)}" if count < total else f"{size(total)}, {then}"
                    progress.update(task, completed=min(count, total), total=total, amount=amount)

        yield show


@contextmanager
def bar(console: Console, doing: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told, again and again, how many bytes were moved since; the bar is gone afterwards.

    Args:
        console: where it is drawn; nothing is where it isn't a terminal.
        doing: what moves them.
        total: bytes, None where nobody knows.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(32),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda count: progress.advance(task, count)
