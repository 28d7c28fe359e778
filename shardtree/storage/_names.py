"""Names within a storage: relative to its folder, with ``/`` between their parts, never out of it."""

from __future__ import annotations

from pathlib import PurePosixPath

from ..errors import StorageError, error_text


def inside(name: str, root: str) -> str:
    """Return a name in its plain form; one that would leave the folder raises.

    Args:
        name: of a file or folder; "" is the storage's own folder.
        root: what errors call that folder.

    Raises:
        StorageError: the name is absolute, climbs up, or is no text that a file system takes.

    Examples:
        >>> inside("a/./b//c", "checkpoint")
        'a/b/c'
        >>> inside("../a", "checkpoint")
        Traceback (most recent call last):
        ...
        shardtree.errors.StorageError: '../a' would leave the folder 'checkpoint'
          expected a name inside it
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not _is_nameable(name):
        raise StorageError(error_text(f"{name!r} would leave the folder {root!r}", expected="a name inside it"))
    return "/".join(path.parts)


def _is_nameable(name: str) -> bool:
    try:
        name.encode("utf-8", "surrogateescape")  # a file's name may have bytes that aren't UTF-8
    except UnicodeEncodeError:
        return False
    return "\0" not in name
