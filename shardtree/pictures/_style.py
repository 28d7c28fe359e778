"""The style of pictures: colours for light and dark (legible in grey too), short texts for ranks, names that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..core.geometry import Column
from ..errors import plural, rank_text

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
STRONG = ("h6", "h7", "h8")
"""Tones so strong that text on them has the inverse colour."""


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
"""The system's own font."""


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
    # An SVG's style applies to the whole page, so its rules are limited to our own pictures.
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
"""Hatches of holes and overlaps."""


COLOURS = {name: pair[0] for name, pair in (_TONES | _DRAWN).items()} | {
    "hole": "#f5a09a",
    "overlap": "#f5a09a",
    "goes": "#ffffff",
    "pinned": "#c9d0d8",
}
"""The colour of each tone where hatches can't be drawn, light enough for dark letters."""


# Labels: ranks in few words, names that are shortened in the middle, and how wide text is.


_LONGEST = 48
"""Largest number of characters of a list of ranks."""


def rank_words(ranks: Column) -> str:
    """Return a short text for ranks: a range, ranks at equal steps, or the first few ranks.

    Args:
        ranks: Ranks in ascending order without repeats, int64 (ranks,).

    Examples:
        >>> rank_words(np.arange(128)), rank_words(np.arange(0, 80, 8)), rank_words(np.array([3]))
        ('ranks 0-127', 'ranks 0, 8, ... 72 (10 ranks)', 'rank 3')
        >>> rank_words(np.array([0, 8])), rank_words(np.arange(60) ** 2)
        ('ranks 0, 8', 'ranks 0, 1, 4, 9, 16, 25, ... (60 ranks)')
    """
    steps = np.unique(np.diff(ranks))
    if ranks.size > 3 and steps.size == 1 and steps[0] > 1:
        return f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({plural(ranks.size, 'rank')})"
    # Only the first few hundred ranks are formatted: of more ranks, the text is cut anyway.
    if steps.size <= 1:
        return f"ranks {ranks[0]}-{ranks[-1]}" if ranks.size > 2 else rank_text(ranks.tolist())
    text = rank_text(ranks[: 8 * _LONGEST].tolist())
    if len(text) <= _LONGEST and ranks.size <= 8 * _LONGEST:
        return text
    parts = text[: _LONGEST - 20].split(", ")[:-1]
    return f"{', '.join(parts)}, ... ({plural(ranks.size, 'rank')})"


def rank_labels(ranks: Column) -> tuple[str, ...]:
    """Return labels for a cell that some ranks hold, the longest first; the first that fits is to be used.

    Examples:
        >>> rank_labels(np.array([0, 4])), rank_labels(np.arange(0, 80, 8))
        (('ranks 0, 4', '0, 4', '0 +1'), ('ranks 0, 8, ... 72 (10 ranks)', '0, 8, ... 72', '0 +9'))
    """
    words = rank_words(ranks)
    short = words.removeprefix("ranks ").removeprefix("rank ").partition(" (")[0]
    more = () if ranks.size == 1 else (f"{ranks[0]} +{ranks.size - 1}",)
    return (words, short, *more)


def shortened(text: str, room: float, width: Callable[[str], float] = len) -> str:
    """Return a text unchanged if it fits, else without its middle.

    Args:
        text: Text whose beginning and end both matter, such as a key.
        room: Available width.
        width: Function that measures a text; by default, its number of characters.

    Examples:
        >>> shortened("decoder.layers.0.mlp.linear_fc1.weight", 20)
        'decoder....1.weight'
        >>> shortened("w", 20), shortened("decoder", 2)
        ('w', '')
    """
    if width(text) <= room:
        return text
    low, high = 0, min(len(text), 4096) // 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if width(_without_middle(text, middle)) <= room else (low, middle - 1)
    return _without_middle(text, low) if low else ""


def fitted(text: str, short: str, room: float, width: Callable[[str], float] = len) -> str:
    """Return a text if it fits, else its short form, which is shortened in the middle if necessary.

    Examples:
        >>> fitted("'w' (4, 2) float32", "'w'", 20), fitted("'w' (4, 2) float32", "'w'", 10)
        ("'w' (4, 2) float32", "'w'")
    """
    return text if width(text) <= room else shortened(short or text, room, width)


def _without_middle(text: str, count: int) -> str:
    return f"{text[:count]}...{text[len(text) - count :]}"


def first_fitting(labels: Sequence[str], room: float, width: Callable[[str], float] = len) -> str:
    """Return the first label that fits; empty if none does.

    Examples:
        >>> first_fitting(("rank 10", "10"), 4)
        '10'
    """
    return next((label for label in labels if width(label) <= room), "")


_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[]/ -"), frozenset("mwMW@%")


def text_width(text: str, size: float) -> float:
    """Return an upper bound on a text's width, in the unit of the font size.

    Widths of characters are those of DejaVu Sans, the widest of the usual system fonts.

    Args:
        text: A text in any script.
        size: Size of the font.

    Examples:
        >>> round(text_width("rank 0", 10), 1), text_width("", 10)
        (34.4, 0)
    """
    return sum(map(_advance, text)) * size


def _advance(one: str) -> float:
    if one in _NARROW:
        return 0.42
    if one in _WIDE:
        return 1.0
    if not one.isascii():
        return 1.1
    return 0.75 if one.isupper() else 0.65
