"""Output of commands: a console, bars, verdicts, JSON, and tables of any length."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, Literal

from rich.cells import cell_len, chop_cells
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
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from ..errors import printable as printable
from ..errors import size_text as size

# These are only our own signs; keys may have any character, and are escaped if the encoding lacks it.
_ASCII = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "─": "-", "✓": "+", "✗": "!", "→": ">"})


class Output(Console):
    """A console that never cuts a line, and has colours only on a terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        # NO_COLOR counts unless it is empty, see no-color.org. Keys may look like rich's markup or emoji codes.
        colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
        super().__init__(
            stderr=stderr, color_system=colours, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, so that `unprintable` chooses the exit status; rich itself would exit with 1."""
        # rich would exit with status 1, which means "damaged" or "different" here.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@contextmanager
def bar(console: Console, doing: str, total: int | None, *, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and yield a function that advances it by a number of bytes.

    Args:
        console: Console of the bar, which is only drawn on a terminal.
        doing: Description of the work.
        total: Number of bytes; None if unknown.
        is_shown: True to draw the bar; of several ranks, one draws it.
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
    """Show a spinner with a description and the elapsed time on stderr, if that is a terminal."""
    console = Output(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(doing, total=None)
        yield


def spellable(console: Console) -> Callable[[str], str]:
    """Return a function that replaces our own signs, such as check marks, unless the console's encoding is UTF."""
    if console.encoding.lower().startswith("utf"):
        return lambda words: words
    return lambda words: words.translate(_ASCII)


_SIGNS = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("? ", "bold yellow")}


def show_verdict(console: Console, is_good: bool | None, words: str) -> None:
    """Print a sentence after a mark: a check mark for True, a cross for False, a question mark for None (unknown)."""
    sign, style = _SIGNS[is_good]
    console.print(Text.assemble((spellable(console)(sign), style), printable(words)))


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as ASCII JSON with a line for each name and for each item of a list, which suits grep.

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
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if is_list else json.dumps(value)
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def pace(count: int, seconds: float) -> str:
    """Return the time of a transfer as text, with the rate if 10 MB or more were moved.

    Examples:
        >>> pace(2_000, 0.1), pace(272_000_000, 0.5)
        ('in 0.10 s', 'in 0.50 s, 544.0 MB/s')
    """
    return f"in {seconds:.2f} s" + (f", {size(int(count / max(seconds, 1e-9)))}/s" if count >= 10**7 else "")


# This section prints tables of any length, with aligned columns, and folds long keys if a terminal is too narrow. It
# doesn't use rich.table, which takes 14 times as long: a checkpoint may have millions of keys.

_GAP = "  "
_LEAST = 16
"""Least width of a folded column, in characters."""

_BATCH = 2000
"""Number of lines of a call of rich, which renders all its lines before it prints."""

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's name and format.

    Attributes:
        name: Text above the column.
        right: True for right alignment, as for numbers.
        style: Name of a style of rich.
    """

    name: str
    right: bool = False
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table before it is shown, in a terminal or on a page.

    Attributes:
        headings: Headings of the columns.
        rows: Rows with a text for each column.
    """

    headings: Sequence[Heading]
    rows: Sequence[Row]


def show_table(console: Console, headings: Sequence[Heading], rows: Sequence[Row], limit: int | None = None) -> None:
    """Print a table; the first column is folded if a terminal is too narrow, and nothing is ever cut off.

    Args:
        console: Console to print on.
        headings: Headings of the columns.
        rows: Rows with a text for each column.
        limit: Number of rows to print; None for all. A last line counts the others.
    """
    spell = spellable(console)
    # The first column has keys, in which our signs aren't replaced.
    texts = [(printable(first), *(spell(printable(cell)) for cell in cells)) for first, *cells in rows[:limit]]
    names = [heading.name for heading in headings]
    widths = [max(map(cell_len, column)) for column in zip(names, *texts, strict=True)]
    # Only a terminal folds, since programs expect a row on one line.
    if console.is_terminal:
        others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
        widths[0] = min(widths[0], max(_LEAST, console.width - others))
    rule = spell("─") * (sum(widths) + len(_GAP) * len(widths[1:]))
    bold, dim, *styles = (Style.parse(style) for style in ("bold", "dim", *(heading.style for heading in headings)))
    folds = (
        zip_longest(chop_cells(key, widths[0]), *([cell] for cell in cells), fillvalue="") for key, *cells in texts
    )
    lines = chain(
        [_line(names, headings, widths, [bold] * len(names)), [Segment(rule, dim)]],
        (_line(part, headings, widths, styles) for parts in folds for part in parts),
    )
    while batch := list(islice(lines, _BATCH)):
        if console.color_system is None:  # Plain lines lose the spaces that fill the last column.
            batch = [[Segment("".join(piece.text for piece in line).rstrip())] for line in batch]
        console.print(Segments(piece for line in batch for piece in (*line, Segment.line())), end="")
    if len(texts) < len(rows):
        console.print(f"and {len(rows) - len(texts):,} more", style="dim")


def _line(cells: Row, headings: Sequence[Heading], widths: Sequence[int], styles: Sequence[Style]) -> list[Segment]:
    pieces = []
    for cell, heading, width, style in zip(cells, headings, widths, styles, strict=True):
        space = " " * (width - cell_len(cell))
        pieces += [Segment(f"{space}{cell}" if heading.right else f"{cell}{space}", style), Segment(_GAP)]
    return pieces[:-1]
