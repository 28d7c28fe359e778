"""Where commands print to, and how they end: exit statuses, errors as text, broken pipes; sizes as text."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import typer
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

from ..errors import CheckpointingException
from ..errors import printable as printable
from ._command import TROUBLE as TROUBLE
from ._command import options_as_typed, shell_words, unprintable

INTERRUPTED = 130  # what a shell shows for programs that SIGINT ended

_PICKLE_WARNING = (
    "warning: --allow-pickle: loading pickled values can run any code that the checkpoint's writer put there"
)

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


def finish(command: str, work: Callable[[], int], *, interrupted: str = "interrupted") -> NoReturn:
    """Leave with the exit status that the work returns; a `CheckpointingException` becomes text and status 2.

    Args:
        command: its name.
        work: prints, and returns the status.
        interrupted: the message on Ctrl-C.
    """
    try:
        # Backslashes, since a key with a character that the encoding lacks must still be told from others.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        status = printed(work)
    except CheckpointingException as error:
        complain(command, error)
        status = TROUBLE
    except KeyboardInterrupt:
        typer.echo(f"shardtree {command}: {interrupted}", err=True)
        status = INTERRUPTED
    raise typer.Exit(status)


def printed(work: Callable[[], int]) -> int:
    """Return the exit status of what prints, or that of a stdout that can't be written."""
    try:
        status = work()
        # Here, so that a closed pipe is found now; at the interpreter's exit it would print an error.
        sys.stdout.flush()
    except OSError as error:
        return unprintable(error)
    return status


def complain(command: str, error: Exception) -> None:
    """Print an error's text, with its notes."""
    # Errors of a function that is called as the command is begin with its name already.
    texts = [str(error), *getattr(error, "__notes__", [])]
    text = "\n  ".join(one.removeprefix(f"{command}: ") for one in texts)
    text = shell_words(text, options_as_typed())
    typer.echo(f"shardtree {command}: " + "\n".join(map(printable, text.split("\n"))), err=True)


def warn_of_pickle(allowed: bool) -> None:
    """Print what `--allow-pickle` means, where it is given."""
    if allowed:
        typer.echo(_PICKLE_WARNING, err=True)


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
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_value(value)}" for name, value in document.items()) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


# Sizes and rates as text.


def size(count: int) -> str:
    """Return a number of bytes in the decimal unit that suits it.

    Examples:
        >>> size(999), size(68_123_456), size(2_000_000_000)
        ('999 B', '68.1 MB', '2.0 GB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def pace(count: int, seconds: float) -> str:
    """Return how long moving bytes took, and the rate from 10 MB on: below, opening files takes most of the time.

    Examples:
        >>> pace(2_000, 0.1), pace(272_000_000, 0.5)
        ('in 0.10 s', 'in 0.50 s, 544.0 MB/s')
    """
    return f"in {seconds:.2f} s" + (f", {size(int(count / max(seconds, 1e-9)))}/s" if count >= 10**7 else "")
