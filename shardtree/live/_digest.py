"""One hash for a value made of columns: whether ranks that computed a plan by themselves computed the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def value_digest(value: Any) -> str:
    """Return the hash of a value of dataclasses, tuples, numpy columns and what has a repr of its own, as hex.

    Examples:
        >>> value_digest((1, np.arange(3))) == value_digest((1, np.arange(3)))
        True
        >>> value_digest((1, np.arange(3))) == value_digest((1, np.arange(4)))
        False
    """
    state = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        # The length says where a part ends, so that two values never run together into the same bytes.
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str} {value.shape}".encode()
        yield np.ascontiguousarray(value).view(np.uint8).ravel().data
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        yield f"tuple {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()
