"""Storages other than local disks: object stores, fsspec's file systems, and this process's memory."""

import typing

from ._object_url import in_larger_requests, object_storage

if typing.TYPE_CHECKING:
    from ._memory import BytesReader, MemoryStorage
else:
    from ..kit import later

    __getattr__ = later(
        __name__,
        {
            "._memory": "BytesReader MemoryStorage",
        },
    )
