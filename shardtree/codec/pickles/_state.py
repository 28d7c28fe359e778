"""What the machine has while it reads: bytes, stack, marks, memo; and what its handlers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UnsafeFile, error_text
from ._bounds import Guard
from ._constructor import Constructor

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
