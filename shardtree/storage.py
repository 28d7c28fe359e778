"""Bytes: local files, memory, file systems behind URLs, block hashes, and the reads and writes of tensors' memory.

This module isn't stable yet: its names may still change, except those that the root has, too.
"""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "ByteRanges",
    "BytesReader",
    "Capabilities",
    "Directory",
    "Entry",
    "LocalStorage",
    "MemoryStorage",
    "ReadReport",
    "Reader",
    "Refusal",
    "Refusals",
    "SaveReport",
    "Sibling",
    "SizedBuffers",
    "Storage",
    "StoredFile",
    "object_storage",
    "wrapped",
]

if typing.TYPE_CHECKING:
    from .shell.storage import (
        ByteRanges,
        Capabilities,
        Directory,
        Entry,
        LocalStorage,
        Reader,
        ReadReport,
        Refusal,
        Refusals,
        SaveReport,
        Sibling,
        SizedBuffers,
        Storage,
        StoredFile,
        wrapped,
    )
    from .stores import BytesReader, MemoryStorage, object_storage
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..shell.storage",
        {
            "..stores": "BytesReader MemoryStorage object_storage",
        },
    )
