"""Tables of any length: aligned columns, and long keys folded where a terminal is too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from ._output import printable, spellable

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
        limit: how many rows to print; None for all. A last line says how many are left out.
    """
    spell = spellable(console)
    # The first column holds keys, which are shown as they are: a sign of ours in one isn't ours to replace.
    shown = [(printable(first), *(spell(printable(cell)) for cell in rest)) for first, *rest in rows[:limit]]
    names = [heading.name for heading in headings]
    widths = [max(map(cell_len, column)) for column in zip(names, *shown, strict=True)]
    # Elsewhere nothing is folded: programs expect a row on one line.
    if console.is_terminal:
        others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
        widths[0] = min(widths[0], max(_LEAST, console.width - others))
    rule = spell("─") * (sum(widths) + len(_GAP) * len(widths[1:]))
    bold, dim, *styles = (Style.parse(style) for style in ("bold", "dim", *(heading.style for heading in headings)))
    folded = (zip_longest(chop_cells(key, widths[0]), *([one] for one in rest), fillvalue="") for key, *rest in shown)
    lines = chain(
        [_line(names, headings, widths, [bold] * len(names)), [Segment(rule, dim)]],
        (_line(part, headings, widths, styles) for parts in folded for part in parts),
    )
    while batch := list(islice(lines, _BATCH)):
        if console.color_system is None:  # plain lines end without the spaces that fill the last column
            batch = [[Segment("".join(piece.text for piece in line).rstrip())] for line in batch]
        console.print(Segments(piece for line in batch for piece in (*line, Segment.line())), end="")
    if len(shown) < len(rows):
        console.print(f"and {len(rows) - len(shown):,} more", style="dim")


def _line(cells: Row, headings: Sequence[Heading], widths: Sequence[int], styles: Sequence[Style]) -> list[Segment]:
    pieces = []
    for cell, heading, width, style in zip(cells, headings, widths, styles, strict=True):
        space = " " * (width - cell_len(cell))
        pieces += [Segment(f"{space}{cell}" if heading.right else f"{cell}{space}", style), Segment(_GAP)]
    return pieces[:-1]
