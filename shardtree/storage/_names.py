"""Names within a storage: relative to its folder, with ``/`` between their parts, never out of it."""

from __future__ import annotations

import re
import secrets
from pathlib import PurePosixPath

from ..errors import StorageError, error_text

_PLAIN = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.new", re.DOTALL)


def temporary_name(name: str) -> str:
    """Return a name that nobody else has, for what will be renamed to a file's own.

    Examples:
        >>> is_temporary(temporary_name("metadata.json"))
        True
    """
    return f".{name}.{secrets.token_hex(8)}.new"


def is_temporary(name: str) -> bool:
    """Return whether a name is one that `temporary_name` gives.

    Examples:
        >>> is_temporary(".metadata.json.0123456789abcdef.new"), is_temporary("notes.new")
        (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


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
    if _PLAIN.fullmatch(name):
        return name
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
