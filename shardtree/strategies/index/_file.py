"""The index, built of shards and their places, and as a file: mapped when it is read, and checked before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ...codec import Entry, decode_header, dtype_name, encode_header
from ...errors import CheckpointingException, CorruptCheckpoint, error_text
from ...geometry import Column, box_column, volumes, widen
from ...layouts import ShardColumns
from ...storage import BLOCK_BYTES, Buffer, StoredFile
from .._metadata import read_checked, write_checked
from .._traits import METADATA_FILE
from .._values import Checkpoint, Fields, PendingSave
from ._columns import COLUMNS, OPTIONAL_COLUMNS, Index, ascend, item_sizes, text_columns, texts

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


# Doubts about an index that was read: columns that don't fit together


_MATRICES = {"key_shape", "chunk_offset", "chunk_shape"}
_MOST_AXES = 256
_MOST_BYTES = 2.0**62  # in all files together, so that sums of lengths stay within int64


def index_problem(index: Index) -> str | None:
    """Return what is wrong with an index, None if loads can be planned on it without further checks.

    Whether all blocks need hashes is checked by each format.
    """
    # In this order: each check relies on what the ones before it have made sure of.
    return _kinds(index) or _lengths(index) or _texts(index) or _keys(index) or _files(index) or _places(index)


def _kinds(index: Index) -> str | None:
    for name in COLUMNS:
        column = getattr(index, name)
        kind = "uint64" if name == "block_hash" else "uint8" if name.endswith("_text") else "int64"
        if column.dtype.name != kind or column.ndim != (2 if name in _MATRICES else 1):
            return f"column {name!r} is {column.dtype.name} {column.shape}"
    fingerprints = index.x_fingerprint
    if fingerprints is not None and (fingerprints.dtype.name, fingerprints.shape) != ("uint64", index.key_axes.shape):
        return f"column 'x_fingerprint' is {fingerprints.dtype.name} {fingerprints.shape}"
    axes = {getattr(index, name).shape[1] for name in _MATRICES}
    return None if len(axes) == 1 and 1 <= max(axes) <= _MOST_AXES else f"the boxes' columns have {axes} axes"


def _lengths(index: Index) -> str | None:
    rows = {"key": "key_axes", "chunk": "chunk_key", "object": "object_file", "file": "file_length", "dtype": ""}
    for name in COLUMNS:
        group, _, what = name.partition("_")
        if group not in rows or what == "text":
            continue
        if group == "dtype" or name == "file_block" or (what == "start" and group != "chunk"):
            expected = getattr(index, f"{group}_start").size
        else:
            expected = getattr(index, rows[group]).size
        if len(getattr(index, name)) != expected:
            return f"column {name!r} has {len(getattr(index, name))} rows where {expected} are needed"
    counts = (("key", index.key_axes), ("object", index.object_file), ("file", index.file_length))
    wrong = [group for group, column in counts if getattr(index, f"{group}_start").size != column.size + 1]
    return f"the texts of {wrong} don't fit their rows" if wrong else None


def _texts(index: Index) -> str | None:
    for group in ("key", "dtype", "object", "file"):
        start, text = getattr(index, f"{group}_start"), getattr(index, f"{group}_text")
        if not start.size or start[0] != 0 or start[-1] != text.size or (np.diff(start) < 1).any():
            return f"the texts of {group!r} don't tile their column"
        if text.max(initial=0) > 127:
            texts(text, start)  # raises if they aren't text
        # Keys are found by bisection, which needs them sorted and each once.
        if group in ("key", "object") and not ascend(text, start):
            return f"the texts of {group!r} aren't sorted, each once"
    # Raises if they aren't text. An unknown dtype is an error of its own tensor alone: the others still load.
    texts(index.dtype_text, index.dtype_start)
    return None


def _keys(index: Index) -> str | None:
    keys, axes = index.key_axes.size, index.key_shape.shape[1]
    if keys and not (index.key_axes.min() >= 0 and index.key_axes.max() <= axes):
        return "a tensor has more axes than its shape"
    if ((index.key_prepended < 0) | (index.key_prepended > index.key_axes)).any():
        return "a tensor has more prepended axes than axes"
    if ((index.key_dtype < 0) | (index.key_dtype >= index.dtype_start.size - 1)).any():
        return "a dtype's number is out of range"
    padding = np.arange(axes) < axes - index.key_axes[:, None]
    if (index.key_shape < 0).any() or (index.key_shape[padding] != 1).any() or _too_large(index.key_shape):
        return "a global shape is out of range"
    return None


def _files(index: Index) -> str | None:
    blocks = index.file_block
    if (index.file_length < 0).any() or blocks[0] != 0 or blocks[-1] != index.block_hash.size:
        return "the files' lengths or blocks are out of range"
    return "the files' blocks are out of order" if (np.diff(blocks) < 0).any() else None


def _places(index: Index) -> str | None:
    key = index.chunk_key
    if key.size and (key[0] < 0 or key[-1] >= index.key_axes.size or (np.diff(key) < 0).any()):
        return "a chunk's key is out of range"
    offset, shape = index.chunk_offset, index.chunk_shape
    if (offset < 0).any() or (shape < 0).any() or (offset > index.key_shape[key]).any():
        return "a chunk's box is out of range"
    if (shape > index.key_shape[key] - offset).any():
        return "a chunk's box reaches beyond its tensor"
    start, stop = index.chunk_start, index.chunk_stop
    whole = (start == -1) & (stop == -1)
    if not (whole | ((start >= 0) & (start <= stop) & (stop <= volumes(shape)))).all():
        return "a chunk's flat range is out of range"
    elements = np.where(whole, volumes(shape), stop - start)
    size = item_sizes(index)[index.key_dtype[key]]
    if ((size >= 0) & (elements * size != index.chunk_length)).any():
        return "a chunk's length isn't that of its elements"
    chunks = _outside(index, index.chunk_file, index.chunk_byte, index.chunk_length)
    objects = _outside(index, index.object_file, index.object_byte, index.object_length)
    return "a chunk or object reaches beyond its file" if chunks or objects else None


def shared_bytes_problem(index: Index) -> str | None:
    """Return what is wrong if bytes of a file belong to more than one chunk or object, or a file is listed twice."""
    # No save writes that, and it guards against a small file that becomes gigabytes of tensors. Names are compared by
    # their parts: "a//b" is the same file as "a/b".
    names = texts(index.file_text, index.file_start)
    if len({"/".join(PurePosixPath(name).parts) for name in names}) != len(names):
        return "a file is there twice"
    file = np.concatenate([index.chunk_file, index.object_file])
    begin = np.concatenate([index.chunk_byte, index.object_byte])
    length = np.concatenate([index.chunk_length, index.object_length])
    if index.file_length.astype(np.float64).sum() > _MOST_BYTES:
        return "the files are longer than any storage is large"
    return "two chunks or objects share bytes of a file" if overlap(index.file_length, file, begin, length) else None


def overlap(file_length: Column, file: Column, begin: Column, length: Column) -> bool:
    """Return whether any byte ranges of files overlap; each lies in its file, int64 (ranges,) each.

    Examples:
        >>> ten, zero = np.array([10, 10]), np.array([0, 0])
        >>> overlap(ten, np.array([0, 1]), zero, ten), overlap(ten, zero, np.array([0, 4]), np.array([5, 5]))
        (False, True)
    """
    base = np.cumsum(file_length) - file_length
    rows = np.flatnonzero(length)
    place = (base[file] + begin)[rows]
    # Disjoint ranges begin and end alternately, so starts and ends can be sorted apart: two sorts of plain numbers take
    # a fraction of the time of one sort of rows.
    return bool((np.sort(place)[1:] < np.sort(place + length[rows])[:-1]).any())


def _outside(index: Index, file: Any, byte: Any, length: Any) -> bool:
    if ((file < 0) | (file >= index.file_length.size) | (byte < 0) | (length < 0)).any():
        return True
    return bool((byte > index.file_length[file] - length).any()) if file.size else False


def _too_large(shape: Any) -> bool:
    """Return whether a tensor has more bytes than an int64 counts."""
    with np.errstate(over="ignore"):
        return bool((np.prod(np.maximum(shape, 1).astype(np.float64), axis=1) > 2.0**58).any())


# The file: columns as safetensors


_TAGS = {"uint8": "U8", "int64": "I64", "uint64": "U64"}
_NUMPY = {"U8": np.uint8, "I64": np.int64, "U64": np.uint64}


def encode_index(index: Index) -> bytes:
    """Return the index as the bytes of a safetensors file."""
    present = [name for name in (*COLUMNS, *OPTIONAL_COLUMNS) if getattr(index, name) is not None]
    columns = {name: np.ascontiguousarray(getattr(index, name)) for name in present}
    # 8-byte columns first: each is then aligned in the mapped file, so that a reader uses it where it lies.
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
                raise _corrupt(what, f"column {entry.name!r} has dtype {entry.tag}")
            part = data[start + entry.start : start + entry.stop]
            columns[entry.name] = np.frombuffer(part, dtype=dtype).reshape(entry.shape)
        elif not entry.name.startswith("x_"):
            raise _corrupt(what, f"unknown column {entry.name!r}: it was written by a later version")
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise _corrupt(what, f"columns {', '.join(missing)} are missing")
    index = Index(**columns)
    # A right hash proves nothing: anyone who makes a checkpoint computes its hashes too.
    try:
        problem = index_problem(index) or blocks_problem(index) or shared_bytes_problem(index)
    except (CheckpointingException, UnicodeDecodeError, IndexError, ValueError) as error:
        problem = str(error)
    if problem:
        raise _corrupt(what, problem)
    return index


def _corrupt(what: str, found: str) -> CorruptCheckpoint:
    fix = "The file was damaged or made by another program; load another checkpoint."
    return CorruptCheckpoint(error_text(f"open: the index {what!r} is not sound", found=found, fix=fix))


def blocks_problem(index: Index) -> str | None:
    """Return what is wrong with the blocks of an index's files, None if nothing is."""
    blocks = np.diff(index.file_block)
    # A file that several ranks wrote has no hashes: no rank saw all bytes of a block. Nor has one without checksums.
    tiled = (blocks == -(-index.file_length // BLOCK_BYTES)) | (blocks == 0)
    return None if tiled.all() else "a file's blocks don't tile it"


def read_index(checkpoint: Checkpoint) -> Index:
    """Return the index that `save_with_index` wrote, its columns as views of the mapped file.

    Raises:
        CorruptCheckpoint: the file isn't what was saved.

    Examples:
        >>> import torch, shardtree as st
        >>> storage = st.storage.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))}, storage)
        >>> read_index(st.open_checkpoint(storage).checkpoint).key_shape.tolist()
        [[2, 3]]
    """
    if "index" not in checkpoint.memo:
        checkpoint.memo["index"] = decode_index(*read_checked(checkpoint, "index"))
    index: Index = checkpoint.memo["index"]
    return index


def write_index(pending: PendingSave, index: Index) -> Fields:
    """Write the index into the save's folder, and return its fields of metadata.json."""
    name = f"{pending.save_id}/index-0.safetensors"
    entry = write_checked(pending.storage, name, encode_index(index), durable=pending.options.durable)
    return {"save_id": pending.save_id, "index": entry}


def index_name(checkpoint: Checkpoint) -> str:
    """Return the name of the index file; that of metadata.json if this names none."""
    entry = checkpoint.fields.get("index")
    return str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE
