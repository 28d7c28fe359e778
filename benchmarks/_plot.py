"""Curves as an SVG: panels with logarithmic axes, side by side, in the colours of the documentation's diagrams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW, _GAP = 280, 190, 52, 34, 40, 26
_COLOURS = ("#007a59", "#0072b2", "#b84700", "#a64d79")
_STYLE = "text{font:12px system-ui,sans-serif;fill:#757d87}.title{font-weight:600}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that belong together.

    Attributes:
        name: for the legend; curves of one name have one colour.
        points: as (x, y), all of them positive, by x.
    """

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one axis.

    Attributes:
        title: what is shown.
        x: what grows.
        y: the unit of what is measured.
        curves: to be drawn.
    """

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]


def plot(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """Return panels as an SVG document, so many in a row, above their legend; the title is for readers of screens.

    Examples:
        >>> plot("growth", [Panel("seconds", "ranks", "s", (Curve("ours", ((1, 1), (10, 2))),))])[:38]
        '<svg xmlns="http://www.w3.org/2000/svg'
    """
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    colours = dict(zip(names, _COLOURS, strict=False))
    across, down = _LEFT + _WIDTH + _GAP, _TOP + _HEIGHT + _BELOW
    parts = [f"<style>{_STYLE}</style>"]
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({column * across + _LEFT},{row * down + _TOP})">')
        parts += [*_panel(panel, colours), "</g>"]
    bottom = -(-len(panels) // columns) * down
    for place, (name, colour) in enumerate(colours.items()):
        x = _LEFT + place * 170
        parts.append(f'<rect x="{x}" y="{bottom}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom + 6}">{escape(name)}</text>')
    size = f'width="{columns * across}" height="{bottom + 20}" viewBox="0 0 {columns * across} {bottom + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return f"{head}{''.join(parts)}</svg>\n"


def _panel(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    points = [point for curve in panel.curves for point in curve.points]
    xs, (low, high) = sorted({x for x, _ in points}), _decades([y for _, y in points])
    left, right = log10(xs[0]), max(log10(xs[-1]), log10(xs[0]) + 1e-9)
    yield f'<text class="title" x="0" y="-14">{escape(panel.title)}</text>'
    for power in range(low, high + 1):
        y = _HEIGHT * (high - power) / (high - low)
        yield f'<path d="M0 {y:.1f}H{_WIDTH}" stroke="#757d87" stroke-opacity=".35"/>'
        yield f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {escape(panel.y)}</text>'
    for x in xs:
        at = _WIDTH * (log10(x) - left) / (right - left)
        yield f'<text x="{at:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">{x:,.0f}</text>'
    yield f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 30}" text-anchor="middle">{escape(panel.x)}</text>'
    for curve in panel.curves:
        at = [
            (_WIDTH * (log10(x) - left) / (right - left), _HEIGHT * (high - log10(y)) / (high - low))
            for x, y in curve.points
        ]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        yield f'<path d="M{line}" fill="none" stroke="{colours[curve.name]}" stroke-width="2"/>'
        for (x, y), (_, value) in zip(at, curve.points, strict=True):
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colours[curve.name]}">'
            yield f"{dot}<title>{escape(curve.name)}: {value:.3g} {escape(panel.y)}</title></circle>"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten between which all values lie."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(high, low + 1)
