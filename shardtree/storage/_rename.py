"""Linux's renameat2, which exchanges two folders in one step; Python has no name for it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from functools import cache
from typing import Any

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2
_NUMBERS = {"x86_64": 316, "aarch64": 276, "ppc64le": 357, "s390x": 347, "riscv64": 276, "loongarch64": 276}


def exchange_folders(one: str, other: str) -> None:
    """Give two folders each other's name, in one step.

    Raises:
        OSError: that can't be had: ENOSYS on a system without such a call, EINVAL on a file system that lacks it.
    """
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, "there is no renameat2 on this system", one)
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


@cache
def _renameat2() -> Any:
    """Return the call of the C library, or by its number where that lacks a name for it, or None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    arguments: list[Any] = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if (named := getattr(library, "renameat2", None)) is not None:
        named.argtypes = arguments
        return named
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return None
    library.syscall.argtypes = [ctypes.c_long, *arguments]
    library.syscall.restype = ctypes.c_long
    return lambda *given: library.syscall(number, *given)
