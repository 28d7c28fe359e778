"""`write_pickle`: a writer of pickles with plain values, and with calls of classes and functions given by name.

It doesn't pickle instances of torch's classes. So writing needs no import of torch.distributed, and the bytes depend
neither on the version of torch nor on paths of the machine that saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from struct import Struct, pack
from typing import Any

from ...errors import UnsupportedValue, error_text
from ._machine import DEEPEST

_U32, _U64 = Struct("<I"), Struct("<Q")


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function, which need not be importable here.

    Attributes:
        module: Name of the module.
        name: Qualified name in the module.
    """

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """The result of a call that is made when the pickle is loaded.

    Attributes:
        callable: Name of the class or function that is called.
        args: Arguments of the call.
        state: State that is set on the result afterwards; None for no state.
        items: Keys and values that are set in the result.
    """

    callable: Global
    args: tuple[Any, ...]
    state: Any = None
    items: Iterable[tuple[Any, Any]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class New:
    """An object that a class's ``__new__`` makes when the pickle is loaded; ``__init__`` isn't called.

    Attributes:
        cls: Name of the class.
        args: Arguments of ``__new__``.
        state: State that is set on the object afterwards; None for no state.
    """

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A value that the reader's `persistent_load` returns for an id.

    Attributes:
        id: Value of any type that can be written.
    """

    id: Any


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A dict whose keys and values are all written by one call of a function.

    Attributes:
        count: Number of pairs.
        write: Function that writes all pairs, each key followed by its value.
    """

    count: int
    write: Callable[[PickleWriter], None]


def write_pickle(value: Any, *, protocol: int = 4) -> bytes:
    r"""Return the pickle of plain values, and of calls that a reader makes.

    Classes and functions that it names need not be importable here. Equal strings and names are written once; a
    container that occurs twice is written twice.

    Args:
        value: None, bool, int, float, str, bytes, tuple, list or dict (of exactly these types), `Global`, `Reduced`,
            `New`, `Persistent` or `Pairs`, nested at most 250 deep.
        protocol: 2 or 4.

    Raises:
        UnsupportedValue: A value is none of these, or contains itself.

    Examples:
        >>> import pickle
        >>> data = write_pickle([1, "a", Reduced(Global("builtins", "complex"), (1.0, 2.0))])
        >>> pickle.loads(data)
        [1, 'a', (1+2j)]
    """
    if protocol not in (2, 4):
        raise UnsupportedValue(error_text("write_pickle: unsupported protocol", found=protocol, expected="2 or 4"))
    writer = PickleWriter(protocol)
    try:
        writer.write(value, 0)
    except RecursionError:
        raise _too_deep() from None
    return b"".join([b"\x80", bytes([protocol]), *writer.out, b"."])


class PickleWriter:
    """Writer of one pickle.

    Attributes:
        out: Byte strings of the opcodes so far, in order.
        memo: Memo number of each text and name that was written.
        protocol: 2 or 4.
    """

    __slots__ = ("memo", "out", "protocol")

    def __init__(self, protocol: int) -> None:
        self.out: list[bytes | memoryview] = []
        self.memo: dict[Any, int] = {}
        self.protocol = protocol

    def write(self, value: Any, depth: int) -> None:
        """Write a value; the depth is the number of containers around it."""
        handler = _WRITERS.get(type(value))
        if handler is None:
            heading = f"write_pickle: a {type(value).__name__} cannot be written"
            raise UnsupportedValue(error_text(heading, expected=", ".join(sorted(kind.__name__ for kind in _WRITERS))))
        if depth > DEEPEST:
            raise _too_deep()
        handler(self, value, depth)

    def write_reference(self, value: Any) -> bool:
        """Write a reference and return True if the value was written before."""
        number = self.memo.get(value)
        if number is not None:
            self.out.append(reference(number))
        return number is not None

    def remember(self, value: Any) -> None:
        """Give the value that was just written a memo number."""
        number = len(self.memo)
        self.memo[value] = number
        if self.protocol == 4:
            self.out.append(b"\x94")
        else:
            self.out.append(b"q" + bytes([number]) if number < 256 else b"r" + _U32.pack(number))


def reference(number: int) -> bytes:
    r"""Return the opcode that pushes the value with this number in the memo.

    Examples:
        >>> reference(7), reference(256)
        (b'h\x07', b'j\x00\x01\x00\x00')
    """
    return b"h" + bytes([number]) if number < 256 else b"j" + _U32.pack(number)


def _too_deep() -> UnsupportedValue:
    return UnsupportedValue(error_text(f"write_pickle: a value is nested more than {DEEPEST} deep, or contains itself"))


def _none(writer: PickleWriter, value: None, depth: int) -> None:
    writer.out.append(b"N")


def _int(writer: PickleWriter, value: int, depth: int) -> None:
    if 0 <= value < 256:
        writer.out.append(b"K" + bytes([value]))
    elif 0 <= value < 65536:
        writer.out.append(pack("<cH", b"M", value))
    elif -(2**31) <= value < 2**31:
        writer.out.append(pack("<ci", b"J", value))
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        writer.out.append((b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + _U32.pack(len(data))) + data)


def _str(writer: PickleWriter, value: str, depth: int) -> None:
    if writer.write_reference(value):
        return
    data = value.encode("utf-8", "surrogatepass")
    if len(data) < 256 and writer.protocol == 4:
        writer.out.append(b"\x8c" + bytes([len(data)]) + data)
    elif len(data) < 2**32:
        writer.out.append(b"X" + _U32.pack(len(data)) + data)
    else:
        writer.out.append(b"\x8d" + _U64.pack(len(data)) + data)
    writer.remember(value)


def _bytes(writer: PickleWriter, value: bytes, depth: int) -> None:
    # Protocol 2, which torch uses, has no opcode for bytes: pickle itself writes a call of _codecs.encode.
    if writer.protocol < 4:
        _reduced(writer, Reduced(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1")), depth)
    elif len(value) < 256:
        writer.out.append(b"C" + bytes([len(value)]) + value)
    elif len(value) < 2**32:
        writer.out.append(b"B" + _U32.pack(len(value)) + value)
    else:
        writer.out.append(b"\x8e" + _U64.pack(len(value)) + value)


def _tuple(writer: PickleWriter, value: tuple[Any, ...], depth: int) -> None:
    if len(value) > 3:
        writer.out.append(b"(")
    for item in value:
        writer.write(item, depth + 1)
    writer.out.append((b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t")


def _list(writer: PickleWriter, value: list[Any], depth: int) -> None:
    writer.out.append(b"](" if value else b"]")
    for item in value:
        writer.write(item, depth + 1)
    if value:
        writer.out.append(b"e")


def _dict(writer: PickleWriter, value: dict[Any, Any], depth: int) -> None:
    writer.out.append(b"}")
    if value:
        _items(writer, value.items(), depth)


def _pairs(writer: PickleWriter, value: Pairs, depth: int) -> None:
    writer.out.append(b"}(" if value.count else b"}")
    if value.count:
        value.write(writer)
        writer.out.append(b"u")


def _items(writer: PickleWriter, items: Iterable[tuple[Any, Any]], depth: int) -> None:
    writer.out.append(b"(")
    for key, item in items:
        writer.write(key, depth + 1)
        writer.write(item, depth + 1)
    writer.out.append(b"u")


def _global(writer: PickleWriter, value: Global, depth: int) -> None:
    if writer.write_reference(value):
        return
    if writer.protocol == 4:
        _str(writer, value.module, depth)
        _str(writer, value.name, depth)
        writer.out.append(b"\x93")
    else:
        writer.out.append(f"c{value.module}\n{value.name}\n".encode())
    writer.remember(value)


def _reduced(writer: PickleWriter, value: Reduced, depth: int) -> None:
    _global(writer, value.callable, depth)
    _tuple(writer, value.args, depth)
    writer.out.append(b"R")
    if value.items is not None:
        _items(writer, value.items, depth)
    _state(writer, value.state, depth)


def _new(writer: PickleWriter, value: New, depth: int) -> None:
    _global(writer, value.cls, depth)
    _tuple(writer, value.args, depth)
    writer.out.append(b"\x81")
    _state(writer, value.state, depth)


def _state(writer: PickleWriter, state: Any, depth: int) -> None:
    if state is not None:
        writer.write(state, depth + 1)
        writer.out.append(b"b")


def _persistent(writer: PickleWriter, value: Persistent, depth: int) -> None:
    writer.write(value.id, depth + 1)
    writer.out.append(b"Q")


_WRITERS: dict[type, Callable[[PickleWriter, Any, int], None]] = {
    type(None): _none,
    bool: lambda writer, value, depth: writer.out.append(b"\x88" if value else b"\x89"),
    int: _int,
    float: lambda writer, value, depth: writer.out.append(pack(">cd", b"G", value)),
    str: _str,
    bytes: _bytes,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    Global: _global,
    Reduced: _reduced,
    New: _new,
    Persistent: _persistent,
    Pairs: _pairs,
}
