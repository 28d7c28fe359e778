"""Bounds on what a pickle makes: how much a key hashes, and how large and deep a value is when nothing in it is shared.

A few bytes can make a tuple that holds another one twice, which holds another one twice. It takes little memory, but
hashing it, or copying it without its sharing, takes time and memory without end.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

from ._constructor import Constructor, Stub

DEEPEST = 250
"""Containers in containers; our own writers stop at 100."""

_LEAST_NODES = 1_000_000
_TIMES_LENGTH = 8
_COLLISIONS = 1_000
_MOST_AT_ONCE = 1_000_000
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, type})
_PLAIN = frozenset({dict, list, tuple, set, frozenset, Stub})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SIZED = frozenset({*_CONTAINERS, str, bytes, bytearray})


class Guard:
    """Counts the work that one pickle asks for beyond its own length, and refuses what would take too long.

    That is hashing keys, and calling constructors with arguments that are referred to again and again.
    """

    __slots__ = ("_collisions", "_first", "_left")

    def __init__(self, length: int) -> None:
        self._left = max(_LEAST_NODES, _TIMES_LENGTH * length)
        self._first: dict[int, Any] = {}
        self._collisions = 0

    def spend(self, arguments: Iterable[Any]) -> None:
        """Raise ValueError if what was copied so far, with these arguments, is too much."""
        left = self._left - 1
        for value in arguments:
            if type(value) in _SIZED:
                left -= len(value)
        self._left = left
        if left < 0:
            raise ValueError("it copies the same values too often")

    def admit(self, keys: Iterable[Any]) -> None:
        """Raise ValueError unless all keys can be hashed quickly, and don't all have the same hash."""
        for key in keys:
            kind: Any = type(key)
            if kind is str or kind.__hash__ is object.__hash__:
                continue
            self._left -= _hashed_size(key, self._left)
            if self._left < 0:
                raise ValueError("keys that take too long to hash")
            self._compare(key)

    def _compare(self, key: Any) -> None:
        first = self._first.setdefault(hash(key), key)
        if first is key or first == key:
            return
        # Hashes of numbers are known beforehand: a file can choose keys that make each look-up a search.
        self._collisions += 1
        if self._collisions > _COLLISIONS:
            raise ValueError("too many different keys have the same hash")


def _hashed_size(key: Any, most: int) -> int:
    """Return how many nodes a key has, and its depth is bounded too: hashing recurses without a limit."""
    size, level = 0, [key]
    for _ in range(DEEPEST):
        size += len(level) + sum(item.bit_length() >> 9 for item in level if type(item) is int)
        below: list[Any] = []
        for item in level:
            below.extend(parts(item))
            if size + len(below) > most:
                raise ValueError("a key that takes too long to hash")
        if not below:
            return size
        level = below
    raise ValueError(f"a key more than {DEEPEST} deep")


def parts(value: Any) -> Collection[Any]:
    """Return what a value holds: items, keys and values, attributes.

    Examples:
        >>> list(parts({"a": [1]}))
        ['a', [1]]
    """
    kind: Any = type(value)
    if _is_leaf(kind):
        return ()
    if issubclass(kind, dict):
        return [*value, *value.values()]
    if issubclass(kind, _CONTAINERS):
        held: Collection[Any] = value
        return held
    found = [getattr(value, name) for name in _slots(kind) if hasattr(value, name)]
    return [*found, *getattr(value, "__dict__", {}).values()]


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    groups = [cls.__dict__.get("__slots__", ()) for cls in kind.__mro__]
    return tuple(name for group in groups for name in ([group] if isinstance(group, str) else group))


def check_bounded(value: Any, length: int, refused: frozenset[type] = frozenset()) -> None:
    """Raise unless a value has no cycle, and isn't too deep, or too large without its sharing.

    Args:
        value: what a pickle made.
        length: the pickle's, in bytes.
        refused: types of what stands for something in a pickle and is no value.

    Raises:
        ValueError: it is; says which.

    Examples:
        >>> pair = [1, 2]
        >>> check_bounded([pair, pair], 10)
        >>> pair.append(pair)
        >>> check_bounded(pair, 10)
        Traceback (most recent call last):
        ...
        ValueError: containers in containers, more than 250 deep, or one that contains itself
    """
    # Nothing remembers where this walk was, so it meets what is shared as often as it stands somewhere.
    left = max(_LEAST_NODES, _TIMES_LENGTH * length)
    refused |= {Constructor}
    todo = [([value], 0)]
    while todo:
        batch, depth = todo.pop()
        if depth > DEEPEST:
            raise ValueError(f"containers in containers, more than {DEEPEST} deep, or one that contains itself")
        kinds = set(map(type, batch))
        if kinds & refused:
            raise ValueError("a class, a function or a storage stands where a value should")
        size = _size(batch, kinds)
        if size > left:
            raise ValueError("too many values in it without their sharing")
        if size > _MOST_AT_ONCE and len(batch) > 1:
            middle = len(batch) // 2
            todo += [(batch[:middle], depth), (batch[middle:], depth)]
            continue
        left -= size
        held = _held(batch, kinds)
        leaves = {kind for kind in set(map(type, held)) if _is_leaf(kind)}
        inner = [part for part in held if type(part) not in leaves]
        if inner:
            todo.append((inner, depth + 1))


def _size(batch: list[Any], kinds: set[type]) -> int:
    """Return how many values those of a batch hold, about."""
    sized = {kind for kind in kinds if issubclass(kind, _CONTAINERS)}
    return len(batch) + sum([len(value) for value in batch if type(value) in sized])


def _is_leaf(kind: type) -> bool:
    # A class, or a member of an enum, leads to the whole of its module.
    return kind in _ATOMS or issubclass(kind, (type, Enum))


def _held(batch: list[Any], kinds: set[type]) -> list[Any]:
    """Return what the values of a batch hold, one after the other."""
    if kinds <= _PLAIN:
        return gc.get_referents(*batch)  # the parts of each, and ten times as fast
    plain = [value for value in batch if type(value) in _PLAIN]
    others = [part for value in batch if type(value) not in _PLAIN for part in parts(value)]
    return gc.get_referents(*plain) + others
