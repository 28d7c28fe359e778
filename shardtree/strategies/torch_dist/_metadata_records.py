"""The three records that nearly all of `.metadata` repeats, as regular expressions of a pickle's opcodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

# The records. Opcodes that are one byte stand for themselves: ) \x81 makes an object, } ( ... u its state, b fills it.

_REF = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TEXT = (
    rb"(?:h.|j.{4}|\x8c(?:"
    + b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(1, 256))
    + rb")\x94)"
)


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """The records as one kind of writer makes them.

    Attributes:
        memoized: whether tuples and objects have numbers in the memo, as `pickle` gives them; our own writer's have
            none.
        chunk: (what it is and its first field, offset, second field, shape).
        pair: a place: (index and its first field, key, second field, third field, offset, information and its first
            field, file, second field, byte, third field, length).
        tensor: (key, what it is and its first field, properties, second field, shape, third field, chunks).
        kind: a tensor's properties: (what they are, dtype, layout, its argument, memory format, its argument).
    """

    memoized: bool
    chunk: re.Pattern[bytes]
    pair: re.Pattern[bytes]
    tensor: re.Pattern[bytes]
    kind: re.Pattern[bytes]


@cache
def patterns_of(memoized: bool) -> Patterns:
    r"""Return the records of one kind of writer.

    Examples:
        >>> patterns_of(False).kind.fullmatch(b"h\x07").group(1)
        b'h\x07'
    """
    number = rb"\x94" if memoized else b""
    shape = rb"REF(?:(?:\)|\((?:INT){4,64}t~|(?:INT){1,3}[\x85-\x87]~)\x85~R~)?"
    begin = rb"REF\)\x81~}~\(REF"
    chunk = rb"REF\)\x81~}~\(REF(?:SHAPE)REF(?:SHAPE)ub"
    # Where each has a number of arguments that varies, its kind is told by its first byte alone: no match is ambiguous.
    layout, memory = rb"REF(?:REF\x85~R~)?", rb"REF(?:INT\x85~R~)?"
    properties = rb"REF(?:\)\x81~\(REF" + layout + rb"[\x88\x89]" + memory + rb"[\x88\x89]t~b)?"
    found = {
        "chunk": rb"(" + begin + rb")(SHAPE)(REF)(SHAPE)ub",
        "pair": rb"(BEGIN)(TEXT)(REF)(?:N|INT)(REF)(N|SHAPE)ub(BEGIN)(TEXT)(REF)(INT)(REF)(INT)ub",
        "tensor": rb"(TEXT)(BEGIN)(PROPERTIES)(REF)(SHAPE)(REF)\]~(CHUNKa|\((?:CHUNK)+e)ub",
        "kind": rb"(REF)(?:\)\x81~\((REF)(REF)(REF\x85~R~)?[\x88\x89](REF)(INT\x85~R~)?[\x88\x89]t~b)?",
    }
    words = ((b"CHUNK", chunk), (b"BEGIN", begin), (b"PROPERTIES", properties), (b"SHAPE", shape))
    # Last, since they contain bytes of any value.
    nested = (*words, (b"~", number), (b"REF", _REF), (b"INT", _INT), (b"TEXT", _TEXT))
    compiled = {}
    for name, pattern in found.items():
        for word, meaning in nested:
            pattern = pattern.replace(word, meaning)
        compiled[name] = re.compile(pattern, re.DOTALL)
    return Patterns(memoized, **compiled)


REFERENCE = re.compile(_REF, re.DOTALL)


def scanner(pattern: re.Pattern[bytes], data: bytes, at: int) -> Callable[[], re.Match[bytes] | None]:
    """Return a function that returns the next match, which begins where the last one ended, or None."""
    return pattern.scanner(data, at).match  # type: ignore[attr-defined,no-any-return]


def reference(code: bytes) -> int:
    r"""Return the number of the memo that an opcode refers to.

    Examples:
        >>> reference(b"h\x07"), reference(b"j\x00\x01\x00\x00")
        (7, 256)
    """
    return int.from_bytes(code[1:], "little")
