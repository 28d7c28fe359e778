"""What a file system refuses and a save does without: each kind is told once a save, in the log and in its report."""

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
"""What was refused: to sync a folder, or to give one the permissions, owner or attributes of the one it replaces."""

# What CIFS, FUSE mounts, buckets that are mounted, and sandboxes answer to calls that they lack. Never EIO, ENOSPC or
# EDQUOT, by which a medium says that something is lost. EBADF: some systems sync only what is open for writing, which
# a folder can't be.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBADF}

_TEXTS: dict[RefusalKind, str] = {
    "sync": "folders can't be synced, so that a power failure may lose the names of files that were just written",
    "permissions": "a folder doesn't have the permissions of the one that it replaces",
    "owner": "a folder doesn't have the owner and group of the one that it replaces",
    "attributes": "a folder lacks extended attributes (access control lists are some) of the one that it replaces",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request to the file system that was refused, and that a save does without.

    Attributes:
        kind: "sync" of a folder, or the "permissions", "owner" or extended "attributes" of a replaced one.
        path: Folder that it was refused for: the first one, where a save keeps its refusals apart.
        reason: The system's words, or the difference that remains.

    Examples:
        >>> print(Refusal("permissions", "/mnt/run/step_10", "Operation not permitted"))
        storage: a folder doesn't have the permissions of the one that it replaces: '/mnt/run/step_10'
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
        """The path."""
        return self.path

    @property
    def what(self) -> str:
        """The consequence for a save."""
        return _TEXTS[self.kind]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Result of a save on one rank.

    Attributes:
        refusals: What the file system refused to this rank; one for each kind.

    Examples:
        >>> SaveReport((Refusal("sync", "/mnt/run", "Invalid argument"),)).refusals[0].kind
        'sync'
    """

    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Refusals:
    """The first refusal of each kind that a storage has met.

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
        """Keep a refusal, and log it, if it is the first of its kind."""
        reason = (reason.strerror or reason) if isinstance(reason, OSError) else reason
        refusal = Refusal(kind, path, str(reason))
        self._last[kind] = refusal
        # One step, since several threads write: a lock would keep storages from being pickled.
        if self._first.setdefault(kind, refusal) is refusal:
            logger.warning("%s", refusal)

    def take(self) -> tuple[Refusal, ...]:
        """Return the refusals and forget them, so that the next save with this storage tells its own."""
        taken = tuple(self._first.values())
        self._first.clear()
        self._last.clear()
        return taken

    def take_of(self, folders: Iterable[str]) -> tuple[Refusal, ...]:
        """Return the last refusal of each kind for these folders, what is in them, or their parents, and forget those.

        What was logged stays so: it isn't logged again.
        """
        places = [os.path.realpath(folder) for folder in folders]
        taken = tuple(one for one in tuple(self._last.values()) if _is_of(os.path.realpath(one.path), places))
        for refusal in taken:
            self._last.pop(refusal.kind, None)
        return taken


def _is_of(path: str, places: Iterable[str]) -> bool:
    return any(path in (place, os.path.dirname(place)) or path.startswith(f"{place}/") for place in places)


elsewhere = Refusals()
"""What file systems refused to other calls than saves, such as pins and removals, and to saves through subclasses of a
local storage or storages around one: the log says it once a process."""


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
        # A save can do without syncing a folder, not without this: only here does the system report that a write which
        # it had put off has failed. A caller who accepts that risk passes durable=False.
        fix = "Save to another file system, or with SaveOptions(durable=False), which syncs nothing."
        raise StorageError(error_text(f"cannot sync {where!r}", found=error.strerror, fix=fix)) from error


def sync(folder: str, refusals: Refusals) -> None:
    """Wait until what was made, renamed or removed in a folder is on the medium, where it can be synced at all.

    Raises:
        OSError: the folder can't be opened, or the medium has failed.
    """
    # Syncing a file doesn't sync its name: that is an entry of the folder.
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
    """Sync folders, except those that belong to another user and may not be opened."""
    for folder in folders:
        try:
            sync(folder, refusals)
        except PermissionError as error:
            # Whoever may not write there has made nothing there either.
            if os.access(folder, os.W_OK):
                refusals.note("sync", folder, error)


# Copying owner, permissions and extended attributes from one folder to another.


def copy_ownership(folder: str, other: str, refusals: Refusals) -> None:
    """Give a folder the owner, group, permissions and extended attributes of another one, as far as allowed.

    Raises:
        OSError: one of them isn't there, or the medium has failed.
    """
    like = os.stat(other)
    # Only root may change the owner, but every user may choose a group that they are in: so the group comes first.
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
            # Users may not set those of the system, which sets them itself.
            if not name.startswith(("security.", "trusted.")):
                refusals.note("attributes", other, f"{name}: {error.strerror}")
    # Looked at afterwards: some file systems accept a change and don't make it.
    now = os.stat(folder)
    if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
        refusals.note("owner", other, f"{now.st_uid}:{now.st_gid} in place of {like.st_uid}:{like.st_gid}")
    if stat.S_IMODE(now.st_mode) != mode:
        refusals.note("permissions", other, f"{stat.S_IMODE(now.st_mode):o} in place of {mode:o}")


def _attributes(folder: str) -> list[str]:
    """Return the names of a folder's extended attributes, access control lists included."""
    with suppress(OSError, AttributeError):  # not every file system has them, and macOS's Python lacks the function
        return os.listxattr(folder)
    return []
