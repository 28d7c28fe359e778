"""What the machine has while it reads: bytes, stack, marks, memo; and what its handlers share."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from ...errors import UnsafeFile, error_text

# What a pickle may call: constructors that its reader lists, and stubs for what needn't be made at all.


@dataclass(frozen=True, slots=True, eq=False)
class Constructor:
    r"""What a name in a pickle stands for where the pickle may call it.

    Attributes:
        make: called with the pickle's arguments, whatever they are; returns the value. What it raises makes the file
            corrupt.
        build: called with the value and the pickle's state for it; changes the value in place. None: no state is
            accepted. It is called at most once for a value.
        keys: called with the arguments first; returns what `make` is going to hash.

    Examples:
        >>> from shardtree.codec import read_pickle
        >>> data = b"cbuiltins\ncomplex\n(F1\nF2\ntR."
        >>> read_pickle(data, {("builtins", "complex"): Constructor(complex)}, what="example")
        (1+2j)
    """

    make: Callable[..., Any]
    build: Callable[[Any, Any], None] | None = None
    keys: Callable[..., Iterable[Any]] | None = None


@dataclass(slots=True, eq=False)
class Stub:
    """An object of a class that wasn't imported: what the pickle says of it. Compared and hashed by identity.

    Attributes:
        type_name: module and qualified name of its class.
        args: what its constructor was to be called with.
        state: what it was to be filled with; None where the pickle has none.
    """

    type_name: str
    args: tuple[Any, ...] = ()
    state: Any = None


def inert(type_name: str) -> Constructor:
    """Return the constructor of stubs for one class.

    Args:
        type_name: module and qualified name of the class.

    Examples:
        >>> inert("datetime.date").make(2025, 12, 31)
        Stub(type_name='datetime.date', args=(2025, 12, 31), state=None)
    """

    def make(*args: Any) -> Stub:
        return Stub(type_name, args)

    return Constructor(make, _fill)


def _fill(stub: Stub, state: Any) -> None:
    stub.state = state


# Bounds on what a pickle makes: how much a key hashes, and how large and deep a value is when nothing in it is shared.
#
# A few bytes can make a tuple that holds another one twice, which holds another one twice. It takes little memory, but
# hashing it, or copying it without its sharing, takes time and memory without end.

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


FIX = "allow_pickle=True is the only way to read it, and runs whatever code it brings; only if you trust its writer."

_LONGEST_LINE = 10_000


class Machine:
    """The state of one reading.

    Attributes:
        data: the pickle.
        stack: what was pushed since the last mark.
        marks: the stacks that wait below it.
        memo: number -> value.
        made: id -> constructor and value, of values that may be built.
        guard: what was hashed so far.
    """

    __slots__ = ("classes", "data", "fix", "guard", "made", "marks", "memo", "persistent_load", "stack", "what")

    def __init__(
        self,
        data: bytes,
        classes: Mapping[tuple[str, str], Any],
        what: str,
        persistent_load: Callable[[Any], Any] | None,
        fix: str,
    ) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.made: dict[int, tuple[Constructor, Any]] = {}
        self.guard = Guard(len(data))
        self.classes = classes
        self.what = what
        self.persistent_load = persistent_load
        self.fix = fix

    def find(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        try:
            return self.classes[module, name]
        except KeyError:
            raise self.unsafe(
                f"names {module[:100]}.{name[:100]}, which is neither data nor known to be harmless"
            ) from None

    def unsafe(self, wrong: str) -> UnsafeFile:
        """Return the error for a pickle that asks for more than data."""
        return UnsafeFile(error_text(f"{self.what}: it {wrong}", fix=self.fix))

    def since_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and go back to below it."""
        items = self.stack
        self.stack = self.marks.pop()
        return items


Handler = Callable[[Machine, int], int]
"""Given the machine and the byte after the opcode; returns the byte of the next opcode."""


def take(machine: Machine, begin: int, length: int) -> bytes:
    """Return a stretch of the pickle; raises unless it is all there."""
    found = machine.data[begin : begin + length]
    if len(found) != length or length < 0:
        raise ValueError(f"{length} bytes are announced, {len(found)} are left")
    return found


def line(machine: Machine, begin: int) -> tuple[bytes, int]:
    """Return the bytes up to the end of a line, and the byte after it."""
    end = machine.data.find(b"\n", begin, begin + _LONGEST_LINE)
    if end < 0:
        raise ValueError("a line without an end")
    return machine.data[begin:end], end + 1


def unknown(machine: Machine, at: int) -> int:
    """Refuse an opcode that no protocol has."""
    raise ValueError(f"unknown opcode {machine.data[at - 1]:#04x}")
