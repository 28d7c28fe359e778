"""What encoders and decoders of values share: nodes of JSON, and the bytes that stand beside it.

A node is either a JSON value that means itself or an object with the member `"$"`, which names the kind of value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..errors import TreePath

T = TypeVar("T")

MAX_DEPTH = 100  # containers in containers; each is up to three levels of JSON and four Python frames

Node = Any
Take = Callable[[Any], tuple[str, tuple[int, ...], memoryview]]
"""Entry's name → its tag, shape and bytes; each entry can be taken once."""


class Child(Protocol):
    """Encodes or decodes what a value holds; `steps` lead from the value's path to the child's."""

    def __call__(self, value: Any, /, *steps: Any) -> Any: ...


Encoder = Callable[[Any, Child], Node]
"""Value → node, or NotImplemented for a value that only pickle can store."""

Decoder = tuple[tuple[str, ...], Callable[[dict[str, Any], Child, Take], Any]]
"""The members that a node has beside `"$"`, and the function from them to the value."""


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """Bytes that become an entry of the file; in a node it stands where the entry's name will.

    Attributes:
        data: the bytes, as a contiguous buffer of them.
        tag: safetensors' dtype.
        shape: lengths, in elements of the tag.
        item_size: bytes, to which the entry should be aligned.
    """

    data: Any
    tag: str
    shape: tuple[int, ...]
    item_size: int


def plain_blob(data: Any) -> Blob:
    """Return bytes as an entry without a shape of their own.

    Examples:
        >>> plain_blob(b"abc").shape
        (3,)
    """
    return Blob(data, "U8", (len(data),), 1)


def exactly(expected: type[T], value: Any) -> T:
    """Return the value, once it is of this very type.

    Raises:
        TypeError: it isn't; `decode_tree` says where.

    Examples:
        >>> exactly(int, 3)
        3
    """
    if type(value) is not expected:
        raise TypeError(f"found {type(value).__name__}, expected {expected.__name__}")
    return value


def step_of(key: Any) -> Any:
    """Return a dict's key in a form that is short enough for a path in a message.

    Examples:
        >>> step_of("weight"), step_of(7), step_of((1, 2))
        ('weight', 7, '<tuple>')
    """
    is_short = type(key) is str and len(key) <= 200
    return key if is_short or (type(key) is int and key.bit_length() < 64) else f"<{type(key).__name__}>"


def path_to(path: TreePath) -> TreePath:
    """Return a path in a form that is short enough for a message.

    Examples:
        >>> len(path_to(tuple(range(100))))
        11
    """
    return path if len(path) <= 11 else (*path[:10], f"… {len(path) - 10} more")
