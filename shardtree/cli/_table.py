"""Tables of any length: aligned columns, and long keys folded where a terminal is too narrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from ._output import printable, spellable

_GAP = "  "
# Not rich.table, which renders all rows before it prints the first: a checkpoint may have millions of keys.
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
        limit: how many rows to print; None for all. A last line says how many are left out.
    """
    spell = spellable(console)
    # The first column holds keys, which are shown as they are: a sign of ours in one isn't ours to replace.
    shown = [(printable(first), *(spell(printable(cell)) for cell in rest)) for first, *rest in rows[:limit]]
    widths = _widths(console, headings, shown)
    styles = [Style.parse(heading.style) for heading in headings]
    names = _line([heading.name for heading in headings], headings, widths, [Style.parse("bold")] * len(headings))
    _print_lines(console, [names, [Segment(spell("─") * sum(widths), Style.parse("dim"))]])
    lines = (_line(part, headings, widths, styles) for row in shown for part in _folded(row, widths[0]))
    while batch := list(islice(lines, _BATCH)):
        _print_lines(console, batch)
    if len(shown) < len(rows):
        console.print(f"and {len(rows) - len(shown):,} more", style="dim")


def _widths(console: Console, headings: Sequence[Heading], rows: Sequence[Row]) -> list[int]:
    """Return each column's width, with the gap after it."""
    columns = zip([heading.name for heading in headings], *rows, strict=True)
    widths = [max(map(_width, column)) + len(_GAP) for column in columns]
    widths[-1] -= len(_GAP)
    # Elsewhere nothing is folded: programs expect a row on one line.
    if console.is_terminal:
        widths[0] = min(widths[0], max(_LEAST, console.width - sum(widths[1:])))
    return widths


def _folded(row: Row, width: int) -> Iterator[Row]:
    """Yield the lines of a row whose first cell may be too long for one."""
    width -= len(_GAP)
    if _width(row[0]) <= width:
        yield row
    else:
        yield from zip_longest(chop_cells(row[0], width), *([cell] for cell in row[1:]), fillvalue="")


def _line(cells: Row, headings: Sequence[Heading], widths: Sequence[int], styles: Sequence[Style]) -> list[Segment]:
    pieces = []
    last = len(cells) - 1
    for place, (cell, heading, width, style) in enumerate(zip(cells, headings, widths, styles, strict=True)):
        gap = "" if place == last else _GAP
        space = " " * (width - _width(cell) - len(gap))
        pieces.append(Segment(f"{space}{cell}{gap}" if heading.right else f"{cell}{space}{gap}", style))
    return pieces


def _print_lines(console: Console, lines: Sequence[list[Segment]]) -> None:
    # Plain lines end without the spaces that fill the last column.
    if console.color_system is None:
        pieces = [Segment("".join(piece.text for piece in line).rstrip() + "\n") for line in lines]
    else:
        pieces = [piece for line in lines for piece in (*line, Segment.line())]
    console.print(Segments(pieces), end="")


def _width(cell: str) -> int:
    # cell_len knows characters that take two cells; len is quicker, and most keys are ASCII.
    return len(cell) if cell.isascii() else cell_len(cell)
