"""Small files that are always checked whole: the index and the common state."""

from __future__ import annotations

from typing import Any

from ..errors import CorruptCheckpoint, error_text
from ..storage import Buffer, Storage, digest
from ._missing import missing_file
from ._values import Checkpoint, Fields


def write_checked(storage: Storage, name: str, data: bytes, *, durable: bool) -> dict[str, Any]:
    """Write a file and return what metadata.json says of it: name, length in bytes and hash."""
    storage.write(name, [memoryview(data)], durable=durable)
    return {"name": name, "length": len(data), "digest": digest(data)}


def read_checked(checkpoint: Checkpoint, field: str) -> tuple[Buffer, str]:
    """Return the bytes of a file that metadata.json describes in one of its fields, and the file's name.

    Raises:
        CorruptCheckpoint: the file isn't there, or its bytes aren't those that were saved.
        CheckpointReplaced: it isn't there because a later save replaced the checkpoint.
    """
    name, length, expected = _entry(checkpoint.fields, field)
    where = checkpoint.storage.where(name)
    if checkpoint.storage.length(name) != length:
        raise missing_file(checkpoint, name, length)
    with checkpoint.storage.open(name) as reader:
        data = reader.mapped()
    if digest(data) != expected:
        fix = "The medium or a later program damaged it; load another checkpoint."
        raise CorruptCheckpoint(error_text(f"open: {where!r} isn't what was saved: its hash differs", fix=fix))
    return data, where


def _entry(fields: Fields, field: str) -> tuple[str, int, str]:
    entry = fields.get(field)
    if isinstance(entry, dict):
        name, length, expected = (entry.get(part) for part in ("name", "length", "digest"))
        if isinstance(name, str) and type(length) is int and isinstance(expected, str):
            return name, length, expected
    raise CorruptCheckpoint(error_text(f"open: metadata.json does not describe the {field}", found=f"{entry!r}"[:200]))
