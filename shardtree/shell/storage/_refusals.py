"""Refused requests: the file system refuses, for example, to sync a folder, and the save goes on without that.

A save reports one refusal of each kind.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...errors import StorageError, error_text

logger = logging.getLogger("shardtree")

RefusalKind = Literal["sync", "permissions", "owner", "attributes"]
"""The refused request: to sync a folder, or to copy the permissions, owner or attributes of a replaced folder."""

# Errors with which CIFS, FUSE mounts, mounted buckets and sandboxes answer calls that they don't support. EIO, ENOSPC
# and EDQUOT aren't among them: these mean that data is lost. EBADF is: some systems sync only files that are open for
# writing, which a folder can't be.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBADF}

_TEXTS: dict[RefusalKind, str] = {
    "sync": "folders cannot be synced, so a power failure may lose the names of files that were just written",
    "permissions": "a folder does not have the permissions of the one that it replaces",
    "owner": "a folder does not have the owner and group of the one that it replaces",
    "attributes": "a folder lacks extended attributes (such as access control lists) of the one that it replaces",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the file system refused and the save did without.

    Attributes:
        kind: Refused request: to "sync" a folder, or to copy "permissions", "owner" or extended "attributes" to it.
        path: Folder of the refused request. If several requests of a kind were refused, a save reports the first one; a
            save through a subclass or a wrapper of a local storage reports the last one.
        reason: Message of the system, or the difference that remains.

    Examples:
        >>> print(Refusal("permissions", "/mnt/run/step_10", "Operation not permitted"))
        storage: a folder does not have the permissions of the one that it replaces: '/mnt/run/step_10'
          found Operation not permitted
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    kind: RefusalKind
    path: str
    reason: str

    def __str__(self) -> str:
        return error_text(f"storage: {self.what}: {self.path!r}", found=self.reason)

    @property
    def key(self) -> str:
        """The folder's path."""
        return self.path

    @property
    def what(self) -> str:
        """The consequence of the refused request for a save, as text."""
        return _TEXTS[self.kind]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Result of a save on one rank.

    Attributes:
        refusals: Requests that the file system refused to this rank, one of each kind.

    Examples:
        >>> SaveReport((Refusal("sync", "/mnt/run", "Invalid argument"),)).refusals[0].kind
        'sync'
    """

    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Refusals:
    """A record of refused requests: the first and the last refusal of each kind.

    Examples:
        >>> refusals = Refusals()
        >>> for folder in ("/mnt/run", "/mnt/run/step_10"):
        ...     refusals.note("sync", folder, "Invalid argument")
        >>> [refusal.path for refusal in refusals.take()], refusals.take()
        (['/mnt/run'], ())
    """

    _first: dict[RefusalKind, Refusal] = field(default_factory=dict)
    _last: dict[RefusalKind, Refusal] = field(default_factory=dict)

    def note(self, kind: RefusalKind, path: str, reason: object) -> None:
        """Record a refusal, and log the first of each kind."""
        reason = (reason.strerror or reason) if isinstance(reason, OSError) else reason
        refusal = Refusal(kind, path, str(reason))
        self._last[kind] = refusal
        # Several threads write, so the check and the change are one atomic call; a lock couldn't be pickled.
        if self._first.setdefault(kind, refusal) is refusal:
            logger.warning("%s", refusal)

    def take(self) -> tuple[Refusal, ...]:
        """Return and forget the refusals, so that the next save with this storage reports its own."""
        taken = tuple(self._first.values())
        self._first.clear()
        self._last.clear()
        return taken

    def take_of(self, folders: Iterable[str]) -> tuple[Refusal, ...]:
        """Return and forget the last refusal of each kind if it concerns these folders, their content or their parents.

        `note` still remembers that a refusal of the kind was logged, and won't log another.
        """
        places = [os.path.realpath(folder) for folder in folders]
        taken = tuple(one for one in tuple(self._last.values()) if _is_of(os.path.realpath(one.path), places))
        for refusal in taken:
            self._last.pop(refusal.kind, None)
        return taken


def _is_of(path: str, places: Iterable[str]) -> bool:
    return any(path in (place, os.path.dirname(place)) or path.startswith(f"{place}/") for place in places)


elsewhere = Refusals()
"""Refusals to calls other than saves, such as pins and removals, and to saves through a subclass or a wrapper of a
local storage. Each kind is logged once per process."""


# Syncing to the medium.


def sync_file(descriptor: int, where: str) -> None:
    """Wait until a file's bytes are on the medium.

    Raises:
        StorageError: the file system can't sync files.
        OSError: the medium has failed or is full.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        # A save can do without syncing folders, but not without this: only here does the system report the failure of
        # a delayed write. A caller who accepts that risk passes durable=False.
        fix = "Save to another file system, or pass SaveOptions(durable=False), which syncs nothing."
        raise StorageError(error_text(f"cannot sync {where!r}", found=error.strerror, fix=fix)) from error


def sync(folder: str, refusals: Refusals) -> None:
    """Wait until all entries made, renamed or removed in a folder are on the medium, if folders can be synced.

    Raises:
        OSError: the folder can't be opened, or the medium has failed.
    """
    # Syncing a file doesn't sync its name, which is an entry of the folder.
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        refusals.note("sync", folder, error)
    finally:
        os.close(descriptor)


def sync_above(folders: Iterable[str], refusals: Refusals) -> None:
    """Sync folders; skip those that this process may neither open nor write to."""
    for folder in folders:
        try:
            sync(folder, refusals)
        except PermissionError as error:
            # A process without permission to write has made no entry in this folder.
            if os.access(folder, os.W_OK):
                refusals.note("sync", folder, error)


# Copying owner, permissions and extended attributes from one folder to another.


def copy_ownership(folder: str, other: str, refusals: Refusals) -> None:
    """Give a folder the owner, group, permissions and extended attributes of another one, as far as allowed.

    Raises:
        OSError: one of the folders doesn't exist, or the medium has failed.
    """
    like = os.stat(other)
    # Only root may change the owner, but users may choose among their groups: so the group is set first.
    for owner in (-1, like.st_uid):
        with suppress(OSError):
            os.chown(folder, owner, like.st_gid)
    mode = stat.S_IMODE(like.st_mode)
    try:
        os.chmod(folder, mode)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        refusals.note("permissions", other, error)
    for name in _attributes(other):
        try:
            os.setxattr(folder, name, os.getxattr(other, name))
        except OSError as error:
            # Users may not set the system's attributes; the system does that itself.
            if not name.startswith(("security.", "trusted.")):
                refusals.note("attributes", other, f"{name}: {error.strerror}")
    # The result is read back: some file systems accept a change without making it.
    now = os.stat(folder)
    if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
        refusals.note("owner", other, f"{now.st_uid}:{now.st_gid} instead of {like.st_uid}:{like.st_gid}")
    if stat.S_IMODE(now.st_mode) != mode:
        refusals.note("permissions", other, f"{stat.S_IMODE(now.st_mode):o} instead of {mode:o}")


def _attributes(folder: str) -> list[str]:
    """Return the names of a folder's extended attributes, access control lists included."""
    with suppress(OSError, AttributeError):  # some file systems have no attributes; macOS's Python lacks the function
        return os.listxattr(folder)
    return []
