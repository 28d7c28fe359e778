"""Room for a new file, reserved before it is written: its blocks are then found at once and lie together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_LEAST_BYTES = 4 * 1024 * 1024
_KEEP_SIZE = 1
"""The file is as long as what was written of it, so that what a dead process left is seen to be short."""


def reserve(descriptor: int, length: int) -> int:
    """Reserve room at the beginning of a file and return how many bytes; 0 where there is no need or no way.

    All at once: while dirty pages wait for the disk, each further call takes milliseconds.
    """
    call = _fallocate()
    if length < _LEAST_BYTES or call is None:
        return 0
    # What doesn't work here (no room, a file system without it) is no failure yet: the write will tell.
    return 0 if call(descriptor, _KEEP_SIZE, 0, length) else length


@cache
def _fallocate() -> Callable[..., int] | None:
    """Return the system call; None where there is none.

    `os.posix_fallocate` won't do: where a file system can't reserve, the C library writes to every block instead.
    """
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call
