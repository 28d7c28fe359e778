"""The index, built of shards and their places, and as a file: checked before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...codec import Entry, decode_header, dtype_name, encode_header
from ...geometry import Column, box_column, volumes, widen
from ...layouts import ShardColumns
from ...storage import Buffer, StoredFile
from .._metadata import read_checked, write_checked
from .._traits import METADATA_FILE
from .._values import Checkpoint, Fields, PendingSave
from ._columns import COLUMNS, OPTIONAL_COLUMNS, Index, text_columns
from ._sound import sound_index, unsound_index

ObjectRow = tuple[str, int, int, int]
"""An object's unique key, the number of its file, its first byte there and its length in bytes."""


def build_index(
    columns: ShardColumns,
    file: Column,
    byte: Column,
    *,
    files: Sequence[StoredFile],
    objects: Sequence[ObjectRow] = (),
) -> Index:
    """Return the index of stored shards and objects.

    Args:
        columns: the shards, in any order; their ranks don't matter.
        file: the number of each one's file, int64 (shards,).
        byte: where each begins in its file, int64 (shards,).
        files: the files, with their block hashes if they have any.
        objects: the objects, in any order.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))])
        >>> index = build_index(columns, np.array([0]), np.array([64]), files=[StoredFile("w.bin", 88)])
        >>> index.chunk_byte.tolist(), index.chunk_length.tolist()
        ([64], [24])
    """
    # Sorted by key, so that a tensor's chunks are neighbours: they are found by bisection.
    order = np.lexsort((columns.start, *columns.offset.T[::-1], columns.key))
    key = columns.key[order]
    key_text, key_start = text_columns(columns.keys)
    # Names, not numbers of ours: torch adds dtypes faster than a format adds versions.
    dtypes = sorted({dtype_name(kind.dtype) for kind in columns.kinds})
    number = {name: position for position, name in enumerate(dtypes)}
    dtype_text, dtype_start = text_columns(dtypes)
    # Right-aligned matrices of one width: a plan handles all tensors at once, and row-major order stays as it is.
    shapes = widen(box_column([kind.global_shape for kind in columns.kinds], fill=1), columns.offset.shape[1], 1)
    offset, shape = widen(columns.offset, shapes.shape[1], 0), widen(columns.shape, shapes.shape[1], 1)
    elements = np.where(columns.start < 0, volumes(shape), columns.stop - columns.start)
    rows = sorted(objects)
    object_text, object_start = text_columns([row[0] for row in rows])
    numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 3)
    file_text, file_start = text_columns([one.name for one in files])
    hashes = [np.zeros(0, dtype=np.uint64) if one.hashes is None else one.hashes for one in files]
    return Index(
        key_text=key_text,
        key_start=key_start,
        key_axes=_int64([len(kind.global_shape) for kind in columns.kinds]),
        key_prepended=_int64([kind.prepend_axis_num for kind in columns.kinds]),
        key_dtype=_int64([number[dtype_name(kind.dtype)] for kind in columns.kinds]),
        key_shape=shapes,
        dtype_text=dtype_text,
        dtype_start=dtype_start,
        chunk_key=key,
        chunk_offset=offset[order],
        chunk_shape=shape[order],
        chunk_start=columns.start[order],
        chunk_stop=columns.stop[order],
        chunk_file=file[order],
        chunk_byte=byte[order],
        chunk_length=(elements * columns.item_size[columns.key])[order],
        object_text=object_text,
        object_start=object_start,
        object_file=numbers[:, 0],
        object_byte=numbers[:, 1],
        object_length=numbers[:, 2],
        file_text=file_text,
        file_start=file_start,
        file_length=_int64([one.length for one in files]),
        file_block=np.cumsum([0, *(one.size for one in hashes)], dtype=np.int64),
        block_hash=np.concatenate([*hashes, np.zeros(0, dtype=np.uint64)]),
    )


def _int64(values: Sequence[int]) -> Column:
    return np.array(values, dtype=np.int64)


# The file: columns as safetensors


_TAGS = {"uint8": "U8", "int64": "I64", "uint64": "U64"}
_NUMPY = {"U8": np.uint8, "I64": np.int64, "U64": np.uint64}


def encode_index(index: Index) -> bytes:
    """Return the index as the bytes of a safetensors file."""
    present = [name for name in (*COLUMNS, *OPTIONAL_COLUMNS) if getattr(index, name) is not None]
    columns = {name: np.ascontiguousarray(getattr(index, name)) for name in present}
    # 8-byte columns first: each is then aligned in the file's bytes, so that a reader uses it where it lies.
    ordered = sorted(columns.items(), key=lambda column: -column[1].itemsize)
    entries, offset = [], 0
    for name, column in ordered:
        tag = _TAGS[column.dtype.name]
        entries.append(Entry(name, tag, column.shape, offset, offset + column.nbytes))
        offset += column.nbytes
    return b"".join([encode_header(entries), *(column.tobytes() for _, column in ordered)])


def decode_index(data: Buffer, what: str) -> Index:
    """Return the index that a file's bytes hold, its columns as views of them.

    Args:
        data: the whole file.
        what: the file's name, for messages.

    Raises:
        CorruptCheckpoint: a column is missing or of another kind, or columns contradict each other.
    """
    entries, start = decode_header(data, data.nbytes)
    columns: dict[str, Any] = {}
    for entry in entries:
        if entry.name in COLUMNS or entry.name in OPTIONAL_COLUMNS:
            dtype = _NUMPY.get(entry.tag)
            if dtype is None:
                raise unsound_index(what, f"column {entry.name!r} has dtype {entry.tag}")
            part = data[start + entry.start : start + entry.stop]
            columns[entry.name] = np.frombuffer(part, dtype=dtype).reshape(entry.shape)
        elif not entry.name.startswith("x_"):
            raise unsound_index(what, f"unknown column {entry.name!r}: it was written by a later version")
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise unsound_index(what, f"columns {', '.join(missing)} are missing")
    return sound_index(Index(**columns), what)


def read_index(checkpoint: Checkpoint) -> Index:
    """Return the index that `save_with_index` wrote, its columns as views of the file's bytes.

    Raises:
        CorruptCheckpoint: the file isn't what was saved.

    Examples:
        >>> import torch, shardtree as st
        >>> storage = st.storage.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))}, storage)
        >>> read_index(st.open_checkpoint(storage).checkpoint).key_shape.tolist()
        [[2, 3]]
    """
    return decode_index(*read_checked(checkpoint, "index"))


def write_index(pending: PendingSave, index: Index) -> Fields:
    """Write the index into the save's folder, and return its fields of metadata.json."""
    name = f"{pending.save_id}/index-0.safetensors"
    entry = write_checked(pending.storage, name, encode_index(index), durable=pending.options.durable)
    return {"save_id": pending.save_id, "index": entry}


def index_name(checkpoint: Checkpoint) -> str:
    """Return the name of the index file; that of metadata.json if this names none."""
    entry = checkpoint.fields.get("index")
    return str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE
