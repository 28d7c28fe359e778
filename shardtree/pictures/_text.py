"""Pictures as text of a given width: lines of coloured spans for terminals, or plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import TypeAlias

from ..errors import printable
from ._picture import Bars, Entry, Flow, Line, Panel, Picture, Plane, Tone
from ._style import first_fitting


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive characters of a line with the same background.

    Attributes:
        text: The characters.
        tone: Name of the background colour; empty for none.
    """

    text: str
    tone: Tone = ""


Spans: TypeAlias = tuple[Span, ...]
"""A line of text."""

_GAP = 3
_PLANE = 48
"""The most characters of a plane: a wider one shows no more."""


def text_of(picture: Picture, width: int = 80) -> str:
    r"""Return a picture as plain text.

    Args:
        picture: The picture to draw.
        width: Number of characters in a line.

    Examples:
        >>> from shardtree.layouts import Mesh, P, layout_of
        >>> from shardtree.pictures import layout_picture
        >>> import torch
        >>> picture = layout_picture(layout_of({"w": torch.empty(4, 4)}, Mesh(tp=2), P("tp")))
        >>> for line in text_of(picture, 24).split("\n"):
        ...     print(line)
        'w' (4, 4) float32
        axis 1: 4
        000000000000000000000000
        00000000 rank 0 00000000
        000000000000000000000000
        000000000000000000000000
        111111111111111111111111
        11111111 rank 1 11111111
        111111111111111111111111
        axis 0: 4 (down)
        2 pieces
    """
    lines = picture_lines(picture, width, filled=True)
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def picture_lines(picture: Picture, width: int = 80, *, filled: bool = False) -> tuple[Spans, ...]:
    """Return the lines of a picture's text, each as spans with their colours.

    Args:
        picture: The picture to draw.
        width: Number of characters in a line.
        filled: Whether a cell is filled with its character `Cell.mark`, so that cells can be read without colours.

    Examples:
        >>> picture_lines(Picture("nothing", ()))
        ((Span(text='nothing', tone=''),),)
    """
    lines: list[Spans] = [*_plain(picture.title, width)]
    for number, row in enumerate(picture.rows):
        arrow = picture.is_step and number == 0
        lines += _row(row, width, filled=filled, arrow=arrow)
    lines += [line for note in picture.notes for line in _plain(note, width)]
    lines += _legend(picture.legend, width, filled=filled)
    return tuple(lines)


def _plain(text: str, width: int, short: str = "") -> list[Spans]:
    """Return a text wrapped into lines, or its short form if only that fits into one line."""
    fitting = first_fitting((printable(text), printable(short)), width) or printable(short or text)
    return [(Span(line),) for line in wrapped(fitting, width)]


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines, broken between words; only a word wider than a line is broken inside.

    Examples:
        >>> wrapped("decoder.linear_qkv.weight [0:4] is decoder.q.weight[0:4]", 32)
        ['decoder.linear_qkv.weight [0:4]', '  is decoder.q.weight[0:4]']
        >>> wrapped("decoder.linear_qkv.weight", 16)
        ['decoder.linear_q', '  kv.weight']
    """
    lines = [""]
    for number, word in enumerate(text.split(" ")):
        line = f"{lines[-1]} {word}" if number else word
        if len(line) > width and lines[-1].strip():
            lines, line = [*lines, ""], f"  {word}"
        while len(line) > max(width, 3):
            lines, line = [*lines[:-1], line[:width], ""], f"  {line[width:]}"
        lines[-1] = line
    return lines


def _legend(entries: Sequence[Entry], width: int, *, filled: bool) -> Iterator[Spans]:
    for entry in entries:
        mark = Span(f" {entry.mark or ' '} " if not filled else entry.mark, entry.tone)
        if entry.mark or not filled:
            first, *rest = wrapped(entry.text, max(width - len(mark.text) - 1, 1))
            yield (mark, Span(f" {first}"))
            yield from ((Span(" " * (len(mark.text) + 1) + line),) for line in rest)


def _row(row: Sequence[Panel], width: int, *, filled: bool, arrow: bool) -> list[Spans]:
    """Return the lines of a row of panels: side by side if they fit, else below each other."""
    room = (width - _GAP * (len(row) - 1)) // max(len(row), 1)
    names = [word for panel in row for word in _heading(panel).split(" ")]
    if len(row) > 1 and (room < 20 or max(map(len, names)) > room):
        return [line for panel in row for line in _row([panel], width, filled=filled, arrow=False)]
    most = _PLANE if len(row) == 1 else 40
    blocks = [_panel(panel, min(room, most) if isinstance(panel, Plane) else room, filled=filled) for panel in row]
    if len(blocks) == 1:
        return blocks[0]
    widths = [max((_length(line) for line in block), default=0) for block in blocks]
    tall = max(map(len, blocks))
    lines = []
    for number, parts in enumerate(zip_longest(*blocks, fillvalue=())):
        gap = Span(" → " if arrow and number == tall // 2 else " " * _GAP)
        line: list[Span] = []
        for place, (part, wide) in enumerate(zip(parts, widths, strict=True)):
            line += [*([gap] if place else []), *part, Span(" " * (wide - _length(part)))]
        lines.append(tuple(span for span in line if span.text))
    return lines


def _heading(panel: Panel) -> str:
    return printable((panel.short_heading if isinstance(panel, Plane) else "") or panel.heading)


def _length(line: Spans) -> int:
    return sum(len(span.text) for span in line)


def _panel(panel: Panel, width: int, *, filled: bool) -> list[Spans]:
    if isinstance(panel, Plane):
        return _plane(panel, width, filled=filled)
    if isinstance(panel, Bars):
        return _bars(panel, width, filled=filled)
    return _flow(panel, width) if isinstance(panel, Flow) else _line(panel, width)


# Planes.


def _plane(plane: Plane, width: int, *, filled: bool) -> list[Spans]:
    names = [printable(name) for name in plane.down_names]
    gutter = max(map(len, names), default=-1) + 1
    gutter = gutter if gutter <= width // 3 else 0
    inner = max(width - gutter, 1)
    # A character is about twice as high as it is wide.
    tall = max(plane.rows, round(inner * min(plane.aspect, 1.0) * 0.3), 3)
    above = ((plane.heading, plane.short_heading), (plane.across, ""))
    lines = [line for text, short in above if text for line in _plain(text, width, short)]
    for number, line in enumerate(cell_lines(plane, inner, tall, filled=filled)):
        lines.append((*([Span(_row_name(names, number, tall).rjust(gutter - 1) + " ")] if gutter else []), *line))
    below = (f"{plane.down} (down)" if plane.down else "", plane.caption)
    return lines + [line for text in below if text for line in _plain(text, width)]


def _row_name(names: Sequence[str], line: int, height: int) -> str:
    """Return the name of the row whose middle line is the given line; empty if there is none.

    Args:
        names: Names of a plane's rows, from top to bottom.
        line: Index of the line.
        height: Number of lines of the plane.
    """
    for number, name in enumerate(names):
        top, bottom = round(number * height / len(names)), round((number + 1) * height / len(names))
        if line == (top + bottom - 1) // 2:
            return name
    return ""


def cell_lines(plane: Plane, width: int, height: int, *, filled: bool) -> list[Spans]:
    """Return the lines of a plane's cells, without headings and names: `height` lines of `width` characters.

    Examples:
        >>> from shardtree.pictures import Cell
        >>> left = Cell(0, 0, 0.5, 1, "t0", "rank 0", ("rank 0", "0"), "0")
        >>> cell_lines(Plane("", (left,), 2, 1, 1.0), 8, 1, filled=True)
        [(Span(text=' 0 0', tone='t0'), Span(text='    ', tone=''))]
    """
    marks = [[" "] * width for _ in range(height)]
    tones = [[""] * width for _ in range(height)]
    for cell in plane.cells:
        left, right = round(cell.left * width), round(cell.right * width)
        top, bottom = round(cell.top * height), round(cell.bottom * height)
        for line in range(top, bottom):
            marks[line][left:right] = (cell.mark if filled else " ") * (right - left)
            tones[line][left:right] = [cell.tone] * (right - left)
        if bottom > top:
            label = first_fitting([f" {printable(text)} " for text in cell.labels], right - left)
            start = left + (right - left - len(label)) // 2
            marks[(top + bottom - 1) // 2][start : start + len(label)] = label
    lines = [groupby(zip(*line, strict=True), key=lambda pair: pair[1]) for line in zip(marks, tones, strict=True)]
    return [tuple(Span("".join(one for one, _ in run), tone) for tone, run in line) for line in lines]


# The other panels: a line for each bar, stream and moment.


def _bars(panel: Bars, width: int, *, filled: bool) -> list[Spans]:
    lines = _plain(panel.heading, width) if panel.heading else []
    most = max([bar.amount for bar in panel.bars], default=0) or 1
    names = min(max((len(printable(bar.name)) for bar in panel.bars), default=0), width // 2)
    texts = max((len(bar.text) for bar in panel.bars), default=0)
    room = max(width - names - texts - 2, 1)
    for bar in panel.bars:
        length = round(min(room, 40) * bar.amount / most)
        *above, name = wrapped(printable(bar.name), names)
        lines += [(Span(line),) for line in above]
        name = name.rjust(names)
        lines.append((Span(f"{name} "), Span(("#" if filled else " ") * length, bar.tone), Span(f" {bar.text}")))
    return lines + (_plain(panel.caption, width) if panel.caption else [])


def _flow(flow: Flow, width: int) -> list[Spans]:
    return [
        *_plain(f"{flow.heading}, {flow.to_heading}", width),
        *(
            (Span(line, stream.tone if stream.to_block >= 0 else ""),)
            for stream in flow.streams
            for line in wrapped(stream.title, width)
        ),
        *(_plain(flow.caption, width) if flow.caption else []),
    ]


_SHOWN = 20


def _line(line: Line, width: int) -> list[Spans]:
    """Return a text with a line for each of a chart's last events: the higher its value, the further right its mark."""
    moments, left = line.moments[-_SHOWN:], len(line.moments) - _SHOWN
    names = max((len(moment.name) for moment in moments), default=0)
    room = max(min(width - names - 4, 40), 1)
    lines = [part for text in (line.heading, line.measure) if text for part in _plain(text, width)]
    lines += _plain(f"{left} earlier ones", width) if left > 0 else []
    for moment in moments:
        mark = "*" if moment.is_pinned else "x" if moment.tone == "goes" else "o"
        place = round((moment.height or 0.0) * room)
        lines.append((Span(f"{moment.name:>{names}} {' ' * place}{mark}"),))
    return lines
