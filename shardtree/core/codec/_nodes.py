"""Parts that the encoders and decoders of values share: JSON nodes, blobs of bytes, and conversions to `Record`s.

`encode_tree` stores a value as a node in the file's JSON. A node is either a plain JSON value or an object with the
member `"$"`, which names the kind of value.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

from ...errors import TreePath, UnsupportedValue, error_text, render_path
from ..trees import Record
from ._addresses import stored_name

T = TypeVar("T")

MAX_DEPTH = 100
"""Upper bound of nested containers in a stored value; each takes up to three levels of JSON and four Python frames."""

Node = Any
Take = Callable[[Any], tuple[str, tuple[int, ...], memoryview]]
"""A function from an entry's name to its tag, shape and bytes; each entry can be taken once."""


class Child(Protocol):
    """A function that encodes or decodes a value's child, such as an item of a list.

    `steps` are the keys and indices that lead from the value to the child, for error messages.
    """

    def __call__(self, value: Any, /, *steps: Any) -> Any: ...


Encoder = Callable[[Any, Child], Node]
"""A function from a value to its node; it returns NotImplemented for a value that only pickle can store."""

Decoder = tuple[tuple[str, ...], Callable[[dict[str, Any], Child, Take], Any]]
"""The names of a node's members beside `"$"`, and the function that makes the value from these members."""


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """Bytes that are stored as an entry of the safetensors file.

    A node contains the blob until the entry has a name, which replaces the blob in the JSON.

    Attributes:
        data: The bytes, as a contiguous buffer.
        tag: Dtype as safetensors names it.
        shape: Shape in elements of that dtype.
        item_size: Size of an item in bytes; the entry's offset in the file is a multiple of it.
    """

    data: Any
    tag: str
    shape: tuple[int, ...]
    item_size: int


def plain_blob(data: Any) -> Blob:
    """Return a blob that stores bytes as a 1-D entry of dtype U8.

    Examples:
        >>> plain_blob(b"abc").shape
        (3,)
    """
    return Blob(data, "U8", (len(data),), 1)


def exactly(kind: type[T], value: Any) -> T:
    """Return the value, after checking that it has exactly this type.

    Raises:
        TypeError: The value has another type; `decode_tree` adds its path.

    Examples:
        >>> exactly(int, 3)
        3
    """
    # isinstance isn't enough: True is an int, and a subclass from an allowed constructor may behave differently.
    if type(value) is not kind:
        raise TypeError(f"found {type(value).__name__}, expected {kind.__name__}")
    return value


def shown_path(path: TreePath) -> str:
    """Return a path as text for error messages; long paths and long or unusual keys are shortened.

    Args:
        path: Indices and keys that lead from the root to a value; a dict's keys may have any type.

    Examples:
        >>> shown_path(("state", (1, 2), 7)), len(shown_path(tuple(range(100))))
        ("tree['state']['<tuple>'][7]", 47)
    """
    steps = tuple(map(_step, path if len(path) <= 11 else path[:10]))
    return render_path(steps if len(path) <= 11 else (*steps, f"… {len(path) - 10} more"))


def _step(key: Any) -> Any:
    is_short = type(key) is str and len(key) <= 200
    return key if is_short or (type(key) is int and key.bit_length() < 64) else f"<{type(key).__name__}>"


def plainer(value: Any) -> str:
    """Return advice for errors: what to store instead of a value that only a pickle can hold.

    Examples:
        >>> plainer(print)[:32]
        'Store plain values made from it,'
    """
    base = next((kind for kind in (dict, list, deque) if isinstance(value, kind)), None)
    instead = "plain values made from it" if base is None else f"{base.__name__}(value)"
    return (
        f"Store {instead}, or wrap it in LocalNonpersistentObject if it need not be stored; "
        "SaveOptions(allow_pickle=True) stores it as a pickle, which runs code when it is loaded."
    )


# Records are the stored form of enum members, dataclasses and named tuples. The class that one names is never imported.


def type_name(cls: type) -> str:
    """Return the name under which a class is stored: its import path.

    The stored name of a shardtree class is its public import path, which stays the same if the class moves.

    Examples:
        >>> import collections
        >>> type_name(collections.Counter)
        'collections.Counter'
    """
    return stored_name(f"{cls.__module__}.{cls.__qualname__}")


def record_of(value: Any) -> Record | None:
    """Return an enum member, dataclass or named tuple as a record, or None for another value.

    Examples:
        >>> from http import HTTPStatus
        >>> record_of(HTTPStatus.OK)
        Record(type_name='http.HTTPStatus', fields={'name': 'OK', 'value': 200})
    """
    if isinstance(value, Record):
        return value
    if not _has_fields(type(value)):
        return None
    if isinstance(value, Enum):
        return Record(type_name(type(value)), {"name": value.name, "value": value.value})
    return Record(type_name(type(value)), {name: getattr(value, name) for name in _field_names(type(value))})


def named_types(types: Iterable[type]) -> dict[str, type]:
    """Return a dict from the stored names of classes to the classes.

    Raises:
        UnsupportedValue: A class isn't an enum, dataclass or named tuple.

    Examples:
        >>> from http import HTTPStatus
        >>> named_types([HTTPStatus])
        {'http.HTTPStatus': <enum 'HTTPStatus'>}
    """
    if isinstance(types, type) or not isinstance(types, Iterable):
        raise UnsupportedValue(error_text("types: not a tuple of classes", found=repr(types)[:200]))
    classes = tuple(types)
    others = [type_name(cls) if isinstance(cls, type) else repr(cls)[:99] for cls in classes if not _has_fields(cls)]
    if others:
        heading = "types: only enums, dataclasses and named tuples can be given"
        raise UnsupportedValue(error_text(heading, offenders=others))
    return {type_name(cls): cls for cls in classes}


def instance_of(record: Record, cls: type) -> Any:
    """Return the instance of a class that a record describes, without running `__init__`.

    Args:
        record: Record of an instance of this class, perhaps of an older version.
        cls: An enum, a dataclass or a named tuple.

    Raises:
        UnsupportedValue: The class has other fields than the record, or the enum lacks the member.

    Examples:
        >>> from http import HTTPStatus
        >>> instance_of(Record("http.HTTPStatus", {"name": "OK", "value": 200}), HTTPStatus)
        <HTTPStatus.OK: 200>
    """
    names = _field_names(cls)
    if sorted(record.fields) != sorted(names):
        raise _mismatch(record, f"fields {sorted(record.fields)}", f"{sorted(names)}, as in the class")
    if issubclass(cls, Enum):
        return _member(record, cls)
    if issubclass(cls, tuple):
        return tuple.__new__(cls, (record.fields[name] for name in names))
    # __init__ and __post_init__ aren't called: they ran when the instance was first made, and may change fields again.
    value: Any = object.__new__(cls)
    for name in names:
        object.__setattr__(value, name, record.fields[name])
    return value


def _member(record: Record, cls: type[Enum]) -> Enum:
    name = record.fields["name"]
    if type(name) is str and name in cls.__members__:
        return cls.__members__[name]
    try:
        return cls(record.fields["value"])  # a combination of flags has no name of its own
    except (ValueError, TypeError, KeyError):
        raise _mismatch(record, f"name {str(name)[:100]!r}", "the name of a member") from None


def _mismatch(record: Record, found: object, expected: object) -> UnsupportedValue:
    heading = f"{record.type_name[:200]}: the class passed in types= does not fit the stored value"
    fix = "Leave the class out of types=: the value is then loaded as a Record of its stored fields."
    return UnsupportedValue(error_text(heading, found=str(found)[:1000], expected=expected, fix=fix))


def _has_fields(cls: object) -> bool:
    if not isinstance(cls, type):
        return False
    if issubclass(cls, Enum):
        return True
    if issubclass(cls, tuple):
        return cls.__new__ is not tuple.__new__ and isinstance(getattr(cls, "_fields", None), tuple)
    # A dataclass that is also a dict, a tensor or an exception contains more than its fields.
    return dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__


def _field_names(cls: type) -> tuple[str, ...]:
    if issubclass(cls, Enum):
        return ("name", "value")
    if issubclass(cls, tuple):
        names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
        return names
    return tuple(field.name for field in dataclasses.fields(cast(Any, cls)))
