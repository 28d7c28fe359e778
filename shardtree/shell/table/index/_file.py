"""Functions that build an index from shards and their locations, write it to a file, read it, and check it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from ....core.codec import HeaderEntry, decode_header, dtype_name, encode_header
from ....core.geometry import Column, box_column, volumes, widen
from ....core.layouts import ShardColumns
from ....errors import CheckpointingException, CorruptCheckpoint, error_text, plural
from ...storage import BLOCK_BYTES, Buffer, StoredFile, in_threads
from .._metadata import read_checked, write_checked
from .._values import Checkpoint, Fields, PendingSave
from ._columns import ALL_COLUMNS, COLUMNS, Bytes, Index, ascend, int64, item_sizes, text_at, text_columns, texts

ObjectRow = tuple[str, int, int, int]
"""An object's unique key, the number of its file, and its offset and length there in bytes."""


def build_index(
    columns: ShardColumns,
    file: Column,
    byte: Column,
    *,
    files: Sequence[StoredFile],
    objects: Sequence[ObjectRow] = (),
) -> Index:
    """Build the index of a checkpoint from its shards, objects and files.

    Args:
        columns: Columns of the shards, in any order; their ranks are ignored.
        file: Position of each shard's file in `files`, int64 (shards,).
        byte: Offset of each shard in its file, int64 (shards,).
        files: Data files, with block hashes if they have any.
        objects: (unique key, position in `files`, offset, length) of each object, in any order.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))])
        >>> index = build_index(columns, np.array([0]), np.array([64]), files=[StoredFile("w.bin", 88)])
        >>> index.chunk_byte.tolist(), index.chunk_length.tolist()
        ([64], [24])
    """
    # Chunks are sorted by key, so that a tensor's chunks are adjacent and found by bisection.
    order = np.lexsort((columns.start, *columns.offset.T[::-1], columns.key))
    key = columns.key[order]
    key_text, key_start = text_columns(columns.keys)
    # Dtypes are stored by torch's names rather than numbers of ours: torch adds dtypes faster than we add versions.
    dtypes = sorted({dtype_name(kind.dtype) for kind in columns.kinds})
    number = {name: position for position, name in enumerate(dtypes)}
    dtype_text, dtype_start = text_columns(dtypes)
    # Boxes are right-aligned in matrices of one width: a plan handles all tensors at once, in the same row-major order.
    shapes = widen(box_column([kind.global_shape for kind in columns.kinds], fill=1), columns.offset.shape[1], 1)
    offset, shape = widen(columns.offset, shapes.shape[1], 0), widen(columns.shape, shapes.shape[1], 1)
    elements = np.where(columns.start < 0, volumes(shape), columns.stop - columns.start)
    rows = sorted(objects)
    object_text, object_start = text_columns([row[0] for row in rows])
    numbers = np.array([row[1:] for row in rows], dtype=np.int64).reshape(-1, 3)
    file_text, file_start = text_columns([stored.name for stored in files])
    hashes = [np.zeros(0, dtype=np.uint64) if stored.hashes is None else stored.hashes for stored in files]
    return Index(
        key_text=key_text,
        key_start=key_start,
        key_axes=int64([len(kind.global_shape) for kind in columns.kinds]),
        key_prepended=int64([kind.prepend_axis_num for kind in columns.kinds]),
        key_dtype=int64([number[dtype_name(kind.dtype)] for kind in columns.kinds]),
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
        file_length=int64([stored.length for stored in files]),
        file_block=np.cumsum([0, *(blocks.size for blocks in hashes)], dtype=np.int64),
        block_hash=np.concatenate([*hashes, np.zeros(0, dtype=np.uint64)]),
    )


# The index's file: columns in the safetensors format.


_TAGS = {"uint8": "U8", "int64": "I64", "uint64": "U64"}
_NUMPY = {"U8": np.uint8, "I64": np.int64, "U64": np.uint64}


def encode_index(index: Index) -> bytes:
    """Return the index as the bytes of a safetensors file."""
    # Columns with 8-byte items come first, which aligns each column, so that a reader can use views of the file.
    by_size = sorted(index.columns().items(), key=lambda column: -column[1].itemsize)
    entries, offset = [], 0
    for name, column in by_size:
        tag = _TAGS[column.dtype.name]
        entries.append(HeaderEntry(name, tag, column.shape, offset, offset + column.nbytes))
        offset += column.nbytes
    return b"".join([encode_header(entries), *(column.tobytes() for _, column in by_size)])


def decode_index(data: Buffer, what: str) -> Index:
    """Decode the content of an index's file; the columns are views of it.

    Args:
        data: Content of the whole file.
        what: Name of the file, for messages.

    Raises:
        CorruptCheckpoint: a column is missing or of the wrong type, or columns contradict each other.
    """
    entries, start = decode_header(data, data.nbytes)
    columns: dict[str, Any] = {}
    for entry in entries:
        if entry.name in ALL_COLUMNS:
            dtype = _NUMPY.get(entry.tag)
            if dtype is None:
                raise unsound_index(what, f"column {entry.name!r} has dtype {entry.tag}")
            part = data[start + entry.start : start + entry.stop]
            columns[entry.name] = np.frombuffer(part, dtype=dtype).reshape(entry.shape)
        elif not entry.name.startswith("x_"):
            raise unsound_index(what, f"unknown column {entry.name!r}: it was written by a later version")
    index = sound_index(columns, what)
    if problem := _unstored(index):
        raise unsound_index(what, problem)
    return index


def read_index(checkpoint: Checkpoint) -> Index:
    """Return the index that `save_with_index` wrote; its columns are views of the file's content.

    Raises:
        CorruptCheckpoint: the file is damaged.

    Examples:
        >>> import torch, shardtree as st
        >>> storage = st.storage.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))}, storage)
        >>> read_index(st.open_checkpoint(storage).checkpoint).key_shape.tolist()
        [[2, 3]]
    """
    return decode_index(*read_checked(checkpoint, "index"))


def write_index(pending: PendingSave, index: Index) -> Fields:
    """Write the index into the save's folder, and return the fields of metadata.json that describe it."""
    name = f"{pending.save_id}/index-0.safetensors"
    entry = write_checked(pending.storage, name, encode_index(index), durable=pending.options.durable)
    return {"save_id": pending.save_id, "index": entry}


# Checks of an index that was read: its columns must fit together, so that loads are planned without further checks.
# Several threads check a few thousand rows at a time: with whole columns of millions of rows, most of the time would go
# into new memory for intermediate results.

_MATRICES = {"key_shape", "chunk_offset", "chunk_shape"}
_MOST_AXES = 256
_SUMMABLE_BYTES = 2.0**62  # upper bound of the sum of all files' lengths, so that sums stay within int64
_ROWS = 2**14
"""Number of rows that are checked at once: few enough that intermediate results stay in a core's cache."""


def sound_index(columns: Mapping[str, Any], what: str) -> Index:
    """Check the columns of an index file, and return them as an `Index`; columns of unknown names are ignored.

    Raises:
        CorruptCheckpoint: Columns are missing, or contradict each other.
    """
    arrays = {name: columns[name] for name in ALL_COLUMNS if isinstance(columns.get(name), np.ndarray)}
    if missing := [name for name in COLUMNS if name not in arrays]:
        raise unsound_index(what, f"columns {', '.join(missing)} are missing")
    index = Index(**arrays)
    # A matching hash proves nothing: whoever forges a checkpoint computes its hashes too.
    try:
        problem = index_problem(index) or blocks_problem(index) or shared_bytes_problem(index)
    except (CheckpointingException, UnicodeDecodeError, IndexError, ValueError) as error:
        problem = str(error)
    if problem:
        raise unsound_index(what, problem)
    return index


def unsound_index(what: str, found: str) -> CorruptCheckpoint:
    """Return the error for an invalid index in the file `what`."""
    fix = "The file was damaged or made by another program; load another checkpoint."
    return CorruptCheckpoint(error_text(f"open: the index {what!r} is invalid", found=found, fix=fix))


def index_problem(index: Index) -> str | None:
    """Return a description of the first problem in an index; None if loads can be planned without further checks.

    Missing block hashes are no problem here: each format decides whether it needs them.
    """
    # The order matters: each check relies on the checks before it.
    return (
        _kinds(index)
        or _lengths(index)
        or _texts(index)
        or _in_parts(partial(_keys, index), index.key_axes.size)
        or _files(index)
        or _places(index)
    )


def _in_parts(check: Callable[[slice], str | None], rows: int) -> str | None:
    """Check slices of at most `_ROWS` rows, in several threads; return the first problem, or None."""
    problems = in_threads(check, (slice(first, min(first + _ROWS, rows)) for first in range(0, rows, _ROWS)))
    return next(filter(None, problems), None)


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
        group, _, field = name.partition("_")
        if group not in rows or field == "text":
            continue
        if group == "dtype" or name == "file_block" or (field == "start" and group != "chunk"):
            expected = getattr(index, f"{group}_start").size
        else:
            expected = getattr(index, rows[group]).size
        if len(getattr(index, name)) != expected:
            return f"column {name!r} has {len(getattr(index, name))} rows where {expected} are needed"
    counts = (("key", index.key_axes), ("object", index.object_file), ("file", index.file_length))
    wrong = [group for group, column in counts if getattr(index, f"{group}_start").size != column.size + 1]
    return f"the texts of {wrong} do not fit their rows" if wrong else None


def _texts(index: Index) -> str | None:
    for group in ("key", "dtype", "object", "file"):
        start, text = getattr(index, f"{group}_start"), getattr(index, f"{group}_text")
        if not start.size or start[0] != 0 or start[-1] != text.size or not _grow(start):
            return f"the texts of {group!r} do not tile their column"
        if text.max(initial=0) > 127:
            texts(text, start)  # raises if the bytes aren't UTF-8
        # Keys are found by bisection, so they must be strictly ascending.
        if group in ("key", "object") and not _ascend(text, start):
            return f"the texts of {group!r} are not sorted and distinct"
    # This raises if the bytes aren't UTF-8. An unknown dtype is an error of its own tensors only: others still load.
    texts(index.dtype_text, index.dtype_start)
    return None


def _grow(start: Column) -> bool:
    return all(in_threads(lambda rows: bool((start[rows][1:] > start[rows][:-1]).all()), _with_next(start.size)))


def _ascend(text: Bytes, start: Column) -> bool:
    def in_order(rows: slice) -> bool:
        edges = start[rows.start : rows.stop + 1]
        return ascend(text[edges[0] : edges[-1]], edges - edges[0])

    return all(in_threads(in_order, _with_next(start.size - 1)))


def _with_next(rows: int) -> list[slice]:
    """Return slices of rows that overlap by one row, so that every row is also compared with the next one."""
    return [slice(first, min(first + _ROWS + 1, rows)) for first in range(0, rows, _ROWS)]


def _keys(index: Index, rows: slice) -> str | None:
    axes, shape, front = index.key_axes[rows], index.key_shape[rows], index.key_prepended[rows]
    width, dtype = shape.shape[1], index.key_dtype[rows]
    if axes.min() < 0 or axes.max() > width:
        return "a tensor has more axes than its shape"
    if ((front < 0) | (front > axes)).any():
        return "a tensor has more prepended axes than axes"
    if dtype.min() < 0 or dtype.max() >= index.dtype_start.size - 1:
        return "a dtype's number is out of range"
    padding = np.arange(width) < width - axes[:, None]
    with np.errstate(over="ignore"):
        elements = np.prod(np.maximum(shape, 1).astype(np.float64), axis=1)
    # The bound on elements keeps the number of bytes within int64.
    if shape.min() < 0 or (padding & (shape != 1)).any() or (elements > 2.0**58).any():
        return "a global shape is out of range"
    return None


def _files(index: Index) -> str | None:
    blocks = index.file_block
    if (index.file_length < 0).any() or blocks[0] != 0 or blocks[-1] != index.block_hash.size:
        return "the files' lengths or blocks are out of range"
    return "the files' blocks are out of order" if (np.diff(blocks) < 0).any() else None


def _places(index: Index) -> str | None:
    problem = _in_parts(partial(_places_of, index, item_sizes(index)), index.chunk_key.size)
    if problem is None and _outside(index, index.object_file, index.object_byte, index.object_length):
        return _BEYOND
    return problem


def _unstored(index: Index) -> str | None:
    # A save without all ranks leaves gaps in tensors. Unlike in other formats, empty parts are chunks too.
    lacking = np.ones(index.key_axes.size, dtype=np.bool_)
    lacking[index.chunk_key] = False
    keys = [key for key in np.flatnonzero(lacking).tolist() if index.key_shape[key].all()]
    names = (text_at(index.key_text, index.key_start, key)[:200] for key in keys)
    return f"{plural(len(keys), 'tensor')} without a chunk, such as {next(names)!r}" if keys else None


_BEYOND = "a chunk or object reaches beyond its file"


def _places_of(index: Index, size_of_dtype: Column, rows: slice) -> str | None:
    # The previous row is included, so that the order of keys is checked across parts too.
    near = index.chunk_key[max(rows.start - 1, 0) : rows.stop]
    if near[0] < 0 or near[-1] >= index.key_axes.size or (near[1:] < near[:-1]).any():
        return "a chunk's key is out of range"
    key, offset, shape = index.chunk_key[rows], index.chunk_offset[rows], index.chunk_shape[rows]
    room = index.key_shape[key] - offset
    if offset.min() < 0 or shape.min() < 0 or room.min() < 0:
        return "a chunk's box is out of range"
    if (shape > room).any():
        return "a chunk's box reaches beyond its tensor"
    start, stop, elements = index.chunk_start[rows], index.chunk_stop[rows], volumes(shape)
    whole = (start == -1) & (stop == -1)
    if not (whole | ((start >= 0) & (start <= stop) & (stop <= elements))).all():
        return "a chunk's flat range is out of range"
    size, length = size_of_dtype[index.key_dtype[key]], index.chunk_length[rows]
    if ((size >= 0) & (np.where(whole, elements, stop - start) * size != length)).any():
        return "a chunk's length is not that of its elements"
    return _BEYOND if _outside(index, index.chunk_file[rows], index.chunk_byte[rows], length) else None


def shared_bytes_problem(index: Index) -> str | None:
    """Describe the problem if chunks or objects share bytes of a file, or a file is listed twice; else return None."""
    # No save shares bytes; the check also prevents that a small file becomes gigabytes of tensors. Names are compared
    # by their parts, since "a//b" is the same file as "a/b".
    if len({"/".join(PurePosixPath(name).parts) for name in index.file_names()}) != index.file_length.size:
        return "a file is listed twice"
    file, begin, length = index.chunk_file, index.chunk_byte, index.chunk_length
    if index.object_file.size:
        file = np.concatenate([file, index.object_file])
        begin = np.concatenate([begin, index.object_byte])
        length = np.concatenate([length, index.object_length])
    if index.file_length.astype(np.float64).sum() > _SUMMABLE_BYTES:
        return "the files' lengths exceed any storage's size"
    return "two chunks or objects share bytes of a file" if overlap(index.file_length, file, begin, length) else None


def overlap(file_length: Column, file: Column, begin: Column, length: Column) -> bool:
    """Return whether byte ranges overlap, given each one's `file`, `begin` and `length`; each lies inside its file.

    Examples:
        >>> ten, zero = np.array([10, 10]), np.array([0, 0])
        >>> overlap(ten, np.array([0, 1]), zero, ten), overlap(ten, zero, np.array([0, 4]), np.array([5, 5]))
        (False, True)
    """
    base = np.cumsum(file_length) - file_length
    begins = base[file]
    begins += begin
    ends = begins + length
    if length.min(initial=1) <= 0:
        begins, ends = begins[length > 0], ends[length > 0]
    # Begins and ends of disjoint ranges alternate, so they can be sorted separately: two sorts of plain numbers take a
    # fraction of the time of one sort of rows.
    in_threads(np.ndarray.sort, [begins, ends], threads=2 if begins.size > _ROWS else 1)
    return bool((begins[1:] < ends[:-1]).any())


def _outside(index: Index, file: Any, byte: Any, length: Any) -> bool:
    if ((file < 0) | (file >= index.file_length.size) | (byte < 0) | (length < 0)).any():
        return True
    return bool((byte > index.file_length[file] - length).any()) if file.size else False


def blocks_problem(index: Index) -> str | None:
    """Describe the problem if a file has some block hashes, but not one for each block; else return None."""
    blocks = np.diff(index.file_block)
    # Files that several ranks wrote have no hashes, since no rank saw all bytes of a block; nor have files without
    # checksums.
    fits = (blocks == -(-index.file_length // BLOCK_BYTES)) | (blocks == 0)
    return None if fits.all() else "a file's blocks do not tile it"
