"""Opcodes of numbers, text and bytes."""

from __future__ import annotations

import codecs
from struct import Struct
from typing import Any

from ._state import Handler, Machine, line, take

_U16, _I32, _U32, _U64, _F64 = Struct("<H"), Struct("<i"), Struct("<I"), Struct("<Q"), Struct(">d")


def _constant(value: Any) -> Handler:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _binint1(machine: Machine, at: int) -> int:
    machine.stack.append(machine.data[at])
    return at + 1


def _binint2(machine: Machine, at: int) -> int:
    machine.stack.append(_U16.unpack(take(machine, at, 2))[0])
    return at + 2


def _binint(machine: Machine, at: int) -> int:
    machine.stack.append(_I32.unpack(take(machine, at, 4))[0])
    return at + 4


def _int(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.stack.append(text == b"01" if text in (b"00", b"01") else _decimal(text))
    return end


def _long(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.stack.append(_decimal(text.removesuffix(b"L")))
    return end


def _decimal(text: bytes) -> int:
    if len(text) > 4_000:  # parsing decimal digits takes quadratic time
        raise ValueError("an integer of too many digits")
    return int(text)


def _long1(machine: Machine, at: int) -> int:
    length = machine.data[at]
    machine.stack.append(int.from_bytes(take(machine, at + 1, length), "little", signed=True))
    return at + 1 + length


def _long4(machine: Machine, at: int) -> int:
    length: int = _I32.unpack(take(machine, at, 4))[0]
    machine.stack.append(int.from_bytes(take(machine, at + 4, length), "little", signed=True))
    return at + 4 + length


def _float(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.stack.append(float(text))
    return end


def _binfloat(machine: Machine, at: int) -> int:
    machine.stack.append(_F64.unpack(take(machine, at, 8))[0])
    return at + 8


def _short_text(machine: Machine, at: int) -> int:
    end = at + 1 + machine.data[at]
    if end > len(machine.data):
        raise ValueError("text that reaches beyond the pickle's end")
    machine.stack.append(str(machine.data[at + 1 : end], "utf-8", "surrogatepass"))
    return end


def _counted(size: Struct, make: Any) -> Handler:
    """Return the handler of an opcode with a length followed by that many bytes."""
    width, unpack = size.size, size.unpack

    def push(machine: Machine, at: int) -> int:
        length: int = unpack(take(machine, at, width))[0]
        machine.stack.append(make(take(machine, at + width, length)))
        return at + width + length

    return push


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _text_or_bytes(data: bytes) -> str | bytes:
    """Return a string of Python 2, which could be either: as text if it is UTF-8, else as bytes."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _string(machine: Machine, at: int) -> int:
    quoted, end = line(machine, at)
    quoted = quoted.strip()
    if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    machine.stack.append(_text_or_bytes(codecs.escape_decode(quoted[1:-1])[0]))
    return end


def _unicode(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.stack.append(str(text, "raw-unicode-escape"))
    return end


HANDLERS: dict[int, Handler] = {
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("I"): _int,
    ord("J"): _binint,
    ord("K"): _binint1,
    ord("M"): _binint2,
    ord("L"): _long,
    0x8A: _long1,
    0x8B: _long4,
    ord("F"): _float,
    ord("G"): _binfloat,
    ord("S"): _string,
    ord("T"): _counted(_I32, _text_or_bytes),
    ord("U"): _counted(Struct("<B"), _text_or_bytes),
    ord("V"): _unicode,
    ord("X"): _counted(_U32, _text),
    0x8C: _short_text,
    0x8D: _counted(_U64, _text),
    ord("B"): _counted(_U32, bytes),
    ord("C"): _counted(Struct("<B"), bytes),
    0x8E: _counted(_U64, bytes),
    0x96: _counted(_U64, bytearray),
}
