"""`read_pickle`: a reader of pickles that never runs code from the file. Each opcode that it knows is listed here."""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from ...errors import CheckpointingException, CorruptCheckpoint, UnsupportedValue, error_text
from ._machine import FIX, Constructor, Irregular, Machine, Run, Scan, check_bounded


def _frame(machine: Machine) -> None:
    (length,) = struct.unpack("<Q", machine.read(8))
    left = len(machine.data) - machine.file.tell()
    if length > left:
        raise ValueError(f"a frame of {length} bytes, but {left} are left")


def _bytearray(machine: Machine) -> None:
    machine.append(bytearray(machine.read(*struct.unpack("<Q", machine.read(8)))))


def _pop(machine: Machine) -> None:
    if machine.stack:
        _single(machine.stack.pop())
    else:
        machine.pop_mark()


def _memoize(machine: Machine) -> None:
    memo = machine.memo
    memo[len(memo) + memo.taken] = machine.stack[-1]


def _unless_scanned(put: Handler) -> Handler:
    """Return a handler that calls `put`, for an opcode with which the pickle itself chooses a value's memo number.

    If the machine has a `Scan`, the handler raises `Irregular` instead, since scans take memo numbers as consecutive.
    """

    def handler(machine: Machine) -> None:
        # The scan counts memo numbers, which is right for pickles that number values consecutively: from protocol 4 on.
        if machine.scan is not None:
            raise Irregular("values with numbers of the pickle's own choice")
        put(machine)

    return handler


def _append(machine: Machine) -> None:
    item = _single(machine.stack.pop())
    _sequence(machine.stack[-1]).append(item)


def _appends(machine: Machine) -> None:
    items = machine.pop_mark()
    _sequence(machine.stack[-1]).extend(items)


def _single(value: Any) -> Any:
    # An opcode that takes one value from the stack would take all of a run.
    if type(value) is Run:
        raise Irregular("a use of one value from a run")
    return value


def _sequence(target: Any) -> list[Any] | deque[Any]:
    # Only exact types are accepted: append of any other object would call any function that its class has there.
    if type(target) is list or type(target) is deque:
        return target
    raise TypeError(f"items for a {type(target).__name__}")


def _setitem(machine: Machine) -> None:
    item, key = _single(machine.stack.pop()), machine.stack.pop()
    _fill(machine, machine.stack[-1], [key], [item])


def _setitems(machine: Machine) -> None:
    items = machine.pop_mark()
    _fill(machine, machine.stack[-1], items[::2], items[1::2])


def _dict(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.append({})
    _fill(machine, machine.stack[-1], items[::2], items[1::2])


def _fill(machine: Machine, target: Any, keys: list[Any], items: list[Any]) -> None:
    machine.guard.check_keys(keys)  # This comes first, since hashing a key may take for ever.
    if type(target) is dict:
        target.update(zip(keys, items, strict=True))
    elif isinstance(target, dict):
        for key, item in zip(keys, items, strict=True):
            target[key] = item
    else:
        raise TypeError(f"keys for a {type(target).__name__}")


def _additems(machine: Machine) -> None:
    items = machine.pop_mark()
    if type(machine.stack[-1]) is not set:
        raise TypeError(f"members for a {type(machine.stack[-1]).__name__}")
    machine.guard.check_keys(items)
    machine.stack[-1].update(items)


def _frozenset(machine: Machine) -> None:
    items = machine.pop_mark()
    machine.guard.check_keys(items)
    machine.append(frozenset(items))


def _call(machine: Machine) -> None:
    args, constructor = machine.stack.pop(), machine.stack[-1]
    if type(constructor) is not Constructor:
        raise machine.unsafe(f"calls a {type(constructor).__name__}")
    if type(args) is not tuple:
        raise TypeError("arguments that are not a tuple")
    # An argument can refer to a large value: a few megabytes of pickle have a million calls that each copy it.
    if args:
        machine.guard.charge(args)
    if constructor.keys is not None:
        machine.guard.check_keys(constructor.keys(*args))
    value = machine.stack[-1] = constructor.make(*args)
    if constructor.build is not None:
        machine.constructions[id(value)] = constructor, value


def _call_with_keywords(machine: Machine) -> None:
    keywords = machine.stack.pop()
    if type(keywords) is not dict or keywords:
        raise machine.unsafe("calls a class with keywords")
    _call(machine)


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    # The entry is popped: a value is built once, as by pickle itself, so that no file makes a constructor repeat work.
    constructor, value = machine.constructions.pop(id(machine.stack[-1]), (None, None))
    if constructor is None or constructor.build is None:
        raise machine.unsafe(f"fills a {type(machine.stack[-1]).__name__}")
    machine.guard.charge(state if type(state) is tuple else (state,))
    constructor.build(value, state)
    if machine.scan is not None:
        machine.file.seek(machine.scan(machine, machine.file.tell()))


def _refuse(wrong: str) -> Handler:
    def refuse(machine: Machine) -> None:
        raise machine.unsafe(wrong)

    return refuse


def _unknown(machine: Machine) -> None:
    at = machine.file.tell() - 1
    raise ValueError(f"unknown opcode {machine.data[at]:#04x}")


Handler = Callable[[Machine], None]

# Opcodes that only push values, marks and names that `find_class` knows have Python's own handlers.
_PYTHONS = """
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST LIST EMPTY_TUPLE TUPLE
    TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT EMPTY_SET MARK POP_MARK DUP GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL PERSID
    BINPERSID PROTO
"""


def _own(name: str) -> Handler:
    handler: Any = pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
    return cast(Handler, handler)


_OURS: dict[str, Handler] = {
    **{name: _own(name) for name in _PYTHONS.split()},
    **{name: _unless_scanned(_own(name)) for name in ("PUT", "BINPUT", "LONG_BINPUT")},
    "FRAME": _frame,
    "BYTEARRAY8": _bytearray,
    "POP": _pop,
    "MEMOIZE": _memoize,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _setitem,
    "SETITEMS": _setitems,
    "DICT": _dict,
    "ADDITEMS": _additems,
    "FROZENSET": _frozenset,
    "REDUCE": _call,
    "NEWOBJ": _call,  # Handled as a call: the constructor decides how instances are made.
    "NEWOBJ_EX": _call_with_keywords,
    "BUILD": _build,
    "INST": _refuse("makes an object by an opcode of protocol 0 (INST)"),
    "OBJ": _refuse("makes an object by an opcode of protocol 1 (OBJ)"),
    "EXT1": _refuse("names a class by a number (EXT1)"),
    "EXT2": _refuse("names a class by a number (EXT2)"),
    "EXT4": _refuse("names a class by a number (EXT4)"),
    "NEXT_BUFFER": _refuse("refers to a buffer outside of itself (NEXT_BUFFER)"),
    "READONLY_BUFFER": _refuse("refers to a buffer outside of itself (READONLY_BUFFER)"),
}
_BY_CODE = {getattr(pickle, name)[0]: handler for name, handler in _OURS.items()}
_HANDLERS = [_BY_CODE.get(code, _unknown) for code in range(256)]


def read_pickle(
    data: bytes | bytearray | memoryview,
    classes: Mapping[tuple[str, str], Any],
    *,
    what: str,
    persistent_load: Callable[[Any], Any] | None = None,
    fix: str = FIX,
    helpers: frozenset[type] = frozenset(),
    scan: Scan | None = None,
) -> Any:
    r"""Return the value of a pickle; the bytes may be untrusted.

    Every opcode of protocols 0 to 5 is known. Nothing that the bytes name is imported: names are looked up in
    `classes`, and only a `Constructor` is ever called. Bytes after the pickle's end are ignored.

    Args:
        data: Bytes of the pickle.
        classes: `Constructor`, or plain value such as a dtype, by module and qualified name.
        what: Description of the pickle, for errors.
        persistent_load: Function that returns the value of a persistent id; None to refuse pickles with such ids.
        fix: Advice for the error about a name that is not in `classes`.
        helpers: Types of intermediate objects, such as storages: constructors may get them as arguments, but the file
            is corrupt if the result contains one.
        scan: Function that reads repetitive parts of the pickle into columns. The result has a `Run`, which is a range
            of rows in these columns, in place of each part.

    Raises:
        UnsafeFile: The pickle names something that is not in `classes`, or uses an opcode that could run code.
        CorruptCheckpoint: The bytes are not a pickle, end early, make a value that contains itself, or would take too
            much time or memory.

    Examples:
        >>> import pickle
        >>> read_pickle(pickle.dumps({"step": 7, "betas": (0.9, 0.95)}), {}, what="example")
        {'step': 7, 'betas': (0.9, 0.95)}
        >>> read_pickle(b"cos\nsystem\n(S'rm -r *'\ntR.", {}, what="example")
        Traceback (most recent call last):
        ...
        shardtree.errors.UnsafeFile: example: it names os.system, which is not known to be harmless (before byte 11)
          Only LoadOptions(allow_pickle=True) reads it, and runs any code in it: use it only if you trust the file.
    """
    content = data if type(data) is bytes else bytes(data)
    machine, handlers = Machine(content, classes, what, persistent_load, fix, scan), _HANDLERS
    try:
        while (code := machine.read(1)) != pickle.STOP:
            handlers[code[0]](machine)
        value = machine.stack.pop()
        if machine.metastack:
            raise ValueError("a mark is left on the stack at its end")
        check_bounded(value, len(machine.data), helpers)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{machine.what}: {error}") from None
    except CheckpointingException:
        raise
    except Exception as error:
        early = isinstance(error, (IndexError, struct.error))
        reason = "its bytes or its stack end too early" if early else str(error)[:200] or type(error).__name__
        heading = f"{machine.what}: not a pickle that can be read: {reason} (before byte {machine.file.tell()})"
        raise CorruptCheckpoint(error_text(heading)) from error
    return value
