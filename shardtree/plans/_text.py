"""Plans as text: numbers, tables, and stored names that look like a missing one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from re import findall

from ..trees import key_matcher

# Numbers and tables.


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


# Suggestions for a mistyped name.

_KEYS = 10
_CLOSE = 10
_COMPARED_ALL = 500
_NEIGHBOURS = 100
_LONGEST = 300


def near_names(keys: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Return, for each of the first ten keys that has one, the name that looks most like it.

    Comparing with each of a million names would take minutes. Of many names only those are looked at that begin or end
    as the key does.

    Args:
        keys: that aren't among the names.
        names: what there is.

    Examples:
        >>> near_names(["decoder.wieght", "x"], ["decoder.weight", "decoder.bias"])
        {'decoder.wieght': 'decoder.weight'}
    """
    # Names come from files, and the time of a comparison grows with the product of both lengths: a guard against
    # names of megabytes.
    few = [key for key in islice(keys, _KEYS) if len(key) <= _LONGEST]
    if not few:
        return {}
    known = sorted(name for name in names if len(name) <= _LONGEST)
    # Sorted by their ends as well: a typing error near the beginning would hide the name from a search by prefix alone.
    backwards = sorted(name[::-1] for name in known) if len(known) > _COMPARED_ALL else []
    near = {key: get_close_matches(key, _candidates(key, known, backwards), n=_CLOSE) for key in few}
    # The closest name with the key's own numbers, so that no layer is taken for another; else the closest.
    return {
        key: next((name for name in close if _numbers(name) == _numbers(key)), close[0])
        for key, close in near.items()
        if close
    }


def near_patterns(patterns: Iterable[str], keys: Collection[str], *, widen: bool = True) -> list[str]:
    """Return patterns that fit no key, quoted, each with what may be meant: other stars, other letters, or a key.

    Args:
        patterns: that fit nothing.
        keys: what there is.
        widen: whether stars across dots may be meant; not where what fits is lost, and they may fit far more.

    Examples:
        >>> for line in near_patterns(["*.weight", "**.wieght", "h.bais", "x"], ["h.0.weight", "h.bias"]):
        ...     print(line)
        '*.weight' (did you mean '**.weight'?)
        '**.wieght' (did you mean '**.weight'?)
        'h.bais' (did you mean 'h.bias'?)
        'x'
    """
    listed = list(patterns)
    near = near_names(listed, keys)
    parts = {part for key in keys if "*" in "".join(listed) for part in key.split(".")}
    meant = {one: _nearly(one, keys, parts, widen) or near.get(one) for one in listed[:_KEYS]}
    return [repr(one) + (f" (did you mean {meant[one]!r}?)" if meant.get(one) else "") for one in listed]


def _nearly(pattern: str, keys: Collection[str], parts: Collection[str], widen: bool) -> str | None:
    """Return a pattern that fits keys: each part as one that there is, or with stars across dots too."""
    own = [part for part in pattern.split(".") if "*" not in part and part not in parts]
    near = near_names(own, parts) if "*" in pattern else {}
    spelled = ".".join(near.get(part, part) for part in pattern.split("."))
    wider = [spelled.replace("**", "*").replace("*", "**")] if widen else []
    return next((each for each in [spelled, *wider] if "*" in each and any(map(key_matcher([each]), keys))), None)


def differing_prefix(keys: Sequence[str], names: Collection[str]) -> tuple[str, str] | None:
    """Return the one prefix by which several keys differ from names: a prefix to remove, and one to add.

    Args:
        keys: that aren't among the names.
        names: what there is.

    Returns:
        ``(too much, lacking)``, of which one is empty; None if there is no such prefix, or only one key.

    Examples:
        >>> differing_prefix(["module.w", "module.b"], ["w", "b", "step"])
        ('module.', '')
        >>> differing_prefix(["w", "b"], ["model.w", "model.b"])
        ('', 'model.')
    """
    if len(keys) < 2 or not names:
        return None
    known = names if isinstance(names, (set, frozenset, dict)) else frozenset(names)
    longest = max(keys, key=len)  # the fewest names end in it
    # Candidates come from a single key, and only those are tried on the others: with millions of names, comparing each
    # key with each name would take minutes.
    too_much = (longest[:end] for end in range(1, len(longest)) if longest[end:] in known)
    found = next((text for text in too_much if all(_without(key, text) in known for key in keys)), None)
    if found is not None:
        return found, ""
    lacking = sorted(name.removesuffix(longest) for name in known if name.endswith(longest))
    found = next((text for text in lacking if all(text + key in known for key in keys)), None)
    return None if found is None else ("", found)


def _without(key: str, prefix: str) -> str | None:
    return key[len(prefix) :] if key.startswith(prefix) else None


def _numbers(name: str) -> list[str]:
    return [number.lstrip("0") for number in findall("[0-9]+", name)]


def _candidates(key: str, known: Sequence[str], backwards: Sequence[str]) -> Sequence[str]:
    if len(known) <= _COMPARED_ALL:
        return known
    return [*_neighbours(key, known), *(name[::-1] for name in _neighbours(key[::-1], backwards))]


def _neighbours(key: str, ordered: Sequence[str]) -> Sequence[str]:
    at = bisect_left(ordered, key)
    return ordered[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
