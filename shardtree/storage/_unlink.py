"""Removing a file without waiting for what its file system does with its blocks."""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from threading import Thread

_SMALL_BYTES = 64 * 1024
_YOUNG_SECONDS = 60.0


def unlink(path: str) -> None:
    """Remove a file; of a small one of a moment ago, another thread waits for the blocks to be given back.

    These may be on their way to a disk that has gigabytes of something else to write first. Of large files the room is
    wanted when this returns.
    """
    descriptor = _opened_if_young(path)
    try:
        os.remove(path)
    except BaseException:
        _close(descriptor)
        raise
    # At the end of the process no thread can be begun, and Python 3.11 would wait for it forever.
    if descriptor is None or sys.is_finalizing() or _has_a_name(descriptor):
        _close(descriptor)
        return
    try:
        Thread(target=_close, args=(descriptor,), name="unlink", daemon=True).start()
    except RuntimeError:
        _close(descriptor)


def _has_a_name(descriptor: int) -> bool:
    """Return whether a removed file is still there: on a network, an open one stays in its folder by another name."""
    try:
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return True  # it can't be told, and the file is gone


def _opened_if_young(path: str) -> int | None:
    try:
        found = os.lstat(path)
        small = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size <= _SMALL_BYTES
        if not small or abs(time.time() - found.st_mtime) > _YOUNG_SECONDS:
            return None
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)
