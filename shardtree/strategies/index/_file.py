"""The index as a file: columns written as safetensors, mapped when read, and checked before they are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...codec import Entry, decode_header, encode_header
from ...errors import CheckpointingException, CorruptCheckpoint, error_text
from ...storage import BLOCK_BYTES, Buffer
from .._metadata import read_checked, write_checked
from .._traits import METADATA_FILE
from .._values import Checkpoint, Fields, PendingSave
from ._columns import COLUMNS, OPTIONAL_COLUMNS, Index
from ._problems import index_problem, shared_bytes_problem

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
