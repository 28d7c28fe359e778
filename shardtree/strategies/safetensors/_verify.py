"""Checking a whole checkpoint against its hashes: every byte of every file."""

from __future__ import annotations

import numpy as np

from ...errors import CheckpointingException, CorruptCheckpoint
from ...storage import BLOCK_BYTES, BlockHasher, Reader, StoredFile
from .._values import Checkpoint, Damage
from ..base import StrategyAction, register_default_strategy
from ..index import Index, file_at, text_at
from ._files import read_checked
from ._load import read_index
from ._save import BACKEND, VERSION

_STEP_BYTES = 16 * BLOCK_BYTES


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Damage, ...]:
    """Return what is damaged: the common state and the index as wholes, each data file block by block."""
    found = []
    try:
        read_checked(checkpoint, "common")
    except CorruptCheckpoint as error:
        found.append(Damage(str(checkpoint.fields["common"]["name"]), str(error)))
    try:
        index = read_index(checkpoint)
    except CorruptCheckpoint as error:
        # Without the index nobody knows the data files' hashes.
        return (*found, Damage(str(checkpoint.fields["index"]["name"]), str(error)))
    for number in range(index.file_length.size):
        found += _file_damage(checkpoint, index, number)
    return tuple(found)


def _file_damage(checkpoint: Checkpoint, index: Index, number: int) -> list[Damage]:
    file = file_at(index, number)
    length = checkpoint.storage.length(file.name)
    if length != file.length:
        what = "no such file" if length is None else f"{length} bytes where {file.length} were saved"
        return [Damage(file.name, what, 0, file.length, _keys(index, number, 0, file.length))]
    try:
        with checkpoint.storage.open(file.name) as reader:
            hashes = _hashes(reader, file, checkpoint)
    except CheckpointingException as error:
        return [Damage(file.name, str(error), 0, file.length, _keys(index, number, 0, file.length))]
    expected = file.hashes if file.hashes is not None else np.zeros(0, dtype=np.uint64)
    wrong = (block for block, known in enumerate(expected.tolist()) if hashes.get(block) != known)
    spans = ((block * BLOCK_BYTES, min(file.length, (block + 1) * BLOCK_BYTES)) for block in wrong)
    return [
        Damage(file.name, "the hash of a block differs", begin, end, _keys(index, number, begin, end))
        for begin, end in spans
    ]


def _hashes(reader: Reader, file: StoredFile, checkpoint: Checkpoint) -> dict[int, int]:
    hasher = BlockHasher(file.length)
    room = memoryview(bytearray(min(_STEP_BYTES, file.length)))
    for byte in range(0, file.length, _STEP_BYTES):
        part = room[: min(_STEP_BYTES, file.length - byte)]
        reader.read_into(byte, [part])
        hasher.update(part, byte)
        checkpoint.options.progress(part.nbytes)
    return hasher.hashes


def _keys(index: Index, file: int, begin: int, end: int) -> tuple[str, ...]:
    """Return the keys of tensors, and unique keys of objects, that have bytes in a stretch of a file."""
    chunks = (index.chunk_file == file) & (index.chunk_byte < end) & (index.chunk_byte + index.chunk_length > begin)
    objects = (
        (index.object_file == file) & (index.object_byte < end) & (index.object_byte + index.object_length > begin)
    )
    tensors = np.unique(index.chunk_key[chunks]).tolist()
    return (
        *(text_at(index.key_text, index.key_start, number) for number in tensors),
        *(text_at(index.object_text, index.object_start, number) for number in np.flatnonzero(objects).tolist()),
    )
