"""What tests of formats make folders of: files by name, archives of torch.save, a flipped bit."""

from __future__ import annotations

import io
from typing import Any

import torch

from shardtree.storage import MemoryStorage

Files = dict[str, bytes]


def folder_of(files: Files) -> MemoryStorage:
    """Return a folder in memory."""
    storage = MemoryStorage()
    for name, data in files.items():
        storage.write(name, [memoryview(data)], durable=False)
    return storage


def archive(value: Any) -> bytes:
    """Return what torch.save writes of a value."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def flipped(files: Files, name: str, bit: int) -> Files:
    """Return files of which one has a flipped bit."""
    data = bytearray(files[name])
    data[bit // 8] ^= 1 << bit % 8
    return files | {name: bytes(data)}
