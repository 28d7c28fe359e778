"""Room for a file that grows, reserved ahead: its blocks are then found at once and lie together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_LEAST_BYTES = 4 * 1024 * 1024
_MOST_BYTES = 64 * 1024 * 1024


def reserve(descriptor: int, length: int) -> int:
    """Reserve room behind the end of a file and return how many bytes; 0 where there is no need or no way.

    A file gets as much again as it has, from some length on, and the caller cuts off what it doesn't use.
    """
    call = _fallocate()
    if length < _LEAST_BYTES or call is None:
        return 0
    # What doesn't work here (no room, a file system without it) is no failure yet: the write will tell.
    room = min(length, _MOST_BYTES)
    return 0 if call(descriptor, 0, length, room) else room


@cache
def _fallocate() -> Callable[..., int] | None:
    """Return the system call; None where there is none.

    `os.posix_fallocate` won't do: where a file system can't reserve, the C library writes to every block instead.
    """
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call
