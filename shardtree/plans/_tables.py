"""Numbers and tables as lines of text."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(count: int) -> str:
    """Return a number of bytes in words.

    Examples:
        >>> size_text(999), size_text(16_777_216)
        ('999 B', '16.8 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the heading.

    Examples:
        >>> table_lines([("rank", "sent"), ("0", "7 B")])
        ['rank  sent', '   0   7 B']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
