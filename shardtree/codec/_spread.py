"""Whether keys can be put in a dict or a set quickly, whoever chose them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_COLLISIONS = 1_000


def check_spread(keys: Iterable[Hashable]) -> None:
    """Raise ValueError where so many different keys have one hash that each look-up becomes a search.

    Hashes of numbers, and of tuples of them, are known beforehand: a file can choose keys that share one.

    Examples:
        >>> check_spread([1, 1.5, (2, "a")])
        >>> check_spread(number * (2**61 - 1) for number in range(2000))
        Traceback (most recent call last):
        ...
        ValueError: too many different keys have the same hash
    """
    first: dict[int, Hashable] = {}
    collisions = 0
    for key in keys:
        known = first.setdefault(hash(key), key)
        if known is not key and known != key:
            collisions += 1
            if collisions > _COLLISIONS:
                raise ValueError("too many different keys have the same hash")
