"""Megatron-Core's old format: one zarr v2 array a tensor, one file an object. It is read, never written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...codec import decode_archive
from ...errors import CheckpointingException, UnsafeFile
from ...mapping import ShardedObject, ShardedTensor
from ...storage import ReadReport
from .._object_checks import check_objects_known
from .._values import Checkpoint, Damage
from ..base import StrategyAction, register_default_strategy
from ..index import IndexMetadata, file_at, find_texts
from ._cells import missing_cells, stored_cells
from ._folder import find_arrays
from ._group import Group, read_group
from ._read import load_from_group

BACKEND, VERSION = "zarr", 1

_MOST_SHOWN = 1000
"""How many missing chunk files of one array are named."""


def legacy_group(checkpoint: Checkpoint) -> Group:
    """Return what a checkpoint's folder holds, looked up once."""
    if "group" not in checkpoint.memo:
        checkpoint.memo["group"] = read_group(checkpoint.storage, *find_arrays(checkpoint.storage))
    group: Group = checkpoint.memo["group"]
    return group


@register_default_strategy(StrategyAction.LOAD_METADATA, BACKEND, VERSION)
def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    return IndexMetadata(legacy_group(checkpoint).index)


@register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION)
def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype, or chunks of it are missing.
        CorruptCheckpoint: metadata or chunks aren't sound.
    """
    return load_from_group(checkpoint, legacy_group(checkpoint), shards)


@register_default_strategy(StrategyAction.LOAD_OBJECTS, BACKEND, VERSION)
def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: the checkpoint lacks some.
        UnsafeFile: an object needs a class that isn't known to be harmless, and pickles aren't allowed.
        CorruptCheckpoint: a file isn't sound.
    """
    index = legacy_group(checkpoint).index
    keys, old_keys = [item.unique_key for item in objects], [_old_unique_key(item) for item in objects]
    exact, old = (find_texts(index.object_text, index.object_start, names) for names in (keys, old_keys))
    numbers = [one if one >= 0 else other for one, other in zip(exact, old, strict=True)]
    check_objects_known(keys, [number >= 0 for number in numbers])
    names = [file_at(index, int(index.object_file[number])).name for number in numbers]
    return [_read_object(checkpoint, name) for name in names]


def _old_unique_key(item: ShardedObject) -> str:
    """Return the name that old releases gave an object's file: what followed the last dot was lost."""
    folder, slash, last = item.unique_key.rpartition("/")
    return f"{folder}{slash}{last.rpartition('.')[0] or last}"


def _read_object(checkpoint: Checkpoint, name: str) -> Any:
    storage, options = checkpoint.storage, checkpoint.options
    with storage.open(name) as reader:
        data = reader.mapped()
    checkpoint.options.progress(data.nbytes)
    return decode_archive(data, what=storage.where(name), types=options.types, allow_pickle=options.allow_pickle)


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Damage, ...]:
    """Return what is wrong as far as the format can tell: chunks that are missing or cut, objects with another CRC."""
    try:
        group = legacy_group(checkpoint)
    except CheckpointingException as error:
        return (Damage("", str(error)),)
    return (*group_damage(checkpoint, group), *_object_damage(checkpoint, group))


def group_damage(checkpoint: Checkpoint, group: Group) -> list[Damage]:
    """Return which chunk files of a group's arrays are missing, or aren't as long as plain chunks are."""
    storage, found = checkpoint.storage, []
    for array in group.arrays:
        cells = stored_cells(storage, array)
        absent = missing_cells(array, cells) if array.fill is None else cells[:0]
        names = [array.file_name(tuple(cell)) for cell in absent[:_MOST_SHOWN].tolist()]
        found += [Damage(name, "no such file", keys=(array.key,)) for name in names]
        if len(absent) > _MOST_SHOWN:
            found.append(Damage(array.name, f"{len(absent) - _MOST_SHOWN} more files aren't there", keys=(array.key,)))
        if not array.raw or array.inner is not None:
            continue
        for cell in cells.tolist():
            name = array.file_name(tuple(cell))
            length = storage.length(name)
            if length != array.file_bytes:
                what = f"{length} bytes where a chunk has {array.file_bytes}"
                found.append(Damage(name, what, 0, array.file_bytes, (array.key,)))
    return found


def _object_damage(checkpoint: Checkpoint, group: Group) -> list[Damage]:
    found = []
    for number in group.index.object_file.tolist():
        name = file_at(group.index, number).name
        try:
            _read_object(checkpoint, name)
        except UnsafeFile:
            continue  # whole, as far as it was read
        except CheckpointingException as error:
            found.append(Damage(name, str(error)))
    return found
