"""Megatron-Core's old format: objects in a file each, and what shows damage; its tensors are arrays like all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ...codec.archives import decode_archive
from ...errors import CheckpointingException, UnsafeFile
from ...mapping import ShardedObject
from ...storage import Buffer
from .._checks import check_objects_known, old_unique_key
from .._findings import Damage, Finding
from .._values import Checkpoint
from ..index import file_at, find_texts
from ..torch import archive_unchecked
from ._group import Group
from ._load import read_arrays
from ._verify import group_findings


def load_legacy_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: the checkpoint lacks some.
        UnsafeFile: an object needs a class that isn't known to be harmless, and pickles aren't allowed.
        CorruptCheckpoint: a file isn't sound.
    """
    index = read_arrays(checkpoint).index
    keys, old_keys = [item.unique_key for item in objects], [old_unique_key(item) for item in objects]
    # By both names: old releases of Megatron-Core left out the last number.
    exact, old = (find_texts(index.object_text, index.object_start, names) for names in (keys, old_keys))
    numbers = [one if one >= 0 else other for one, other in zip(exact, old, strict=True)]
    check_objects_known(keys, [number >= 0 for number in numbers])
    names = [file_at(index, int(index.object_file[number])).name for number in numbers]
    return [_decoded_object(checkpoint, name, _object_bytes(checkpoint, name)) for name in names]


def _object_bytes(checkpoint: Checkpoint, name: str) -> Buffer:
    with checkpoint.storage.open(name) as reader:
        data = reader.read()
    checkpoint.options.progress(data.nbytes)
    return data


def _decoded_object(checkpoint: Checkpoint, name: str, data: Buffer) -> Any:
    what, options = checkpoint.storage.where(name), checkpoint.options
    return decode_archive(data, what=what, types=options.types, allow_pickle=options.allow_pickle)


def verify_legacy_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the damage that the format can show: chunks that are missing or cut, objects with another CRC."""
    try:
        group = read_arrays(checkpoint)
    except CheckpointingException as error:
        return (Damage("", str(error)),)
    return (*group_findings(checkpoint, group), *_object_findings(checkpoint, group))


def _object_findings(checkpoint: Checkpoint, group: Group) -> Iterator[Finding]:
    for number in group.index.object_file.tolist():
        name = file_at(group.index, number).name
        try:
            data = _object_bytes(checkpoint, name)
            with suppress(UnsafeFile):  # a class that we won't make: the bytes may still be what was saved
                _decoded_object(checkpoint, name, data)
            yield from archive_unchecked(name, data)
        except CheckpointingException as error:
            yield Damage(name, str(error))
