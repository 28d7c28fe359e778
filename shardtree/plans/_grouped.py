"""Items in groups of bounded size: what is done at once keeps to a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield items in groups, in order; a group is larger than that only if it is a single item.

    Args:
        items: any.
        nbytes: how large an item is.
        most_bytes: in a group.

    Examples:
        >>> list(grouped(["abc", "d", "e", "fghij"], len, 4))
        [['abc', 'd'], ['e'], ['fghij']]
    """
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group
