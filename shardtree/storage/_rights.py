"""Whose a folder is and who may do what in it, taken over from another folder."""

from __future__ import annotations

import os
import stat
from contextlib import suppress


def take_after(folder: str, other: str) -> None:
    """Let a folder be whose another one is, and open to whom that is, with its extended attributes.

    Raises:
        OSError: one of them isn't there, or the folder is somebody else's.
    """
    like = os.stat(other)
    for owner in (-1, like.st_uid):  # whoever may not give it away may still give it to a group of theirs
        with suppress(OSError):
            os.chown(folder, owner, like.st_gid)
    os.chmod(folder, stat.S_IMODE(like.st_mode))
    for name in _attributes(other):
        with suppress(OSError):  # some are the system's own
            os.setxattr(folder, name, os.getxattr(other, name))


def _attributes(folder: str) -> list[str]:
    """Return the names of a folder's extended attributes; lists of who may do what are among them."""
    with suppress(OSError, AttributeError):  # not every file system has such, nor every system
        return os.listxattr(folder)
    return []
