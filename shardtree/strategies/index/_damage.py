"""Files checked against the hashes of their blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import CheckpointingException
from ...storage import BLOCK_BYTES, BlockHasher, StoredFile
from .._values import Checkpoint, Damage
from ._columns import Index
from ._rows import file_at
from ._texts import text_at

_STEP_BYTES = 16 * BLOCK_BYTES


def file_damage(checkpoint: Checkpoint, index: Index, number: int) -> Iterator[Damage]:
    """Yield what is wrong with one of an index's files: its length, or blocks whose hashes differ.

    Args:
        checkpoint: where the file is.
        index: what describes it; where that has no hashes of it, only its length is looked at.
        number: the file's number in the index.
    """
    file = file_at(index, number)
    length = checkpoint.storage.length(file.name)
    if length != file.length:
        what = "no such file" if length is None else f"{length} bytes where {file.length} were saved"
        yield Damage(file.name, what, 0, file.length, _keys(index, number, 0, file.length))
        return
    if file.hashes is None:
        return
    try:
        found = _hashes(checkpoint, file)
    except CheckpointingException as error:
        yield Damage(file.name, str(error), 0, file.length, _keys(index, number, 0, file.length))
        return
    for block, known in enumerate(file.hashes.tolist()):
        if found.get(block) != known:
            begin, end = block * BLOCK_BYTES, min(file.length, (block + 1) * BLOCK_BYTES)
            yield Damage(file.name, "the hash of a block differs", begin, end, _keys(index, number, begin, end))


def _hashes(checkpoint: Checkpoint, file: StoredFile) -> dict[int, int]:
    hasher = BlockHasher(file.length)
    room = memoryview(bytearray(min(_STEP_BYTES, file.length)))
    with checkpoint.storage.open(file.name) as reader:
        for byte in range(0, file.length, _STEP_BYTES):
            part = room[: min(_STEP_BYTES, file.length - byte)]
            reader.read_into(byte, [part])
            hasher.update(part, byte)
            checkpoint.options.progress(part.nbytes)
    return hasher.hashes


def _keys(index: Index, file: int, begin: int, end: int) -> tuple[str, ...]:
    """Return the keys of tensors, and unique keys of objects, that have bytes in a stretch of a file."""
    found: list[str] = []
    for name, group in (("key", "chunk"), ("object", "object")):
        of_file, byte, length = (getattr(index, f"{group}_{column}") for column in ("file", "byte", "length"))
        rows = np.flatnonzero((of_file == file) & (byte < end) & (byte + length > begin))
        numbers = np.unique(index.chunk_key[rows]) if group == "chunk" else rows
        text, start = getattr(index, f"{name}_text"), getattr(index, f"{name}_start")
        found += [text_at(text, start, number) for number in numbers.tolist()]
    return tuple(found)
