"""Megatron-Core's old format: a zarr v2 array for each tensor, a file for each object. It is read, never written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...codec.archives import decode_archive
from ...errors import CheckpointingException, UnsafeFile
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Prospect
from ...storage import Buffer, ReadReport
from .._checks import check_objects_known, old_unique_key
from .._findings import Damage, Finding
from .._values import Checkpoint
from ..index import IndexMetadata, file_at, find_texts
from ..torch import archive_unchecked
from ._group import Group, find_arrays, read_group
from ._load import explain_group, load_from_group
from ._verify import group_findings

BACKEND, VERSION = "zarr", 1


def legacy_group(checkpoint: Checkpoint) -> Group:
    """Return the content of a checkpoint's folder, listed once."""
    # Once for each opened checkpoint: listing the chunks of thousands of arrays takes long.
    return checkpoint.once(_read_group)


def _read_group(checkpoint: Checkpoint) -> Group:
    return read_group(checkpoint.storage, *find_arrays(checkpoint.storage))


def load_legacy_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    group = legacy_group(checkpoint)
    return IndexMetadata(group.index, untaken=group.untaken)


def load_legacy_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype, or chunks of it are missing.
        CorruptCheckpoint: metadata or chunks aren't sound.
    """
    return load_from_group(checkpoint, legacy_group(checkpoint), shards)


def explain_legacy(checkpoint: Checkpoint, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would cost, from metadata and the lengths of files alone."""
    return explain_group(checkpoint, legacy_group(checkpoint), shards, cast=cast)


def load_legacy_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: the checkpoint lacks some.
        UnsafeFile: an object needs a class that isn't known to be harmless, and pickles aren't allowed.
        CorruptCheckpoint: a file isn't sound.
    """
    index = legacy_group(checkpoint).index
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
        group = legacy_group(checkpoint)
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
