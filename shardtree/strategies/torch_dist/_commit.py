"""The commit: the index, and the file that makes a folder a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...codec import dtype_name
from ...codec.pickles import Global, New, Reduced, write_pickle
from ...errors import StorageError, StrategyError, TreePath, error_text
from ...geometry import Column
from ...layouts import ShardColumns, TensorKind, check_stored_shards, join_columns, select_rows
from ...storage import Storage
from .._checks import check_objects_written
from .._traits import METADATA_FILE
from .._values import Fields, PendingSave
from ._common import VALUES
from ._listing import DCP, TORCH_DIST
from ._metadata_file import INDEX_FILE
from ._write import Written, note

# What all ranks wrote, combined and checked on rank 0 before any file refers to it

Archive = tuple[str, int, int]
"""A file's name, the archive's first byte there, and its length in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Everything that a checkpoint's ranks wrote.

    Attributes:
        columns: boxes of tensors, sorted by key and offset, no two alike.
        files: the data files' names.
        file: number of each box's file, int64 (boxes,).
        byte: where its archive begins, int64 (boxes,).
        length: of its archive in bytes, int64 (boxes,).
        objects: each object's archive by unique key, sorted.
    """

    columns: ShardColumns
    files: tuple[str, ...]
    file: Column
    byte: Column
    length: Column
    objects: dict[str, Archive]


def collect(storage: Storage, written: Sequence[Written]) -> Stored:
    """Return what all ranks wrote, given by rank, as one value.

    Raises:
        StorageError: a file isn't there as its rank wrote it.
        IntegrityError: ranks disagree about a tensor, two wrote the same element or object, or a tensor is named like
            an object.
    """
    _check_files(storage, written)
    columns = join_columns([part.columns for part in written])
    check_stored_shards(columns)
    # A rank with nothing to write has no file, and no number.
    number = np.cumsum([0, *(part.file is not None for part in written)])
    file = np.concatenate([np.full(len(part.columns), base) for part, base in zip(written, number, strict=False)])
    # Readers of DCP look archives up by key and offset: two of the same would be one of them, by chance.
    rows = _sorted_once(columns)
    return Stored(
        select_rows(columns, rows),
        tuple(part.file for part in written if part.file is not None),
        file[rows],
        np.concatenate([part.byte for part in written])[rows],
        np.concatenate([part.length for part in written])[rows],
        _objects(written, columns.keys),
    )


def _check_files(storage: Storage, written: Sequence[Written]) -> None:
    for rank, part in enumerate(written):
        found = None if part.file is None else storage.length(part.file)
        if part.file is not None and found != part.file_length:
            fix = "Every rank must see the same folder; use shared storage."
            what = f"save: rank 0 doesn't see {storage.where(part.file)!r} as rank {rank} wrote it"
            raise StorageError(error_text(what, found=found, expected=f"{part.file_length} bytes", fix=fix))


def _sorted_once(columns: ShardColumns) -> Column:
    """Return the rows by key, then offset, each place once."""
    # Only chunks without elements can repeat a place, and readers look archives up by place.
    order = np.lexsort((*columns.offset.T[::-1], columns.key))
    place = np.column_stack([columns.key, columns.offset])[order]
    again = np.zeros(order.size, dtype=np.bool_)
    again[1:] = (place[1:] == place[:-1]).all(axis=1)
    return order[~again]


def _objects(written: Sequence[Written], keys: Sequence[str]) -> dict[str, Archive]:
    rows = sorted((key, part.file or "", byte, length) for part in written for key, byte, length in part.objects)
    check_objects_written([row[0] for row in rows], keys)
    return {key: (file, byte, length) for key, file, byte, length in rows}


def stored_by(pending: PendingSave, backend: str) -> Stored:
    """Return what the sharded strategy of a backend left in the memo about its files.

    Raises:
        StrategyError: another strategy wrote the shards.
    """
    stored = pending.memo.get(backend)
    if isinstance(stored, Stored):
        return stored
    fix = f"Save the shards with ({backend!r}, 1) too, or leave the common strategy out."
    raise StrategyError(error_text(f"save: no shards were written in the format {backend!r}", fix=fix))


# `.metadata`: the pickle that torch.distributed.checkpoint reads. It is written by an emitter, not by pickling torch's
# classes: that needs no import of torch.distributed, and the bytes don't depend on torch's version.

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SIZE = Global("torch", "Size")

DCP_VERSION = "1.0.0"
"""The format's version, as torch.distributed.checkpoint names it."""

Paths = Mapping[str, TreePath]


def encode_index_file(
    stored: Stored, save_id: str, values: Mapping[str, Archive] | None = None, paths: Paths | None = None
) -> bytes:
    """Return `.metadata`'s bytes: a pickle of protocol 4 of a `Metadata` of torch.distributed.checkpoint.

    Unlike that library's own, it doesn't contain the path of the folder: a checkpoint may be copied and published.

    Args:
        stored: the archives of tensors and objects.
        save_id: the save's name.
        values: the archives of plain values, by name.
        paths: each name's place in the nested dict that was saved; None if the format keeps none.

    References:
        torch.distributed.checkpoint.metadata, torch 2.13.
    """
    archives = {**stored.objects, **(values or {})}
    offsets, sizes = _boxes(stored.columns)
    state: dict[str, Any] = {name: _of_bytes() for name in archives}
    state |= _tensors(stored.columns, offsets, sizes)
    places = {_index(name): _place(*archive) for name, archive in archives.items()}
    places |= dict(_chunk_places(stored, offsets))
    metadata: dict[str, Any] = {
        "state_dict_metadata": state,
        "planner_data": None if paths is None else dict(paths),
        "storage_data": places,
        "storage_meta": _new("StorageMeta", checkpoint_id=None, save_id=save_id, load_id=None, modules=[]),
        "version": DCP_VERSION,
    }
    return write_pickle(_new("Metadata", **metadata), protocol=4)


def _boxes(columns: ShardColumns) -> tuple[list[Reduced], list[Reduced]]:
    """Return each box's offset and shape with as many axes as its tensor has."""
    axes = [len(kind.global_shape) for kind in columns.kinds]
    width = columns.offset.shape[1]
    first = [width - axes[key] for key in columns.key.tolist()]
    offsets = [_size(row[begin:]) for row, begin in zip(columns.offset.tolist(), first, strict=True)]
    sizes = [_size(row[begin:]) for row, begin in zip(columns.shape.tolist(), first, strict=True)]
    return offsets, sizes


def _tensors(columns: ShardColumns, offsets: list[Reduced], sizes: list[Reduced]) -> dict[str, New]:
    chunks: list[list[New]] = [[] for _ in columns.keys]
    for key, offset, size in zip(columns.key.tolist(), offsets, sizes, strict=True):
        chunks[key].append(_new("ChunkStorageMetadata", offsets=offset, sizes=size))
    # One object for each dtype: pickle then refers back to it, and the file stays small.
    properties = {kind.dtype: _properties(kind) for kind in columns.kinds}
    return {
        name: _new(
            "TensorStorageMetadata", properties=properties[kind.dtype], size=_size(kind.global_shape), chunks=parts
        )
        for name, kind, parts in zip(columns.keys, columns.kinds, chunks, strict=True)
    }


def _chunk_places(stored: Stored, offsets: list[Reduced]) -> Iterator[tuple[New, New]]:
    columns = stored.columns
    rows = zip(columns.key.tolist(), stored.file.tolist(), stored.byte.tolist(), stored.length.tolist(), strict=True)
    number, before = 0, -1
    for offset, (key, file, byte, length) in zip(offsets, rows, strict=True):
        number = number + 1 if key == before else 0
        before = key
        yield _index(columns.keys[key], offset, number), _place(stored.files[file], byte, length)


def _index(name: str, offset: Reduced | None = None, number: int | None = None) -> New:
    """Return the key by which DCP looks an archive up; the number among its tensor's chunks saves DCP a search."""
    return _new("MetadataIndex", fqn=name, index=number, offset=offset)


def _place(file: str, byte: int, length: int) -> New:
    return _new("_StorageInfo", _FILESYSTEM, relative_path=file, offset=byte, length=length)


def _of_bytes() -> New:
    return _new("BytesStorageMetadata")


def _properties(kind: TensorKind) -> New:
    layout = Reduced(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Reduced(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Global("torch", dtype_name(kind.dtype)), layout, False, memory_format, False)
    return New(_class(_METADATA, "TensorProperties"), (), state)


def _size(shape: list[int] | tuple[int, ...]) -> Reduced:
    return Reduced(_SIZE, (tuple(shape),))


def _new(name: str, module: str = _METADATA, **state: Any) -> New:
    """Return an instance as pickle makes it: the constructor isn't called, so versions with other fields read it."""
    return New(_class(module, name), (), state or None)


@cache
def _class(module: str, name: str) -> Global:
    return Global(module, name)


_MEGATRON_FIELDS = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")


def commit(pending: PendingSave, fields: Fields) -> None:
    """Write the index, then metadata.json with the four fields that Megatron-Core knows."""
    # No field of our own: Megatron-Core refuses a metadata.json with any other.
    stored, durable = stored_by(pending, TORCH_DIST[0]), pending.options.durable
    pending.storage.remove_folder(pending.save_id)
    # The index first: with metadata.json alone, Megatron-Core would open a folder that it can't read.
    pending.storage.replace(note(pending, INDEX_FILE), encode_index_file(stored, pending.save_id), durable=durable)
    # Otherwise the caller writes metadata.json: with another format's common state it needs more fields, and the
    # checkpoint can't be Megatron-Core's in any case.
    if fields["common_backend"] == "torch":
        data = json.dumps({name: fields[name] for name in _MEGATRON_FIELDS}).encode()
        pending.storage.replace(METADATA_FILE, data, durable=durable)


def commit_dcp(pending: PendingSave, fields: Fields) -> None:
    """Write the index, which makes the folder a checkpoint of torch.distributed.checkpoint."""
    stored, values = stored_by(pending, DCP[0]), pending.memo.get(VALUES, ())
    pending.storage.remove_folder(pending.save_id)
    # A path of one entry: a key with dots may be a dict in a dict or a parameter's name, and doesn't say which.
    paths = {key: (key,) for key in (*stored.columns.keys, *stored.objects)}
    paths |= {value.name: value.path for value in values}
    archives = {value.name: value.archive for value in values}
    data = encode_index_file(stored, pending.save_id, archives, paths)
    pending.storage.replace(INDEX_FILE, data, durable=pending.options.durable)
