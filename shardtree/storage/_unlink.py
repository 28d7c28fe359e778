"""Removing a file without waiting for what its file system does with its blocks."""

from __future__ import annotations

import os
import stat
import time
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
    # On a network, an open file stays in its folder by another name until it is closed.
    if descriptor is not None and os.fstat(descriptor).st_nlink:
        _close(descriptor)
    elif descriptor is not None:
        try:
            Thread(target=os.close, args=(descriptor,), name="unlink", daemon=True).start()
        except RuntimeError:  # none can be begun at the end of the process
            _close(descriptor)


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
        os.close(descriptor)
