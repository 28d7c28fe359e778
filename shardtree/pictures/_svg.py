"""Pictures as SVG: static, with texts on hover, in a size that fits a page; no text is cut off or covers another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from ..errors import printable
from ._picture import Bars, Cell, Entry, Flow, Line, Panel, Picture, Plane
from ._style import PATTERNS, STRONG, STYLE, first_fitting, fitted, text_width

_PAD, _GAP, _ARROW = 20, 28, 46
_PLANE_WIDTHS = {1: 380.0, 2: 270.0, 3: 250.0}
_STRIP, _HIGHEST, _NAMES, _TITLE_ROOM = 620.0, 400.0, 90.0, 600.0
_LABEL, _HEADING, _TITLE = 11, 13, 16
"""Sizes that widths are estimated with; headings and titles are bold, which takes more than their font's size."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A panel as SVG, drawn with its top left corner at (0, 0), and its size."""

    svg: str
    width: float
    height: float


def svg_of(picture: Picture) -> str:
    """Return a picture as an SVG document.

    Examples:
        >>> svg_of(Picture("nothing", ()))[:38], svg_of(Picture("nothing", ()))[-6:]
        ('<svg xmlns="http://www.w3.org/2000/svg', '</svg>')
    """
    rows = [[_panel(panel, len(row)) for panel in row] for row in picture.rows if row]
    gaps = [_ARROW if picture.is_step and place == 0 else _GAP for place, _ in enumerate(rows)]
    widths = [sum(one.width for one in row) + gap * (len(row) - 1) for row, gap in zip(rows, gaps, strict=True)]
    texts = [text_width(printable(picture.title), _TITLE), *(text_width(note, _LABEL) for note in picture.notes)]
    inner = max([240, *widths])
    # A title may make a picture wider, a long key in it only a little.
    inner = max([inner, *(min(width, max(1.15 * inner, _TITLE_ROOM)) for width in texts)])
    parts, y = [_text(0, 15, picture.title, inner, "title", _TITLE)], 34.0
    for number, (row, gap) in enumerate(zip(rows, gaps, strict=True)):
        x, height = 0.0, max(one.height for one in row)
        for place, panel in enumerate(row):
            parts.append(f'<g transform="translate({_n(x)},{_n(y)})">{panel.svg}</g>')
            x += panel.width + gap
            if picture.is_step and number == 0 and place + 1 < len(row):
                arrow = f"M{_n(x - gap / 2 - 9)},{_n(y + height / 2)}h17m-6,-5l6,5l-6,5"
                parts.append(f'<path class="rule" stroke-width="1.6" d="{arrow}"/>')
        y += height + _GAP - 6
    for note in picture.notes:
        parts.append(_text(0, y + 8, note, inner, "dim", _LABEL))
        y += 18
    legend, legend_height = _legend(picture.legend, inner)
    parts.append(f'<g transform="translate(0,{_n(y)})">{legend}</g>' if legend else "")
    return _document(
        picture.title, "".join(parts), inner + 2 * _PAD, y + legend_height + 2 * _PAD - (22 if rows else 12)
    )


def _document(title: str, inside: str, width: float, height: float) -> str:
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="shardtree" {size} role="img"><title>{_xml(title)}</title>'
        f"<style>{STYLE}</style>{PATTERNS}"
        f'<rect class="back" width="{_n(width)}" height="{_n(height)}" rx="8"/>'
        f'<g transform="translate({_PAD},{_PAD})">{inside}</g></svg>'
    )


def _panel(panel: Panel, beside: int) -> _Drawn:
    if isinstance(panel, Plane):
        return _plane(panel, beside)
    if isinstance(panel, Bars):
        return _bars(panel)
    return _flow(panel) if isinstance(panel, Flow) else _line(panel)


# Parts of SVG.


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _xml(text: str) -> str:
    return escape(printable(text))


def _text(
    x: float, y: float, text: str, room: float, style: str, size: float, *, hover: bool = True, short: str = ""
) -> str:
    """Return a text as SVG, shortened to fit the width `room`; a shortened text shows the whole one on hover."""
    text = printable(text)
    fits = fitted(text, printable(short), room, partial(text_width, size=size))
    if not fits:
        return ""
    title = f"<title>{escape(text)}</title>" if fits != text and hover else ""
    style = f' class="{style}"' if style else ""
    return f'<text{style} x="{_n(x)}" y="{_n(y)}">{title}{escape(fits)}</text>'


def _rect(tone: str, x: float, y: float, width: float, height: float, title: str) -> str:
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return (
        f'<rect class="{tone}" {place}><title>{_xml(title)}</title></rect>'
        if title
        else f'<rect class="{tone}" {place}/>'
    )


def _legend(entries: Sequence[Entry], room: float) -> tuple[str, float]:
    """Return a legend as SVG, with a swatch and a text for each entry in lines of width `room`, and its height."""
    parts, x, y = [], 0.0, 0.0
    for entry in entries:
        width = 18 + text_width(entry.text, _LABEL) + 16
        if x and x + width > room:
            x, y = 0.0, y + 20
        swatch = _rect(entry.tone, x, y, 12, 12, "")
        if entry.tone == "pinned":
            swatch = _pin(x + 6, y + 6)
        elif entry.tone == "goes":
            swatch = f'<circle class="goes" stroke-width="1.5" cx="{_n(x + 6)}" cy="{_n(y + 6)}" r="4.5"/>'
        parts.append(swatch + _text(x + 18, y + 10, entry.text, room - 18, "dim", _LABEL))
        x += width
    return "".join(parts), (y + 22 if parts else 0.0)


def _pin(x: float, y: float) -> str:
    return f'<path class="ink" d="M{_n(x)},{_n(y - 5)}l4,5l-4,5l-4,-5z"/>'


# Planes.


def _plane(plane: Plane, beside: int) -> _Drawn:
    width, height = _plane_size(plane, beside)
    names = [text_width(printable(name), _LABEL) for name in plane.down_names]
    left = 18.0 * bool(plane.down) + (min(max(names), _NAMES) + 6 if names else 0)
    parts, y = _above(plane, left, width)
    if plane.down:
        group = f'<g transform="translate(10,{_n(y + height / 2)}) rotate(-90)">'
        parts.append(group + _text(0, 0, plane.down, height, "dim mid", _LABEL) + "</g>")
    parts.append(_down_names(plane.down_names, left - 6, y, height))
    # What no cell covers is empty; cells that are empty themselves are told apart by gaps.
    is_covered = any(cell.tone == "none" for cell in plane.cells)
    parts.append(_rect("back" if is_covered else "none", left, y, width, height, ""))
    levels = _levels(plane, width)
    parts += (_cell(cell, left, y, width, height, levels) for cell in plane.cells)
    y += height
    if plane.caption:
        parts.append(_text(left, y + 16, plane.caption, width, "dim", _LABEL))
        y += 20
    return _Drawn("".join(parts), left + width, y)


def _plane_size(plane: Plane, beside: int) -> tuple[float, float]:
    is_strip = plane.aspect < 0.2
    width = _STRIP if is_strip and beside == 1 else _PLANE_WIDTHS.get(beside, 200.0)
    # Thin rows are as high as what is written into them, as long as the picture stays on a screen.
    shortest = 13.0 * plane.rows if plane.rows < 34 else _HIGHEST
    return width, max(width * plane.aspect, min(shortest, _HIGHEST), 30.0)


def _above(plane: Plane, left: float, width: float) -> tuple[list[str], float]:
    """Return the SVG of a plane's heading and column names, and the vertical position at which its cells begin."""
    parts, y = [], 0.0
    if plane.heading:
        parts.append(_text(0, 11, plane.heading, left + width, "heading", _HEADING, short=plane.short_heading))
        y += 20
    if plane.across:
        parts.append(_text(left, y + 10, plane.across, width, "dim", _LABEL))
        y += 17
    if plane.across_names:
        parts.append(_across_names(plane.across_names, left, y + 9, width))
        y += 15
    return parts, y


def _levels(plane: Plane, width: float) -> dict[float, int]:
    """Return, for each width of cells, the index in `Cell.labels` of the longest label that fits all these cells.

    So cells of equal width are labelled alike: if "rank 9" fits, but "rank 10" doesn't, both get numbers only.
    """
    levels: dict[float, int] = {}
    for cell in plane.cells:
        wide = round((cell.right - cell.left) * width, 2)
        label = first_fitting(cell.labels, wide - 6.5, partial(text_width, size=_LABEL))
        if label:
            levels[wide] = max(levels.get(wide, 0), cell.labels.index(label))
    return levels


def _cell(cell: Cell, x: float, y: float, width: float, height: float, levels: dict[float, int]) -> str:
    left, top, right, bottom = cell.left * width, cell.top * height, cell.right * width, cell.bottom * height
    # A gap between neighbours, unless it would take most of a thin one.
    wide, high = right - left, bottom - top
    gap, gap_down = min(1.5, wide / 4), min(1.5, high / 4)
    rect = _rect(cell.tone, x + left, y + top, wide - gap, high - gap_down, cell.title)
    # A cell with fewer labels than its neighbours keeps its last one.
    labels = cell.labels[min(levels.get(round(wide, 2), 0), max(len(cell.labels) - 1, 0)) :]
    return rect + _label(cell, labels, x + left, y + top, wide - gap, high - gap_down)


def _label(cell: Cell, labels: tuple[str, ...], x: float, y: float, width: float, height: float) -> str:
    if height < 11:
        return ""
    label = first_fitting(labels, width - 5, partial(text_width, size=_LABEL))
    style = "mid inverse" if cell.tone in STRONG else "mid"
    if not label:
        return ""
    if cell.tone in ("hole", "overlap"):
        # A hatch behind letters can't be read through.
        wide = text_width(label, _LABEL) + 2
        back = _rect("pale", x + (width - wide) / 2, y + height / 2 - 7, wide, min(14, height), "")
        return back + _text(x + width / 2, y + height / 2 + 4, label, width, style, _LABEL)
    return _text(x + width / 2, y + height / 2 + 4, label, width, style, _LABEL)


def _across_names(names: Sequence[str], x: float, y: float, width: float) -> str:
    """Return the names of columns as SVG: all, or only every n-th if they would overlap."""
    step = width / len(names)
    wide = [text_width(name, _LABEL) for name in names]
    every = next(n for n in range(1, len(names) + 1) if n == len(names) or max(wide[::n]) + 5 <= step * n)
    parts = [
        _text(x + step * (place + 0.5), y, name, max(step * every, 20), "dim mid", _LABEL)
        for place, name in enumerate(names)
        # A name may extend beyond the plane's edge, but only into the space beside it.
        if place % every == 0 and step * (place + 0.5) + wide[place] / 2 <= width + 8
    ]
    return "".join(parts)


def _down_names(names: Sequence[str], x: float, y: float, height: float) -> str:
    if not names:
        return ""
    step = height / len(names)
    every = max(1, -(-13 // int(max(step, 1))))
    return "".join(
        _text(x, y + step * (place + 0.5) + 4, name, _NAMES, "dim end", _LABEL)
        for place, name in enumerate(names)
        if place % every == 0
    )


# Bars.


def _bars(panel: Bars) -> _Drawn:
    measure = partial(text_width, size=_LABEL)
    names = min(max([20.0, *(measure(printable(bar.name)) for bar in panel.bars)]), 240.0)
    texts = max([0.0, *(measure(bar.text) for bar in panel.bars)])
    longest, most = 200.0, max([0.0, *(bar.amount for bar in panel.bars)]) or 1.0
    width = names + 8 + longest + 8 + texts
    parts, y = [], 0.0
    if panel.heading:
        parts.append(_text(0, 11, panel.heading, width, "heading", _HEADING))
        y += 22
    for bar in panel.bars:
        parts.append(_text(names, y + 12, bar.name, names, "dim end", _LABEL))
        length = longest * bar.amount / most
        parts.append(_rect(bar.tone, names + 8, y + 1, max(length, 0.5), 15, bar.title or f"{bar.name}: {bar.text}"))
        parts.append(_text(names + 8 + length + 8, y + 12, bar.text, texts + 1, "", _LABEL))
        y += 20
    if panel.caption:
        parts.append(_text(0, y + 12, panel.caption, width, "dim", _LABEL))
        y += 18
    return _Drawn("".join(parts), width, y)


# Flows.

_SIDE, _WIDEST_SIDE, _BETWEEN = 150.0, 270.0, 150.0


def _flow(flow: Flow) -> _Drawn:
    rows = max(sum(block.rows for block in side) for side in (flow.blocks, flow.to_blocks)) or 1
    unit = min(420 / rows if rows < 30 else 320 / rows, 24.0)
    left, left_height = _stack([block.rows * unit for block in flow.blocks])
    right, right_height = _stack([block.rows * unit for block in flow.to_blocks])
    # Names are as often told apart by their middles as by their ends.
    names = [text_width(printable(block.name), _LABEL) + 1 for block in (*flow.blocks, *flow.to_blocks)]
    side = min(max([_SIDE, *names]), _WIDEST_SIDE)
    far, height = side + _BETWEEN, max(left_height, right_height)
    parts = [
        _text(0, 11, flow.heading, side, "heading", _HEADING),
        _text(far, 11, flow.to_heading, side, "heading", _HEADING),
    ]
    for blocks, tops, x in ((flow.blocks, left, 0.0), (flow.to_blocks, right, far)):
        for block, top in zip(blocks, tops, strict=True):
            parts.append(_text(x, top - 5, block.name, side, "dim", _LABEL))
            parts.append(_rect("none", x, top, side, max(block.rows * unit, 0.5), ""))
    ends = []
    for stream in flow.streams:
        top, high = left[stream.block] + stream.start * unit, stream.rows * unit
        ends.append(_end(stream.tone, (0, top, side, high), stream.title, stream.label))
        if stream.to_block >= 0:
            to_top = right[stream.to_block] + stream.to_start * unit
            parts.append(_ribbon(stream.tone, (side, top), (far, to_top), high, stream.title))
            ends.append(_end(stream.tone, (far, to_top, side, high), stream.title, stream.to_label))
    # Ends lie over ribbons, so that what is written in them stays clear.
    if flow.caption:
        ends.append(_text(0, height + 16, flow.caption, far + side, "dim", _LABEL))
        height += 22
    return _Drawn("".join([*parts, *ends]), far + side, height)


def _stack(heights: Sequence[float]) -> tuple[list[float], float]:
    """Return the tops of stacked blocks, with room for a name above each block, and the bottom of the last block."""
    tops, y = [], 22.0
    for height in heights:
        y += 18
        tops.append(y)
        y += height + 8
    return tops, y - 8 if heights else y


def _end(tone: str, place: tuple[float, float, float, float], title: str, label: str) -> str:
    x, y, width, height = place
    high = height - min(1.5, height / 4)
    text = ""
    if height >= 12 and text_width(printable(label), _LABEL) <= width - 6:
        text = _text(x + width / 2, y + high / 2 + 4, label, width, "mid", _LABEL)
    return _rect(tone, x, y, width, high, title) + text


def _ribbon(tone: str, begin: tuple[float, float], end: tuple[float, float], height: float, title: str) -> str:
    (near, top), (far, to_top) = begin, end
    middle, high = (near + far) / 2, height - min(1.5, height / 4)
    path = (
        f"M{_n(near)},{_n(top)}C{_n(middle)},{_n(top)} {_n(middle)},{_n(to_top)} {_n(far)},{_n(to_top)}v{_n(high)}"
        f"C{_n(middle)},{_n(to_top + high)} {_n(middle)},{_n(top + high)} {_n(near)},{_n(top + high)}z"
    )
    return f'<path class="{tone} soft" d="{path}"><title>{_xml(title)}</title></path>'


# Lines.

_LINE_WIDTH = 700.0


def _line(line: Line) -> _Drawn:
    tall = 120.0 if line.measure else 24.0
    side, top, parts = 14.0, 0.0, []
    if line.heading:
        parts.append(_text(0, 11, line.heading, _LINE_WIDTH, "heading", _HEADING))
        top += 20
    if line.measure:
        parts.append(_text(0, top + 11, line.measure, _LINE_WIDTH, "dim", _LABEL))
        top += 26
    base = top + tall
    spots = [
        (side + moment.at * (_LINE_WIDTH - 2 * side), base - 18 - (moment.height or 0.0) * (tall - 24))
        for moment in line.moments
    ]
    parts.append(f'<path class="rule" d="M0,{_n(base)}H{_n(_LINE_WIDTH)}"/>')
    points = [spot for spot, moment in zip(spots, line.moments, strict=True) if moment.height is not None]
    if len(points) > 1:
        parts.append(f'<path class="rule" d="M{" ".join(f"{_n(x)},{_n(y)}" for x, y in points)}"/>')
    for (x, y), moment in zip(spots, line.moments, strict=True):
        mark = f'<circle class="{moment.tone} line" stroke-width="1.2" cx="{_n(x)}" cy="{_n(y)}" r="4.5"/>'
        if moment.tone == "goes":
            mark = f'<circle class="goes" stroke-width="1.2" cx="{_n(x)}" cy="{_n(y)}" r="3.5"/>'
        pin = _pin(x, y - 13) if moment.is_pinned else ""
        parts.append(f"<g><title>{_xml(moment.title)}</title>{mark}{pin}</g>")
    parts.append(_moment_names(line, [x for x, _ in spots], base + 14))
    return _Drawn("".join(parts), _LINE_WIDTH, base + 20)


def _moment_names(line: Line, places: Sequence[float], y: float) -> str:
    """Return the names of a line's moments as SVG, without names that would overlap.

    Of overlapping names, those of steps that a policy removes (tone "goes") are left out first.
    """
    spans: list[tuple[float, float]] = []
    parts = []
    for x, moment in sorted(zip(places, line.moments, strict=True), key=lambda each: each[1].tone == "goes"):
        half = text_width(moment.name, _LABEL) / 2
        middle = min(max(x, half), _LINE_WIDTH - half)
        if all(middle + half + 4 < low or middle - half - 4 > high for low, high in spans):
            spans.append((middle - half, middle + half))
            parts.append(_text(middle, y, moment.name, 2 * half + 1, "dim mid", _LABEL))
    return "".join(parts)
