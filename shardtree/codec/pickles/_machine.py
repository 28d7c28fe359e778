"""The machine that reads pickles: Python's own, without what imports; and what takes regular parts of one at a time."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...errors import UnsafeFile, error_text
from ._constructors import Constructor
from ._limits import Guard


class Run:
    """Stands on the stack, or in a list or dict, for consecutive values that a scan took as columns.

    A run in a dict is a key and its own value, for as many pairs.

    Attributes:
        first: number of the first value in the scan's columns.
        last: one past the last one's.
    """

    __slots__ = ("first", "last")

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last


class Irregular(ValueError):
    """A pickle isn't regular enough for a scan; reading it without one is right."""


class Memo(dict[int, Any]):
    """The values that a pickle numbered. Those that a scan took aren't kept here, but have their numbers.

    Attributes:
        taken: how many numbers belong to values that a scan took.
        find: returns such a value by its number; raises KeyError if it isn't kept.
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
    """Takes the regular parts of a pickle from its bytes, many values at a time.

    It is called after each object that is filled, with the position of the next opcode, and returns that of the opcode
    after what it took; a `Run` is on the stack then, and `machine.memo.taken` counts the numbers that went by.
    """

    def __call__(self, machine: Machine, at: int) -> int: ...

    def find(self, number: int) -> Any:
        """Return a value that was taken, by its number in the memo."""
        ...


FIX = "LoadOptions(allow_pickle=True) alone reads it, and runs whatever code it brings: only if you trust it."

_LONGEST_LINE = 10_000


class Machine(pickle._Unpickler):
    """Python's reader of pickles, in Python, which can't be made to run code, nor to take memory or time without end.

    Not pickle.Unpickler with find_class overridden: the machine in C can be made to allocate 64 GB by twenty bytes, and
    to hash nested tuples for ever, and forbidding classes doesn't change that. This one reads a few million opcodes a
    second. Its handlers are listed one by one where it is run, so that an opcode of a newer Python isn't among them.

    Attributes:
        data: the pickle.
        file: the same, as a file that is read.
        stack: what was pushed since the last mark.
        metastack: the stacks below it, one for each earlier mark.
        memo: number -> value.
        scan: takes regular parts; None: there is none.
        made: id -> constructor and value, of values that may still be built. The value is kept, so that its id isn't
            reused.
        guard: limits the work.
    """

    memo: Memo

    def __init__(
        self,
        data: bytes,
        classes: Mapping[tuple[str, str], Any],
        what: str,
        find_outside: Callable[[Any], Any] | None,
        fix: str,
        scan: Scan | None = None,
    ) -> None:
        # A length that the pickle announces is never allocated: the file gives what is left, and then no opcode comes.
        self.file = io.BytesIO(data)
        super().__init__(self.file)
        self.read = self.file.read
        self.stack: list[Any] = []
        self.append = self.stack.append
        self.metastack: list[list[Any]] = []
        self.memo = Memo(None if scan is None else scan.find)
        self.made: dict[int, tuple[Constructor, Any]] = {}
        self.guard = Guard(len(data))
        self.data, self.classes, self.what, self.find_outside = data, classes, what, find_outside
        self.fix, self.scan = fix, scan

    def pop_mark(self) -> list[Any]:
        """Pop and return what was pushed since the last mark, and the mark."""
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
        """Return the constructor or value of a name."""
        try:
            return self.classes[module, name]
        except KeyError:
            named = f"names {module[:100]}.{name[:100]}, which is neither data nor known to be harmless"
            raise self.unsafe(named) from None

    def persistent_load(self, pid: Any) -> Any:
        """Return the value of a persistent id."""
        if self.find_outside is None:
            raise self.unsafe("refers to something outside of itself")
        return self.find_outside(pid)

    def _decode_string(self, value: bytes) -> str | bytes:
        # A string of Python 2 could be either: it is text if it is UTF-8.
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError:
            return value

    def unsafe(self, wrong: str) -> UnsafeFile:
        """Return the error for a pickle that contains more than data."""
        found = f"before byte {self.file.tell()}"
        return UnsafeFile(error_text(f"{self.what}: it {wrong}", found=found, fix=self.fix))
