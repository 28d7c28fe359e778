"""CRC32, the checksum of zip archives. The package isal, if installed, computes it faster than zlib."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module

Buffer = bytes | bytearray | memoryview


def crc32(data: Buffer, before: int = 0) -> int:
    """Return the CRC32 of bytes; to continue a checksum, pass the CRC32 of all earlier bytes as `before`.

    Examples:
        >>> hex(crc32(b"123456789")), crc32(b"789", crc32(b"123456")) == crc32(b"123456789")
        ('0xcbf43926', True)
    """
    return _fastest()(data, before)


@cache
def _fastest() -> Callable[[Buffer, int], int]:
    try:
        fast: Callable[[Buffer, int], int] = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return fast


def crc32_thread_bytes() -> int:
    """Return the size in bytes from which computing a CRC32 takes longer than moving the bytes to another thread."""
    return 1024 * 1024 if _fastest() is zlib.crc32 else 16 * 1024 * 1024
