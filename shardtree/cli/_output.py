"""Where commands print to: a console, bars, verdicts, JSON; tables of any length; and sizes as text."""

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


_SIGNS = {True: ("✓ ", "bold green"), False: ("✗ ", "bold red"), None: ("? ", "bold yellow")}


def show_verdict(console: Console, is_good: bool | None, words: str) -> None:
    """Print a sentence behind the sign that says whether it is good; None where that isn't known."""
    sign, style = _SIGNS[is_good]
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
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if is_list else json.dumps(value)
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def pace(count: int, seconds: float) -> str:
    """Return the time that moving bytes took, and from 10 MB on the rate: below, opening files takes most of the time.

    Examples:
        >>> pace(2_000, 0.1), pace(272_000_000, 0.5)
        ('in 0.10 s', 'in 0.50 s, 544.0 MB/s')
    """
    return f"in {seconds:.2f} s" + (f", {size(int(count / max(seconds, 1e-9)))}/s" if count >= 10**7 else "")


# Tables of any length: aligned columns, and long keys folded where a terminal is too narrow.

_GAP = "  "
# Not rich.table, which takes 14 times as long: a checkpoint may have millions of keys.
_LEAST = 16  # characters that a folded column keeps
_BATCH = 2000  # lines of one call of rich, which renders all that it is passed before it prints

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's name and format.

    Attributes:
        name: the text above it.
        right: whether it is right-aligned, as numbers are.
        style: a style of rich, by name.
    """

    name: str
    right: bool = False
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table before it is shown, in a terminal or on a page.

    Attributes:
        headings: the columns.
        rows: a text for each column.
    """

    headings: Sequence[Heading]
    rows: Sequence[Row]


def show_table(console: Console, headings: Sequence[Heading], rows: Sequence[Row], limit: int | None = None) -> None:
    """Print a table; the first column is folded where a terminal is too narrow, and nothing is ever cut off.

    Args:
        console: where to.
        headings: the columns.
        rows: a text for each column.
        limit: Number of rows to print; None for all. A last line counts those that are left out.
    """
    spell = spellable(console)
    # The first column holds keys, which are shown as they are: a sign of ours in one isn't ours to replace.
    texts = [(printable(first), *(spell(printable(cell)) for cell in rest)) for first, *rest in rows[:limit]]
    names = [heading.name for heading in headings]
    widths = [max(map(cell_len, column)) for column in zip(names, *texts, strict=True)]
    # Elsewhere nothing is folded: programs expect a row on one line.
    if console.is_terminal:
        others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
        widths[0] = min(widths[0], max(_LEAST, console.width - others))
    rule = spell("─") * (sum(widths) + len(_GAP) * len(widths[1:]))
    bold, dim, *styles = (Style.parse(style) for style in ("bold", "dim", *(heading.style for heading in headings)))
    folds = (zip_longest(chop_cells(key, widths[0]), *([one] for one in rest), fillvalue="") for key, *rest in texts)
    lines = chain(
        [_line(names, headings, widths, [bold] * len(names)), [Segment(rule, dim)]],
        (_line(part, headings, widths, styles) for parts in folds for part in parts),
    )
    while batch := list(islice(lines, _BATCH)):
        if console.color_system is None:  # plain lines end without the spaces that fill the last column
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
