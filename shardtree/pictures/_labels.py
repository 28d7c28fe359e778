"""Labels: ranks in few words, names that are shortened in the middle, and how wide text is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import plural, rank_text
from ..geometry import Column

_LONGEST = 48
"""Characters of a list of ranks."""


def rank_words(ranks: Column) -> str:
    """Return ranks as text that is never long: ranges, equal steps, or the first few.

    Args:
        ranks: ascending, each once, int64 (ranks,).

    Examples:
        >>> rank_words(np.arange(128)), rank_words(np.arange(0, 80, 8)), rank_words(np.array([3]))
        ('ranks 0-127', 'ranks 0, 8, ... 72 (10 ranks)', 'rank 3')
        >>> rank_words(np.array([0, 8])), rank_words(np.arange(60) ** 2)
        ('ranks 0, 8', 'ranks 0, 1, 4, 9, 16, 25, ... (60 ranks)')
    """
    steps = np.unique(np.diff(ranks))
    if ranks.size > 3 and steps.size == 1 and steps[0] > 1:
        return f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({plural(ranks.size, 'rank')})"
    # Runs are found in a few hundred at a time: a text that is cut needs no more of ten thousand.
    if steps.size <= 1:
        return f"ranks {ranks[0]}-{ranks[-1]}" if ranks.size > 2 else rank_text(ranks.tolist())
    text = rank_text(ranks[: 8 * _LONGEST].tolist())
    if len(text) <= _LONGEST and ranks.size <= 8 * _LONGEST:
        return text
    parts = text[: _LONGEST - 20].split(", ")[:-1]
    return f"{', '.join(parts)}, ... ({plural(ranks.size, 'rank')})"


def rank_labels(ranks: Column) -> tuple[str, ...]:
    """Return what may be written into the cell of some ranks, the longest first.

    Examples:
        >>> rank_labels(np.array([0, 4])), rank_labels(np.arange(0, 80, 8))
        (('ranks 0, 4', '0, 4', '0 +1'), ('ranks 0, 8, ... 72 (10 ranks)', '0, 8, ... 72', '0 +9'))
    """
    words = rank_words(ranks)
    short = words.removeprefix("ranks ").removeprefix("rank ").partition(" (")[0]
    more = () if ranks.size == 1 else (f"{ranks[0]} +{ranks.size - 1}",)
    return (words, short, *more)


def shortened(text: str, room: float, width: Callable[[str], float] = len) -> str:
    """Return text that fits, without its middle if it doesn't.

    Args:
        text: a key, say, whose beginning and end both matter.
        room: how much there is.
        width: how much a text takes; characters, by default.

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
    """Return a text if it fits, else the short one, which loses its middle if it must.

    Examples:
        >>> fitted("'w' (4, 2) float32", "'w'", 20), fitted("'w' (4, 2) float32", "'w'", 10)
        ("'w' (4, 2) float32", "'w'")
    """
    return text if width(text) <= room else shortened(short or text, room, width)


def _without_middle(text: str, kept: int) -> str:
    return f"{text[:kept]}...{text[len(text) - kept :]}"


def first_fitting(labels: Sequence[str], room: float, width: Callable[[str], float] = len) -> str:
    """Return the first label that fits, empty if none does.

    Examples:
        >>> first_fitting(("rank 10", "10"), 4)
        '10'
    """
    return next((label for label in labels if width(label) <= room), "")


_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[]/ -"), frozenset("mwMW@%")


def text_width(text: str, size: float) -> float:
    """Return the width that text takes at most, in the unit of its size.

    Advances are those of DejaVu Sans, the widest of the usual system fonts; bold text is set smaller.

    Args:
        text: in any script.
        size: of the font.

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
