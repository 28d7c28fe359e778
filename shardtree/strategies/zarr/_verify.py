"""Checking a zarr folder of ours: every chunk file against its hashes, every zarr.json against the group's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...codec import canonical_json
from ...errors import CheckpointingException, CorruptCheckpoint
from ...storage import BLOCK_BYTES, BlockHasher, StoredFile
from .._values import Checkpoint, Damage
from ..base import StrategyAction, register_default_strategy
from ..index import Index, file_at, text_at
from ..safetensors._files import read_checked
from ._common import BACKEND, VERSION
from ._legacy import group_damage
from ._load import is_own, read_arrays
from ._remove import group_members
from ._v3 import NODE_FILE

_STEP_BYTES = 16 * BLOCK_BYTES


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Damage, ...]:
    """Return what is damaged: small files as wholes, chunk files block by block.

    A file that several ranks wrote has no hashes, and neither have arrays of other programs: there only what is
    missing or cut is seen.
    """
    if not is_own(checkpoint.fields):
        try:
            return tuple(group_damage(checkpoint, read_arrays(checkpoint)))
        except CheckpointingException as error:
            return (Damage("", str(error)),)
    found = [*_whole(checkpoint, "common"), *_documents(checkpoint)]
    try:
        index = read_arrays(checkpoint).index
    except CheckpointingException as error:
        # Without the index nobody knows the chunk files' hashes.
        return (*found, Damage(_name(checkpoint, "index"), str(error)))
    for number in range(index.file_length.size):
        found += _file_damage(checkpoint, index, number)
    return tuple(found)


def _whole(checkpoint: Checkpoint, field: str) -> Iterator[Damage]:
    try:
        if field in checkpoint.fields:
            read_checked(checkpoint, field)
    except CorruptCheckpoint as error:
        yield Damage(_name(checkpoint, field), str(error))


def _name(checkpoint: Checkpoint, field: str) -> str:
    entry = checkpoint.fields[field]
    return str(entry.get("name")) if isinstance(entry, dict) else ""


def _documents(checkpoint: Checkpoint) -> Iterator[Damage]:
    """Yield which zarr.json files differ from what the group's says of them."""
    damage = list(_whole(checkpoint, "group"))
    yield from damage
    if damage:
        return
    storage = checkpoint.storage
    for folder, document in group_members(checkpoint).items():
        name = f"{folder}/{NODE_FILE}"
        if storage.length(name) is None or storage.read(name) != canonical_json(document):
            yield Damage(name, "the metadata of an array isn't what the group's zarr.json says of it")


def _file_damage(checkpoint: Checkpoint, index: Index, number: int) -> Iterator[Damage]:
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
