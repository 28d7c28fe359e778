"""Opcodes that name and call classes and functions and set the state of objects, and opcodes of the framing."""

from __future__ import annotations

from struct import Struct
from typing import Any

from ._state import Constructor, Handler, Machine, line, take

_U64 = Struct("<Q")
_NEWEST_PROTOCOL = 5


def _proto(machine: Machine, at: int) -> int:
    if machine.data[at] > _NEWEST_PROTOCOL:
        raise ValueError(f"protocol {machine.data[at]}; this release reads 0 to {_NEWEST_PROTOCOL}")
    return at + 1


def _frame(machine: Machine, at: int) -> int:
    (length,) = _U64.unpack(take(machine, at, 8))
    if length > len(machine.data) - at - 8:
        raise ValueError(f"a frame of {length} bytes, {len(machine.data) - at - 8} are left")
    return at + 8


def _stop(machine: Machine, at: int) -> int:
    return -1


def _global(machine: Machine, at: int) -> int:
    value, end = _find_global(machine, at)
    machine.stack.append(value)
    return end


def _find_global(machine: Machine, at: int) -> tuple[Any, int]:
    module, at = line(machine, at)
    name, at = line(machine, at)
    return machine.find(str(module, "utf-8"), str(name, "utf-8")), at


def _stack_global(machine: Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a name that isn't text")
    machine.stack.append(machine.find(module, name))
    return at


def _reduce(machine: Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = _call(machine, machine.stack[-1], args)
    return at


def _newobj_ex(machine: Machine, at: int) -> int:
    keywords = machine.stack.pop()
    if type(keywords) is not dict or keywords:
        raise machine.unsafe("calls a class with keywords")
    return _reduce(machine, at)


def _call(machine: Machine, constructor: Any, args: Any) -> Any:
    if type(constructor) is not Constructor:
        raise machine.unsafe(f"calls a {type(constructor).__name__}")
    if type(args) is not tuple:
        raise TypeError("arguments that aren't a tuple")
    # An argument can be a reference to a large value: a million calls that each copy it are a few megabytes of pickle.
    if args:
        machine.guard.charge(args)
    if constructor.keys is not None:
        machine.guard.check_keys(constructor.keys(*args))
    value = constructor.make(*args)
    if constructor.build is not None:
        machine.made[id(value)] = constructor, value
    return value


def _build(machine: Machine, at: int) -> int:
    state = machine.stack.pop()
    # Popped: a value is built once, as pickle itself does, so that no file makes a constructor repeat its work.
    constructor, value = machine.made.pop(id(machine.stack[-1]), (None, None))
    if constructor is None or constructor.build is None:
        raise machine.unsafe(f"fills a {type(machine.stack[-1]).__name__}")
    machine.guard.charge(state if type(state) is tuple else (state,))
    constructor.build(value, state)
    return at if machine.scan is None else machine.scan(machine, at)


def _inst(machine: Machine, at: int) -> int:
    _find_global(machine, at)
    raise machine.unsafe("makes an object by an opcode of protocol 0 (INST)")


def _refused(wrong: str) -> Handler:
    def refuse(machine: Machine, at: int) -> int:
        raise machine.unsafe(wrong)

    return refuse


def _binpersid(machine: Machine, at: int) -> int:
    if machine.persistent_load is None:
        raise machine.unsafe("refers to something outside of itself")
    machine.stack[-1] = machine.persistent_load(machine.stack[-1])
    return at


def _persid(machine: Machine, at: int) -> int:
    text, end = line(machine, at)
    machine.stack.append(str(text, "ascii"))
    return _binpersid(machine, end)


HANDLERS: dict[int, Handler] = {
    0x80: _proto,
    0x95: _frame,
    ord("."): _stop,
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _reduce,  # NEWOBJ: the constructor decides how instances are made, so it is the same as a call
    0x92: _newobj_ex,
    ord("b"): _build,
    ord("i"): _inst,
    ord("o"): _refused("makes an object by an opcode of protocol 1 (OBJ)"),
    0x82: _refused("names a class by a number (EXT1)"),
    0x83: _refused("names a class by a number (EXT2)"),
    0x84: _refused("names a class by a number (EXT4)"),
    0x97: _refused("refers to a buffer outside of itself (NEXT_BUFFER)"),
    0x98: _refused("refers to a buffer outside of itself (READONLY_BUFFER)"),
    ord("P"): _persid,
    ord("Q"): _binpersid,
}
