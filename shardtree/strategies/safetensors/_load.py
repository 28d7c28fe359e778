"""Loading from the native format: only the bytes that are needed, straight into the targets' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...codec import Entry, decode_header, decode_tree, encode_header
from ...errors import CheckpointingException, CorruptCheckpoint, error_text
from ...geometry import Column
from ...mapping import ShardedObject, ShardedTensor
from ...plans import Prospect, Runs, runs_plan
from ...storage import BLOCK_BYTES, Buffer, ReadReport
from .._checks import check_objects_known
from .._metadata import check_lengths, read_checked
from .._values import Checkpoint
from ..index import (
    COLUMNS,
    OPTIONAL_COLUMNS,
    Index,
    IndexMetadata,
    explain_from_index,
    file_at,
    find_texts,
    index_problem,
    load_from_index,
    planned_cost,
    read_planned,
    shared_bytes_problem,
    text_at,
)

# The index as a safetensors file: written from columns, mapped when read, and checked before it is used

_TAGS = {"uint8": "U8", "int64": "I64", "uint64": "U64"}
_NUMPY = {"U8": np.uint8, "I64": np.int64, "U64": np.uint64}


def encode_index(index: Index) -> bytes:
    """Return the index as the bytes of a safetensors file; 8-byte columns first, so that each is aligned."""
    present = [name for name in (*COLUMNS, *OPTIONAL_COLUMNS) if getattr(index, name) is not None]
    columns = {name: np.ascontiguousarray(getattr(index, name)) for name in present}
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
    # A right hash proves nothing: whoever makes a checkpoint computes its hashes too.
    try:
        problem = index_problem(index) or _blocks_problem(index) or shared_bytes_problem(index)
    except (CheckpointingException, UnicodeDecodeError, IndexError, ValueError) as error:
        problem = str(error)
    if problem:
        raise _corrupt(what, problem)
    return index


def _corrupt(what: str, found: str) -> CorruptCheckpoint:
    fix = "The file was damaged or made by another program; load another checkpoint."
    return CorruptCheckpoint(error_text(f"open: the index {what!r} is not sound", found=found, fix=fix))


def _blocks_problem(index: Index) -> str | None:
    blocks = np.diff(index.file_block)
    tiled = (blocks == -(-index.file_length // BLOCK_BYTES)) | (blocks == 0)  # none without checksums
    return None if tiled.all() else "a file's blocks don't tile it"


def read_index(checkpoint: Checkpoint) -> Index:
    """Return a checkpoint's index, its columns as views of the mapped file."""
    if "index" not in checkpoint.memo:
        checkpoint.memo["index"] = decode_index(*read_checked(checkpoint, "index"))
    index: Index = checkpoint.memo["index"]
    return index


def load_common(checkpoint: Checkpoint) -> Any:
    """Return the stored common tree, with holes where shards were."""
    data, _ = read_checked(checkpoint, "common")
    options = checkpoint.options
    return decode_tree(data, types=options.types, allow_pickle=options.allow_pickle)


def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return what was read.

    Raises:
        KeyMismatch: the checkpoint lacks a key.
        ShapeError: a tensor is stored with another global shape or dtype.
        CorruptCheckpoint: stored bytes aren't what was saved.
    """
    return load_from_index(checkpoint, read_index(checkpoint), shards)


def explain(checkpoint: Checkpoint, shards: Sequence[ShardedTensor], cast: bool) -> Prospect:
    """Return what loading shards would cost, from the index alone."""
    index = read_index(checkpoint)
    return explain_from_index(index, shards, partial(planned_cost, checkpoint, index), cast=cast, refused={})


def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order."""
    if not objects:
        return []
    index = read_index(checkpoint)
    wanted = [item.unique_key for item in objects]
    numbers = find_texts(index.object_text, index.object_start, wanted)
    check_objects_known(wanted, [number >= 0 for number in numbers])
    return _read_objects(checkpoint, index, np.array(numbers, dtype=np.int64))


def _read_objects(checkpoint: Checkpoint, index: Index, numbers: Column) -> list[Any]:
    lengths = index.object_length[numbers]
    # Before memory is made: an index may claim objects of any length.
    check_lengths(checkpoint, (file_at(index, file) for file in np.unique(index.object_file[numbers]).tolist()))
    memories = [torch.empty(length, dtype=torch.uint8) for length in lengths.tolist()]
    order = np.lexsort((index.object_byte[numbers], index.object_file[numbers]))
    zero = np.zeros(order.size, dtype=np.int64)
    file, byte = index.object_file[numbers], index.object_byte[numbers]
    plan = runs_plan(Runs(file[order], byte[order], order, zero, lengths[order]))
    # Always whole blocks: a tensor with a flipped bit has a number that is a little wrong, an object is another one.
    options = replace(checkpoint.options, verify="all" if checkpoint.options.verify else None)
    read_planned(replace(checkpoint, options=options), index, plan, memories)
    names = [text_at(index.object_text, index.object_start, number) for number in numbers.tolist()]
    return [_decode(memory, name, checkpoint) for memory, name in zip(memories, names, strict=True)]


def _decode(memory: torch.Tensor, unique_key: str, checkpoint: Checkpoint) -> Any:
    options = checkpoint.options
    try:
        return decode_tree(memoryview(memory.numpy()), types=options.types, allow_pickle=options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the data of ShardedObject {unique_key!r}")
        raise


def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, and object by unique key, whole and without data."""
    return IndexMetadata(read_index(checkpoint))
