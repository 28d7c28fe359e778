"""Opcodes of values: numbers, text and bytes; lists, tuples, dicts and sets; and of the stack and the memo."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Any

from ._state import Handler, Irregular, Machine, Run, line, take

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


# Containers: lists, tuples, dicts and sets; the stack and the memo


_U32, _U64 = Struct("<I"), Struct("<Q")


def _mark(machine: Machine, at: int) -> int:
    machine.marks.append(machine.stack)
    machine.stack = []
    return at


def _pop(machine: Machine, at: int) -> int:
    if machine.stack:
        _check_single(machine.stack.pop())
    else:
        machine.since_mark()
    return at


def _pop_mark(machine: Machine, at: int) -> int:
    machine.since_mark()
    return at


def _dup(machine: Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _get(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.stack.append(machine.memo[int(text[:20])])
    return end


def _binget(machine: Machine, at: int) -> int:
    machine.stack.append(machine.memo[machine.data[at]])
    return at + 1


def _long_binget(machine: Machine, at: int) -> int:
    machine.stack.append(machine.memo[_U32.unpack(take(machine, at, 4))[0]])
    return at + 4


def _put(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.put(int(text[:20]))
    return end


def _binput(machine: Machine, at: int) -> int:
    machine.put(machine.data[at])
    return at + 1


def _long_binput(machine: Machine, at: int) -> int:
    machine.put(_U32.unpack(take(machine, at, 4))[0])
    return at + 4


def _memoize(machine: Machine, at: int) -> int:
    memo = machine.memo
    memo[len(memo) + memo.taken] = machine.stack[-1]
    return at


def _empty(kind: Callable[[], Any]) -> Handler:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(kind())
        return at

    return push


def _list(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append(items)
    return at


def _tuple(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.stack.append(tuple(items))
    return at


def _tuple1(machine: Machine, at: int) -> int:
    machine.stack[-1] = (machine.stack[-1],)
    return at


def _tuple2(machine: Machine, at: int) -> int:
    stack = machine.stack
    second = stack.pop()
    stack[-1] = (stack[-1], second)
    return at


def _tuple3(machine: Machine, at: int) -> int:
    stack = machine.stack
    third, second = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], second, third)
    return at


def _append(machine: Machine, at: int) -> int:
    item = machine.stack.pop()
    _check_single(item)
    _sequence(machine.stack[-1]).append(item)
    return at


def _appends(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    _sequence(machine.stack[-1]).extend(items)
    return at


def _check_single(value: Any) -> None:
    # An opcode that takes one value from the stack would take all of a run.
    if type(value) is Run:
        raise Irregular("a part of what a scan took")


def _sequence(target: Any) -> list[Any] | deque[Any]:
    # Exact types only: calling append of any other object would call whatever its class has under that name.
    if type(target) is list or type(target) is deque:
        return target
    raise TypeError(f"items for a {type(target).__name__}")


def _setitem(machine: Machine, at: int) -> int:
    item, key = machine.stack.pop(), machine.stack.pop()
    _check_single(item)
    _fill(machine, machine.stack[-1], [key], [item])
    return at


def _setitems(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    _fill(machine, machine.stack[-1], items[::2], items[1::2])
    return at


def _dict(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    target: dict[Any, Any] = {}
    _fill(machine, target, items[::2], items[1::2])
    machine.stack.append(target)
    return at


def _fill(machine: Machine, target: Any, keys: list[Any], items: list[Any]) -> None:
    machine.guard.check_keys(keys)  # first: hashing a key is what can take for ever
    if type(target) is dict:
        target.update(zip(keys, items, strict=True))
    elif isinstance(target, dict):
        for key, item in zip(keys, items, strict=True):
            target[key] = item
    else:
        raise TypeError(f"keys for a {type(target).__name__}")


def _additems(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    if type(machine.stack[-1]) is not set:
        raise TypeError(f"members for a {type(machine.stack[-1]).__name__}")
    machine.guard.check_keys(items)
    machine.stack[-1].update(items)
    return at


def _frozenset(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.guard.check_keys(items)
    machine.stack.append(frozenset(items))
    return at


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
    ord("("): _mark,
    ord("0"): _pop,
    ord("1"): _pop_mark,
    ord("2"): _dup,
    ord("g"): _get,
    ord("h"): _binget,
    ord("j"): _long_binget,
    ord("p"): _put,
    ord("q"): _binput,
    ord("r"): _long_binput,
    0x94: _memoize,
    ord("]"): _empty(list),
    ord("l"): _list,
    ord("a"): _append,
    ord("e"): _appends,
    ord(")"): _empty(tuple),
    ord("t"): _tuple,
    0x85: _tuple1,
    0x86: _tuple2,
    0x87: _tuple3,
    ord("}"): _empty(dict),
    ord("d"): _dict,
    ord("s"): _setitem,
    ord("u"): _setitems,
    0x8F: _empty(set),
    0x90: _additems,
    0x91: _frozenset,
}
