"""Storages: local disks, memory and object stores; what a storage must offer; reports of loads and saves.

This module isn't stable yet: its names may still change, except those that `shardtree` itself also exports.
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
