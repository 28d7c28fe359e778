"""Stored names that look like one that isn't stored: what a typing error was meant to be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from itertools import islice

_KEYS = 10
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
    few = [key for key in islice(keys, _KEYS) if len(key) <= _LONGEST]
    if not few:
        return {}
    known = sorted(name for name in names if len(name) <= _LONGEST)
    backwards = sorted(name[::-1] for name in known) if len(known) > _COMPARED_ALL else []
    near = {key: get_close_matches(key, _candidates(key, known, backwards), n=1) for key in few}
    return {key: names[0] for key, names in near.items() if names}


def _candidates(key: str, known: Sequence[str], backwards: Sequence[str]) -> Sequence[str]:
    if len(known) <= _COMPARED_ALL:
        return known
    return [*_neighbours(key, known), *(name[::-1] for name in _neighbours(key[::-1], backwards))]


def _neighbours(key: str, ordered: Sequence[str]) -> Sequence[str]:
    at = bisect_left(ordered, key)
    return ordered[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
