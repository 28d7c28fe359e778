"""`.metadata` as bytes: the pickle that torch.distributed.checkpoint reads, made without importing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ...codec import Global, New, Reduced, dtype_name, write_pickle
from ...errors import TreePath
from ...layouts import ShardColumns, TensorKind
from ._write_collect import Archive, Stored

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SIZE = Global("torch", "Size")

DCP_VERSION = "1.0.0"
"""What torch.distributed.checkpoint calls this version of its format."""

Paths = Mapping[str, TreePath]


def encode_index_file(
    stored: Stored, save_id: str, values: Mapping[str, Archive] | None = None, paths: Paths | None = None
) -> bytes:
    """Return `.metadata`'s bytes: a pickle of protocol 4 of a `Metadata` of torch.distributed.checkpoint.

    It says nothing of where the checkpoint was saved to, as that library's own does.

    Args:
        stored: the archives of tensors and objects.
        save_id: the save's name.
        values: the archives of plain values, by name.
        paths: each name's place in the nested dict that was saved; None where the format keeps none.

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
    """Return what an archive is looked up by; the number among its tensor's chunks is a hint that saves a search."""
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
    """Return an instance as pickle makes it: without its constructor's help, so that fields may come and go."""
    return New(_class(module, name), (), state or None)


@cache
def _class(module: str, name: str) -> Global:
    return Global(module, name)
