"""The look of SVG: colours for light and dark, of tones that differ in luminance too, so that grey is enough."""

from __future__ import annotations

_TONES = {
    # on light pages, and on dark ones
    "t0": ("#8fc1ea", "#2a6ca6"),
    "t1": ("#fbe6ae", "#8f7430"),
    "t2": ("#69b8a4", "#17564a"),
    "t3": ("#f2cfe2", "#a05a82"),
    "t4": ("#a39be0", "#3d3788"),
    "t5": ("#d8efc3", "#5d8038"),
    "t6": ("#ec9c63", "#7d3c0e"),
    "t7": ("#d3d9e0", "#66707b"),
    "h1": ("#e3effa", "#14263a"),
    "h2": ("#c6dff4", "#18324e"),
    "h3": ("#a5cdec", "#1c4167"),
    "h4": ("#7fb6e0", "#215384"),
    "h5": ("#569bd0", "#3a6fa6"),
    "h6": ("#3580bd", "#6a9ccc"),
    "h7": ("#1c65a3", "#98c1e6"),
    "h8": ("#0b4a82", "#c9e2f8"),
}
_STRONG = ("h6", "h7", "h8")
"""Amounts so strong that what is written on them has the other colour."""


_DRAWN = {
    "back": ("#ffffff", "#11161d"),
    "ink": ("#161b22", "#eef2f6"),
    "dim": ("#59636e", "#a3adb8"),
    "none": ("#e7ebef", "#2a323c"),
    "kept": ("#c9d0d8", "#39424d"),
    "pale": ("#fde3e1", "#4a1f1f"),
}
_RED = ("#c4161c", "#ff7b72")

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
"""The system's own."""


def _colours(*, dark: bool) -> list[str]:
    back, ink, dim = (_DRAWN[name][dark] for name in ("back", "ink", "dim"))
    fills = {name: pair[dark] for name, pair in (_DRAWN | _TONES).items()} | {"inverse": back}
    return [
        f"text{{fill:{ink}}}",
        *(f".{name}{{fill:{colour}}}" for name, colour in fills.items()),
        f".rule{{stroke:{dim}}}",
        f".line{{stroke:{ink}}}",
        f".goes{{fill:{back};stroke:{ink}}}",
        f".red{{stroke:{_RED[dark]}}}",
    ]


def _scoped(rules: list[str]) -> str:
    # In a page, an SVG's style counts for all of it: what isn't a picture of ours must stay as it is.
    return "".join(f".shardtree {rule}" for rule in rules)


_FORMS = [
    f"text{{font:11px {FONT};pointer-events:none}}",
    ".title{font-size:15px;font-weight:600}",
    ".heading{font-size:12px;font-weight:600}",
    ".mid{text-anchor:middle}",
    ".end{text-anchor:end}",
    ".rule{fill:none}",
    ".soft{opacity:.4}",
    ".hole{fill:url(#st-hole)}",
    ".overlap{fill:url(#st-overlap)}",
]

_NIGHT = _scoped(_colours(dark=True))
STYLE = f"{_scoped([*_FORMS, *_colours(dark=False)])}@media(prefers-color-scheme:dark){{{_NIGHT}}}"
"""CSS of an SVG."""

PATTERNS = (
    '<defs><pattern id="st-hole" width="6" height="6" patternUnits="userSpaceOnUse"><rect class="pale" width="6" '
    'height="6"/><path class="red" d="M-1,7L7,-1M-1,1L1,-1M5,7L7,5" stroke-width="1.4"/></pattern>'
    '<pattern id="st-overlap" width="6" height="6" patternUnits="userSpaceOnUse"><rect class="pale" width="6" '
    'height="6"/><path class="red" d="M0,0L6,6M0,6L6,0" stroke-width="1"/></pattern></defs>'
)
"""Hatches of what is held by none, or by several."""


COLOURS = {name: pair[0] for name, pair in (_TONES | _DRAWN).items()} | {
    "hole": "#f5a09a",
    "overlap": "#f5a09a",
    "goes": "#ffffff",
    "pinned": "#c9d0d8",
}
"""The colour of each tone where there are no hatches, for dark letters on it."""


def label_class(tone: str) -> str:
    """Return the class of what is written on a tone.

    Examples:
        >>> label_class("t0"), label_class("h8")
        ('', 'inverse')
    """
    return "inverse" if tone in _STRONG else ""
