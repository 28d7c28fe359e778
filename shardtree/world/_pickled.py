"""Values on their way between ranks, as bytes.

Unpickling runs what the bytes say. These bytes come from the ranks of the job itself, which already run its code,
and never from a file; files have the codec.
"""

from __future__ import annotations

import pickle
from typing import Any

from ..errors import UnsupportedValue, WorldError, error_text


def pack(what: str, value: object) -> bytes:
    """Return a value as bytes.

    Args:
        what: the collective that wants it, for the error.

    Raises:
        UnsupportedValue: if it can't be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise UnsupportedValue(
            error_text(
                f"{what}: a {type(value).__qualname__} can't go to another rank",
                found=f"{type(error).__name__}: {error}",
                expected="a picklable value",
            )
        ) from error


def unpack(what: str, data: bytes | bytearray | memoryview) -> Any:
    """Return the value that some rank packed, always a new one.

    Raises:
        WorldError: if its class can't be found or rebuilt here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WorldError(
            error_text(
                f"{what}: what another rank sent can't be rebuilt here",
                found=f"{type(error).__name__}: {error}",
                fix="Import its class on every rank, and run the same code on all of them.",
            )
        ) from error
