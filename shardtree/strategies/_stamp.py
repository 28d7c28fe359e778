"""What tells one checkpoint in a folder from another one that took its place there: the files that decide."""

from __future__ import annotations

import re

from ..storage import Exchanging, Storage

Stamp = tuple[tuple[str, int, float], ...]
"""Name, length in bytes and time of the last change of each."""

_DECIDING = re.compile(r"metadata\.json|\.metadata|zarr\.json|\.zgroup|.*\.safetensors(\.index\.json)?", re.DOTALL)


def stamp(storage: Storage) -> Stamp:
    """Return the stamp of the checkpoint in a folder, as far as it is one that can be exchanged for another as a whole.

    Formats without a metadata.json of ours have no hash that would name one save; their files have fixed names, and
    nothing else says that they are another save's.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> storage = MemoryStorage()
        >>> storage.replace("zarr.json", b"{}", durable=False)
        >>> [name for name, *_ in stamp(storage)]
        ['zarr.json']
    """
    if not isinstance(storage, Exchanging):
        return ()
    found = ((name, storage.length(name), storage.changed(name)) for name in storage.names() if is_deciding(name))
    return tuple((name, length, changed or 0.0) for name, length, changed in found if length is not None)


def is_deciding(name: str) -> bool:
    """Return whether a file's name is one by which some format's checkpoints are found.

    Examples:
        >>> is_deciding(".metadata"), is_deciding("config.json")
        (True, False)
    """
    return _DECIDING.fullmatch(name) is not None
