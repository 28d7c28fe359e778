"""Compiled patterns of keys, which are sequences of pieces, and matching in bounded time, even for hostile keys.

A piece is literal text, or stands for a star or a similar gap in the pattern. Python's regular expressions try each way
to divide a key among such pieces: with two stars a key of 64 kB takes seconds, with three stars hours, and keys come
from files. So regular expressions match short keys only. For longer keys, the positions at which the remaining pieces
match are computed from the end of the key, once for each piece. Both methods agree: from the first piece to the last,
each piece matches the longest text that lets the remaining pieces match.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from math import comb
from operator import or_
from typing import NamedTuple


class FormPiece(NamedTuple):
    """One piece of a pattern.

    Attributes:
        kind: ``"text"`` for literal text, ``"or"`` for a choice, or a key of `_EXPRESSIONS`.
        text: Literal text of a ``"text"`` piece.
        choices: Alternatives of an ``"or"`` piece, each a sequence of pieces; the first that fits counts.
    """

    kind: str
    text: str = ""
    choices: tuple[tuple[FormPiece, ...], ...] = ()


def text_piece(text: str) -> FormPiece:
    """Return a piece of literal text."""
    return FormPiece("text", text)


def one_of(*choices: Sequence[FormPiece]) -> FormPiece:
    """Return a piece that matches any of several sequences of pieces; the first that fits counts."""
    return FormPiece("or", choices=tuple(map(tuple, choices)))


_EXPRESSIONS = {
    "part": r"[^.]++",  # a dot or the end follows
    "characters": r"[^.]*",  # within a part
    "anything": r"(?s:.*)",
    "parts before": r"(?:[^.]++\.)*",
    "parts after": r"(?:\.[^.]+)*",
    "number": r"(?:0|[1-9][0-9]*)",
    "rest": r"(?s:.+)",
    "rest without number": r"(?![0-9]+(?:\.|$))(?s:.+)",
}
_BY_PARTS, _BY_CHARACTERS = ("parts before",), ("characters", "anything", "parts after")
"""Kinds of pieces with several ways to match: as many as a key has parts, or characters."""


def expression_of(pieces: Sequence[FormPiece], *, groups: bool = True) -> str:
    """Return a regular expression for a sequence of pieces.

    If `groups` is set, the expression has a group for each piece that isn't literal text.
    """
    return "".join(_expression(piece, groups) for piece in pieces)


def _expression(piece: FormPiece, groups: bool) -> str:
    if piece.kind == "text":
        return re.escape(piece.text)
    choices = "|".join(expression_of(choice, groups=False) for choice in piece.choices)
    text = f"(?:{choices})" if piece.choices else _EXPRESSIONS[piece.kind]
    return f"({text})" if groups else text


_MOST_WAYS = 8192
_USUAL_DOTS = 16
_LONGEST = 4096
"""Number of characters up to which a regular expression is used, since it takes memory for each part of a key."""


@dataclass(frozen=True)
class KeyForm:
    """A compiled pattern, which matches whole keys.

    Attributes:
        pieces: Pieces of the pattern in their order.
    """

    pieces: tuple[FormPiece, ...]

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """A regular expression that matches the same keys."""
        return re.compile(expression_of(self.pieces))

    @cached_property
    def quick(self) -> tuple[int, ...]:
        """Maximum lengths of keys that `expression` matches quickly, by the number of dots in a key.

        The last item is the maximum for keys whose number of dots isn't known, or is larger.
        """
        lengths = range(_LONGEST)
        usual = (partial(self._ways, dots) for dots in range(_USUAL_DOTS))
        more = partial(bisect_right, lengths, _MOST_WAYS, key=lambda length: self._ways(length // 2, length))
        return *(bisect_right(lengths, _MOST_WAYS, key=ways) - 1 for ways in usual), more() - 1

    @cached_property
    def _counts(self) -> tuple[int, int]:
        pieces = list(self.pieces)
        for piece in pieces:  # the list grows meanwhile
            pieces += [inner for choice in piece.choices for inner in choice]
        by_parts, by_characters = (sum(one.kind in kinds for one in pieces) for kinds in (_BY_PARTS, _BY_CHARACTERS))
        return by_parts, by_characters

    def _ways(self, dots: int, length: int) -> int:
        """Return an upper bound of the number of ways to divide a key of this length and number of dots into pieces."""
        by_parts, by_characters = self._counts
        return comb(dots + 1 + by_parts, by_parts) * comb(length + by_characters, by_characters)

    def match(self, key: str) -> tuple[str, ...] | None:
        """Match a key; return the text of each piece that isn't literal, or None if the key does not match.

        Examples:
            >>> form = KeyForm((FormPiece("parts before"), text_piece("layers."), FormPiece("number")))
            >>> form.match("model.layers.7"), form.match("model.layers.07")
            (('model.', '7'), None)
        """
        if is_quick(key, self.quick):
            match = self.expression.fullmatch(key)
            return None if match is None else match.groups()
        return match_in_order(self.pieces, key)


def is_quick(key: str, lengths: Sequence[int]) -> bool:
    """Return whether a key is short enough to be matched by a regular expression.

    Args:
        key: Key to match.
        lengths: Maximum lengths by number of dots, from `KeyForm.quick` of the pattern. For several patterns, item n is
            the minimum of all patterns' items n.
    """
    if len(key) <= lengths[-1]:
        return True
    dots = key.count(".")
    return dots < _USUAL_DOTS and len(key) <= lengths[dots]


# Matching in time proportional to the key's length times the pattern's. A set of positions in a key is an integer:
# bit r is the position before the last r characters. One addition then reaches all positions of a run of characters,
# since its carry goes through the run.


def match_in_order(pieces: Sequence[FormPiece], key: str) -> tuple[str, ...] | None:
    """Return the same result as `KeyForm.match` in bounded time, without a regular expression.

    Examples:
        >>> match_in_order((FormPiece("parts before"), text_piece("x"), FormPiece("parts after")), "x.x.x")
        ('x.x.', '')
    """
    text = _Text(key)
    places = _places(pieces, 1, text)
    if not places[0] >> len(key) & 1:
        return None
    return tuple(_walk(pieces, places, 0, text)[1])


class _Text:
    """A key, with methods for bit sets of positions in it.

    A bit set is an integer, in which bit r stands for the position before the last r characters.
    """

    def __init__(self, key: str) -> None:
        self.key, self.length = key, len(key)
        self.all = (1 << self.length) - 1
        self.dots = self.before(".") >> 1
        self.others = self.all & ~self.dots
        self.no_empty_part = self.all & ~(self.dots & self.dots << 1)

    def before(self, text: str) -> int:
        """Return the positions at which a text begins in the key, as a bit set."""
        bits, at = bytearray(self.length // 8 + 1), self.key.find(text)
        while at >= 0:
            place = self.length - at
            bits[place >> 3] |= 1 << (place & 7)
            at = self.key.find(text, at + 1)
        return int.from_bytes(bits, "little")

    def of(self, characters: str) -> int:
        """Return the positions in the key that directly follow one of the given characters, as a bit set."""
        return sum(self.before(character) for character in characters) >> 1

    def last(self, places: int, first: int, end: int) -> int:
        """Return the greatest position above `first` and up to `end` in a bit set; `first` if there is none.

        Args:
            places: Bit set of positions in the key.
            first: Lower bound, excluded.
            end: Upper bound, included.
        """
        there = places >> (self.length - end)
        place = end - ((there & -there).bit_length() - 1)
        return place if there and place > first else first


def _flood(places: int, characters: int) -> int:
    """Return a bit set of positions, extended to the left over runs of certain characters.

    A position is added if only these characters lie between it and a later position of the set.

    Args:
        places: Bit set of positions in a key, as `_Text` describes it.
        characters: Bit set of the positions that directly follow these characters, as `_Text.of` returns it.
    """
    return places | ((places & characters) + characters ^ characters)


_Back = Callable[[int, _Text], int]
"""A function that returns the positions at which a piece and all after it match, from those for the pieces after it."""

_BACK: dict[str, _Back] = {
    "part": lambda after, text: _flood((after & text.others) << 1, text.others),
    "characters": lambda after, text: _flood(after, text.others),
    "anything": lambda after, text: _all_before(after, text),
    "parts before": lambda after, text: after | _flood((after & text.dots) << 1, text.no_empty_part) & text.others << 1,
    "parts after": lambda after, text: after | _flood((after & text.others) << 1, text.no_empty_part) & text.dots << 1,
    "number": lambda after, text: _back_number(after, text),
    "rest": lambda after, text: _all_before(after << 1, text),
    "rest without number": lambda after, text: _all_before(after << 1, text) & ~_numbers(text),
}


def _all_before(places: int, text: _Text) -> int:
    return ((1 << text.length + 1) - (places & -places)) if places else 0


def _back_number(after: int, text: _Text) -> int:
    zero, others = text.of("0"), text.of("123456789")
    digits = zero | others
    return _flood((after & digits) << 1, digits) & others << 1 | (after & zero) << 1


def _numbers(text: _Text) -> int:
    """Return the positions in a key that are followed by one or more digits, and then by a dot or the end.

    The result is a bit set. A line break at the end counts as the end, as it does for ``$`` in regular expressions.
    """
    digits, ends = text.of("0123456789"), text.dots << 1 | 1 | (2 if text.key.endswith("\n") else 0)
    return _flood((ends & digits) << 1, digits)


def _places(pieces: Sequence[FormPiece], end: int, text: _Text) -> list[int]:
    """Return, for each piece of a pattern, the positions in the key at which it and all pieces after it match.

    Args:
        pieces: Pieces to match.
        end: Positions at which the last piece may end, as a bit set.
        text: The key.

    Returns:
        A bit set of positions for each piece, and finally `end`.
    """
    places = [end]
    for piece in reversed(pieces):
        if piece.kind == "text":
            places.append(places[-1] << len(piece.text) & text.before(piece.text))
        elif piece.choices:
            firsts = (_places(choice, places[-1], text)[0] for choice in piece.choices)
            places.append(reduce(or_, firsts))
        else:
            places.append(_BACK[piece.kind](places[-1], text))
    return places[::-1]


def _walk(pieces: Sequence[FormPiece], places: Sequence[int], at: int, text: _Text) -> tuple[int, list[str]]:
    """Return the index at which a match of pieces ends, and the text of each piece that isn't literal.

    The pieces are known to match.

    Args:
        pieces: Pieces to match.
        places: Result of `_places` for these pieces.
        at: Index at which the match begins.
        text: The key.
    """
    parts = []
    for piece, after in zip(pieces, places[1:], strict=True):
        first = at
        if piece.kind == "text":
            at += len(piece.text)
            continue
        if piece.choices:
            ways = ((choice, _places(choice, after, text)) for choice in piece.choices)
            choice, inner_places = next(way for way in ways if way[1][0] >> (text.length - at) & 1)
            at, _ = _walk(choice, inner_places, at, text)
        else:
            at = _end(piece.kind, after, at, text)
        parts.append(text.key[first:at])
    return at, parts


def _end(kind: str, after: int, at: int, text: _Text) -> int:
    """Return the last index in the key at which a piece of a pattern can end, so that the pieces after it match.

    Args:
        kind: Kind of the piece, as in `FormPiece`.
        after: Bit set of the positions at which the pieces after it match.
        at: Index at which the piece begins.
        text: The key.
    """
    key, length = text.key, text.length
    end = length
    if kind in ("part", "characters"):
        end = key.find(".", at)
    elif kind == "parts before":
        end, after = key.find("..", at) + 1 or -1, 0 if key[at : at + 1] == "." else after & text.dots
    elif kind == "parts after":
        end, after = key.find("..", at), after & text.others if key[at : at + 1] == "." else 0
    elif kind == "number":
        end = next(_NOT_DIGIT.finditer(key, at)).start()
    return text.last(after, at, length if end < 0 else end)


_NOT_DIGIT = re.compile(r"(?![0-9])")
