"""Limits on the work that a pickle causes: how much is hashed, and how large and deep a value is without sharing.

A few bytes can make a tuple that contains another one twice, which contains another one twice, and so on. It takes
little memory, but hashing it, or copying it without its sharing, takes endless time and memory.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

from ._constructors import Constructor, Stub

DEEPEST = 250
"""How deep containers may be nested; our own writers stop at 100."""

_LEAST_NODES = 1_000_000
_TIMES_LENGTH = 8
_COLLISIONS = 1_000
_MOST_AT_ONCE = 1_000_000
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, type})
_PLAIN = frozenset({dict, list, tuple, set, frozenset, Stub})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SIZED = frozenset({*_CONTAINERS, str, bytes, bytearray})


class Guard:
    """Limits the work that a pickle causes beyond its own length.

    This is hashing keys, and calling constructors with arguments that the pickle refers to again and again.
    """

    __slots__ = ("_budget", "_collisions", "_first")

    def __init__(self, length: int) -> None:
        self._budget = max(_LEAST_NODES, _TIMES_LENGTH * length)
        self._first: dict[int, Any] = {}
        self._collisions = 0

    def charge(self, arguments: Iterable[Any]) -> None:
        """Charge for the arguments of a call; raise ValueError if too much was copied by all calls together."""
        left = self._budget - 1
        for value in arguments:
            if type(value) in _SIZED:
                left -= len(value)
        self._budget = left
        if left < 0:
            raise ValueError("it copies the same values too often")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raise ValueError if keys would take too long to hash, or too many have the same hash."""
        for key in keys:
            kind: Any = type(key)
            # Hashes of strings depend on a random seed, and those of objects on their addresses: no file can choose
            # them.
            if kind is str or kind.__hash__ is object.__hash__:
                continue
            self._budget -= _hashed_size(key, self._budget)
            if self._budget < 0:
                raise ValueError("keys that take too long to hash")
            self._compare(key)

    def _compare(self, key: Any) -> None:
        first = self._first.setdefault(hash(key), key)
        if first is key or first == key:
            return
        # Hashes of numbers are predictable: a file can choose keys that collide, so that each look-up is a search.
        self._collisions += 1
        if self._collisions > _COLLISIONS:
            raise ValueError("too many different keys have the same hash")


def _hashed_size(key: Any, most: int) -> int:
    """Return how many nodes a key has; raise ValueError if they are too many or it is too deep."""
    # By levels rather than by recursion: hash() of nested tuples recurses in C without a limit, and overflows the
    # stack.
    size, level = 0, [key]
    for _ in range(DEEPEST):
        size += len(level) + sum(item.bit_length() >> 9 for item in level if type(item) is int)
        below: list[Any] = []
        for item in level:
            below.extend(contents(item))
            if size + len(below) > most:
                raise ValueError("a key that takes too long to hash")
        if not below:
            return size
        level = below
    raise ValueError(f"a key more than {DEEPEST} deep")


def contents(value: Any) -> Collection[Any]:
    """Return what a value contains: items, keys and values, attributes.

    Examples:
        >>> list(contents({"a": [1]}))
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
    """Raise if a value has a cycle, is too deep, or would be too large without sharing.

    Args:
        value: what a pickle made.
        length: of the pickle, in bytes.
        refused: types of helper objects that may be arguments of constructors, but not part of the value.

    Raises:
        ValueError: it is; says which.

    Examples:
        >>> pair = [1, 2]
        >>> check_bounded([pair, pair], 10)
        >>> pair.append(pair)
        >>> check_bounded(pair, 10)
        Traceback (most recent call last):
        ...
        ValueError: containers nested more than 250 deep, or one that contains itself
    """
    # The walk doesn't mark what it has visited: shared values count each time, as they would cost each later walk.
    left = max(_LEAST_NODES, _TIMES_LENGTH * length)
    refused |= {Constructor}
    todo = [([value], 0)]
    while todo:
        batch, depth = todo.pop()
        if depth > DEEPEST:
            raise ValueError(f"containers nested more than {DEEPEST} deep, or one that contains itself")
        kinds = set(map(type, batch))
        if kinds & refused:
            raise ValueError("a class, a function or a storage in place of a value")
        size = _size(batch, kinds)
        if size > left:
            raise ValueError("too many values in it, counting shared ones each time")
        # In halves: the contents of a whole level at once could take more memory than the value itself.
        if size > _MOST_AT_ONCE and len(batch) > 1:
            middle = len(batch) // 2
            todo += [(batch[:middle], depth), (batch[middle:], depth)]
            continue
        left -= size
        held = _batch_contents(batch, kinds)
        leaves = {kind for kind in set(map(type, held)) if _is_leaf(kind)}
        inner = [part for part in held if type(part) not in leaves]
        if inner:
            todo.append((inner, depth + 1))


def _size(batch: list[Any], kinds: set[type]) -> int:
    """Return about how many values those of a batch contain."""
    sized = {kind for kind in kinds if issubclass(kind, _CONTAINERS)}
    return len(batch) + sum([len(value) for value in batch if type(value) in sized])


def _is_leaf(kind: type) -> bool:
    # Not entered: a class, or a member of an enum, refers to its whole module.
    return kind in _ATOMS or issubclass(kind, (type, Enum))


def _batch_contents(batch: list[Any], kinds: set[type]) -> list[Any]:
    """Return what the values of a batch contain, one after the other."""
    if kinds <= _PLAIN:
        return gc.get_referents(*batch)  # for these types the same as `contents`, and ten times as fast
    plain = [value for value in batch if type(value) in _PLAIN]
    others = [part for value in batch if type(value) not in _PLAIN for part in contents(value)]
    return gc.get_referents(*plain) + others
