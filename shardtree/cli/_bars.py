"""Progress bars, one a rank, while processes write or read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

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
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:18}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = [progress.add_task(f"{name}: starting", total=None) for name in names]

        def show(counts: Sequence[int]) -> None:
            ones = list(counts) if len(tasks) == len(counts) else [sum(counts)]
            for task, name, count, total in zip(tasks, names, ones, totals, strict=True):
                if count >= 0:
                    description = f"{name}: {then}" if count >= total else name
                    progress.update(task, completed=min(count, total), total=total, description=description)

        yield show
