"""Where commands print to: a console, bars, verdicts, JSON; and sizes as text."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ..errors import printable as printable
from ..plans import size_text as size

# Our own signs alone: keys may hold any character, and are escaped where the encoding lacks it.
_ASCII = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "─": "-", "✓": "+", "✗": "!", "→": ">"})


class Output(Console):
    """A console that never cuts a line, and has colours on a terminal only."""

    def __init__(self, *, stderr: bool = False) -> None:
        # NO_COLOR counts if it isn't empty, as no-color.org says. Keys may look like rich's markup or emoji codes.
        colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
        super().__init__(
            stderr=stderr, color_system=colours, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def on_broken_pipe(self) -> None:
        """Leave it to `unprintable`."""
        # rich would exit with status 1, which says "damaged" or "different" here.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextmanager
def bar(console: Console, doing: str, total: int | None, *, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield `progress(nbytes)`, called with the bytes done since the last call; the bar is gone afterwards.

    Args:
        console: where it is drawn; nothing is where it isn't a terminal.
        doing: what moves them.
        total: bytes, None where that isn't known.
        is_shown: whether it is drawn at all: one rank of several draws.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(32),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)
    ) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Show on stderr, where that is a terminal, what goes on and for how long; for work that counts no bytes."""
    console = Output(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(doing, total=None)
        yield


def spellable(console: Console) -> Callable[[str], str]:
    """Return the function that replaces our own signs where the console's encoding may lack them."""
    if console.encoding.lower().startswith("utf"):
        return lambda words: words
    return lambda words: words.translate(_ASCII)


def show_verdict(console: Console, is_good: bool, words: str) -> None:
    """Print a sentence behind the sign that says whether it is good."""
    sign, style = ("✓ ", "bold green") if is_good else ("✗ ", "bold red")
    console.print(Text.assemble((spellable(console)(sign), style), printable(words)))


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON in ASCII: a line for each name, and for each item of a list, so that grep can be used.

    Examples:
        >>> print(json_text({"sound": False, "damage": [{"file": "a"}, {"file": "b"}], "more": []}))
        {
        "sound": false,
        "damage": [
        {"file": "a"},
        {"file": "b"}
        ],
        "more": []
        }
    """
    lines = []
    for name, value in document.items():
        is_list = isinstance(value, list) and value
        shown = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if is_list else json.dumps(value)
        lines.append(f"{json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}"


def pace(count: int, seconds: float) -> str:
    """Return how long moving bytes took, and the rate from 10 MB on: below, opening files takes most of the time.

    Examples:
        >>> pace(2_000, 0.1), pace(272_000_000, 0.5)
        ('in 0.10 s', 'in 0.50 s, 544.0 MB/s')
    """
    return f"in {seconds:.2f} s" + (f", {size(int(count / max(seconds, 1e-9)))}/s" if count >= 10**7 else "")
