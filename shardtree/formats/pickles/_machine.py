"""The reader of pickles: Python's own, changed to import nothing and to call only listed constructors, within limits.

A few bytes can make a tuple that contains another tuple twice, which contains another one twice, and so on. Such a
tuple takes little memory, but hashing it, or copying it without sharing, takes endless time and memory. The reader
refuses it.
"""

from __future__ import annotations

import gc
import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

from ...errors import UnsafeFile, error_text


@dataclass(frozen=True, slots=True, eq=False)
class Constructor:
    r"""Functions that a reader calls instead of a class or function that a pickle names.

    Attributes:
        make: Function that returns the value, called with the pickle's arguments, of any types. An exception means that
            the file is corrupt.
        build: Function that fills the value in place, called at most once with the value and the pickle's state. If it
            is None, a pickle with a state is refused.
        keys: Function from the arguments of `make` to the values that `make` will hash. The cost of hashing them is
            checked before `make` is called.

    Examples:
        >>> from shardtree.formats.pickles import read_pickle
        >>> data = b"cbuiltins\ncomplex\n(F1\nF2\ntR."
        >>> read_pickle(data, {("builtins", "complex"): Constructor(complex)}, what="example")
        (1+2j)
    """

    make: Callable[..., Any]
    build: Callable[[Any, Any], None] | None = None
    keys: Callable[..., Iterable[Any]] | None = None


@dataclass(slots=True, eq=False)
class Stub:
    """An object of a class that isn't imported. It is compared and hashed by identity.

    Attributes:
        type_name: Module and qualified name of its class.
        args: Arguments of its constructor.
        state: State in the pickle; None if the pickle has none.
    """

    type_name: str
    args: tuple[Any, ...] = ()
    state: Any = None


def inert(type_name: str) -> Constructor:
    """Return a constructor that makes stubs of a class.

    Args:
        type_name: Module and qualified name of the class.

    Examples:
        >>> inert("datetime.date").make(2025, 12, 31)
        Stub(type_name='datetime.date', args=(2025, 12, 31), state=None)
    """

    def make(*args: Any) -> Stub:
        return Stub(type_name, args)

    return Constructor(make, _fill)


def _fill(stub: Stub, state: Any) -> None:
    stub.state = state


DEEPEST = 250
"""Upper bound of the depth of nested containers; our own writers stop at 100."""

_LEAST_NODES = 1_000_000
_TIMES_LENGTH = 8
_COLLISIONS = 1_000
_MOST_AT_ONCE = 1_000_000
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, type})
_PLAIN = frozenset({dict, list, tuple, set, frozenset, Stub})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_SIZED_TYPES = frozenset({*_CONTAINERS, str, bytes, bytearray})


class _Guard:
    """Limits of the work that a pickle causes beyond reading its bytes.

    Such work is the hashing of keys, and calls of constructors with arguments that the pickle refers to repeatedly.
    """

    __slots__ = ("_budget", "_collisions", "_first")

    def __init__(self, length: int) -> None:
        self._budget = max(_LEAST_NODES, _TIMES_LENGTH * length)
        self._first: dict[int, Any] = {}
        self._collisions = 0

    def charge(self, arguments: Iterable[Any]) -> None:
        """Count the items in a call's arguments; raise ValueError if all calls together may copy too many."""
        left = self._budget - 1
        for value in arguments:
            if type(value) in _SIZED_TYPES:
                left -= len(value)
        self._budget = left
        if left < 0:
            raise ValueError("it copies the same values too often")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raise ValueError if keys would take too long to hash, or too many have the same hash."""
        for key in keys:
            kind: Any = type(key)
            # A file can't choose hashes of strings, which depend on a random seed, nor of objects, which depend on
            # their addresses.
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
        # Hashes of numbers are predictable: a file can choose keys that collide, and make each look-up a search.
        self._collisions += 1
        if self._collisions > _COLLISIONS:
            raise ValueError("too many different keys have the same hash")


def _hashed_size(key: Any, most: int) -> int:
    """Return the approximate number of values in a key; raise ValueError if over `most`, or the key is too deep."""
    # The nodes are counted by levels: hash() of nested tuples recurses in C without a limit, and overflows the stack.
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
    """Return the members of a value: its items, its keys and values, or its attributes.

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
        items: Collection[Any] = value
        return items
    attributes = [getattr(value, name) for name in _slots(kind) if hasattr(value, name)]
    return [*attributes, *getattr(value, "__dict__", {}).values()]


@lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    groups = [cls.__dict__.get("__slots__", ()) for cls in kind.__mro__]
    return tuple(name for group in groups for name in ([group] if isinstance(group, str) else group))


def check_bounded(value: Any, length: int, helpers: frozenset[type] = frozenset()) -> None:
    """Raise if a value has a cycle, is too deep, or would be too large for its pickle if nothing were shared.

    Args:
        value: Value of a pickle.
        length: Length of the pickle in bytes.
        helpers: Types that may be arguments of constructors, but not part of the value.

    Raises:
        ValueError: The value has one of these faults, which the text names.

    Examples:
        >>> pair = [1, 2]
        >>> check_bounded([pair, pair], 10)
        >>> pair.append(pair)
        >>> check_bounded(pair, 10)
        Traceback (most recent call last):
        ...
        ValueError: containers nested more than 250 deep, or one that contains itself
    """
    # The walk doesn't mark visited values: shared values count each time, as they cost each later walk.
    left = max(_LEAST_NODES, _TIMES_LENGTH * length)
    helpers |= {Constructor}
    todo = [([value], 0)]
    while todo:
        batch, depth = todo.pop()
        if depth > DEEPEST:
            raise ValueError(f"containers nested more than {DEEPEST} deep, or one that contains itself")
        kinds = set(map(type, batch))
        if kinds & helpers:
            raise ValueError("a class, a function or a storage in place of a value")
        size = _size(batch, kinds)
        if size > left:
            raise ValueError("too many values in it, counting shared ones each time")
        # The batch is halved: the contents of a whole level could take more memory than the value itself.
        if size > _MOST_AT_ONCE and len(batch) > 1:
            middle = len(batch) // 2
            todo += [(batch[:middle], depth), (batch[middle:], depth)]
            continue
        left -= size
        parts = _batch_contents(batch, kinds)
        leaves = {kind for kind in set(map(type, parts)) if _is_leaf(kind)}
        inner = [part for part in parts if type(part) not in leaves]
        if inner:
            todo.append((inner, depth + 1))


def _size(batch: list[Any], kinds: set[type]) -> int:
    """Return the approximate number of values in a batch and in its containers; `kinds` are the types in it."""
    containers = {kind for kind in kinds if issubclass(kind, _CONTAINERS)}
    return len(batch) + sum([len(value) for value in batch if type(value) in containers])


def _is_leaf(kind: type) -> bool:
    # A class or a member of an enum isn't entered, since it refers to its whole module.
    return kind in _ATOMS or issubclass(kind, (type, Enum))


def _batch_contents(batch: list[Any], kinds: set[type]) -> list[Any]:
    """Return the direct members of all values of a batch, in one list; `kinds` are the types in it."""
    if kinds <= _PLAIN:
        return gc.get_referents(*batch)  # For these types it returns the same as `contents`, ten times as fast.
    plain = [value for value in batch if type(value) in _PLAIN]
    others = [part for value in batch if type(value) not in _PLAIN for part in contents(value)]
    return gc.get_referents(*plain) + others


class Run:
    """A placeholder, on the stack or in a list or dict, for consecutive values that a scan has put into columns.

    In a dict, a run is both key and value, and stands for `last` - `first` pairs.

    Attributes:
        first: Row of the first value in the scan's columns.
        last: One past the row of the last value.
    """

    __slots__ = ("first", "last")

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last


class Irregular(ValueError):
    """A pickle isn't repetitive enough for a scan, and must be read without one."""


class _Memo(dict[int, Any]):
    """The memo of a pickle: values by memo number. A `Scan`, which reads repetitive parts, keeps its values itself.

    Attributes:
        taken: Count of memo numbers that the scan's values take up.
        find: Function that returns one of the scan's values by its memo number; raises KeyError if it wasn't kept.
    """

    __slots__ = ("find", "taken")

    def __init__(self, find: Callable[[int], Any] | None) -> None:
        super().__init__()
        self.taken = 0
        self.find = find

    def __missing__(self, number: int) -> Any:
        if self.find is None:
            raise KeyError(number)
        return self.find(number)


class Scan(Protocol):
    """A function that reads the regular, repeating parts of a pickle straight from its bytes, many values at a time.

    It is called after each opcode BUILD, with the position of the next opcode, and returns the position after the
    values that it read. It pushes a `Run`, their placeholder, and adds their number of memo entries to
    `machine.memo.taken`.
    """

    def __call__(self, machine: Machine, at: int) -> int: ...

    def find(self, number: int) -> Any:
        """Return a value that the scan read, by its memo number."""
        ...


FIX = "Only LoadOptions(allow_pickle=True) reads it, and runs any code in it: use it only if you trust the file."

_LONGEST_LINE = 10_000


class Machine(pickle._Unpickler):
    """The pure-Python unpickler of `pickle`, changed so that a file can't run code or use unbounded resources.

    The unpickler in C can't be used: twenty bytes can make it allocate 64 GB, or hash nested tuples for ever, even if
    `find_class` forbids all classes. This one reads a few million opcodes a second. Its handlers are listed one by one
    in `_read`, so that opcodes of a newer Python are unknown to it.

    Attributes:
        data: Bytes of the pickle.
        file: The same bytes as a file.
        stack: Values that were pushed since the last mark.
        metastack: Stacks below `stack`, one for each mark.
        memo: Values by their memo numbers.
        scan: Function that reads repetitive parts of the pickle, many values at a time; or None.
        constructions: Constructor and value by the value's id, for values whose state may follow (opcode BUILD). The
            value is kept so that its id isn't reused.
        guard: Limits of the work.
    """

    memo: _Memo

    def __init__(
        self,
        data: bytes,
        classes: Mapping[tuple[str, str], Any],
        what: str,
        find_outside: Callable[[Any], Any] | None,
        fix: str,
        scan: Scan | None = None,
    ) -> None:
        # A length that the pickle announces is never allocated: the file returns the bytes left, and no opcode follows.
        self.file = io.BytesIO(data)
        super().__init__(self.file)
        self.read = self.file.read
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.metastack: list[list[Any]] = []
        self.memo = _Memo(None if scan is None else scan.find)
        self.constructions: dict[int, tuple[Constructor, Any]] = {}
        self.guard = _Guard(len(data))
        self.data, self.classes, self.what, self.find_outside = data, classes, what, find_outside
        self.fix, self.scan = fix, scan

    def pop_mark(self) -> list[Any]:
        """Pop the last mark, and return the values that were pushed since."""
        items, self.stack = self.stack, self.metastack.pop()
        self.append = self.stack.append
        return items

    def readline(self) -> bytes:
        """Return the bytes up to the end of a line."""
        line = self.file.readline(_LONGEST_LINE)
        if line[-1:] != b"\n":
            raise ValueError("a line without an end")
        return line

    def find_class(self, module: str, name: str) -> Any:
        """Return the constructor or value that is listed for a class or function; names of Python 2 mean today's."""
        # torch.save writes protocol 2, where pickle itself calls int `__builtin__.long`.
        today = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
        for place in ((module, name), today):
            with suppress(KeyError):
                return self.classes[place]
        wrong = f"names {module[:100]}.{name[:100]}, which is not known to be harmless"
        raise self.unsafe(wrong)

    def persistent_load(self, pid: Any) -> Any:
        """Return the value of a persistent id; raise UnsafeFile if the caller gave no function for it."""
        if self.find_outside is None:
            raise self.unsafe("refers to something outside of itself")
        return self.find_outside(pid)

    def _decode_string(self, value: bytes) -> str | bytes:
        # A string of Python 2 may be text or bytes; it is taken as text if it is UTF-8.
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError:
            return value

    def unsafe(self, wrong: str) -> UnsafeFile:
        """Return the error for a pickle that contains more than data; `wrong` is a verb phrase like "calls a list"."""
        return UnsafeFile(error_text(f"{self.what}: it {wrong} (before byte {self.file.tell()})", fix=self.fix))
