"""Loads from zarr folders: our own folders by their index, other programs' folders by metadata and file names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointingException, CorruptCheckpoint, StrategyError, UnsupportedValue, error_text
from ...kit import (
    Buffer,
    Checkpoint,
    IndexMetadata,
    LoadPlan,
    ReadCost,
    ReadReport,
    ShardedObject,
    ShardedTensor,
    Storage,
    byte_buffer,
    check_lengths,
    check_objects_known,
    check_taken,
    dtype_name,
    fetch_from_memory,
    objects_from_index,
    old_unique_key,
    plan_shards,
    planned_cost,
    read_checked,
    read_planned,
    shard_columns,
)
from ..archives import decode_archive
from ._array import Shape, StoredArray, fill_item, zarr_name
from ._codecs import check_headers
from ._group import Group, find_arrays, needed_files, read_group
from ._own import MEGATRON, decode_columns, is_own

# This section handles chunks that aren't plain bytes, which the zarr package decodes one at a time.

_MOST_DECODED = 4 * 2**30
"""Upper bound of the bytes of a decoded chunk: crafted metadata of a few bytes may claim a huge chunk."""


def decoded(storage: Storage, array: StoredArray, cell: Shape) -> torch.Tensor:
    """Return a chunk file's elements, without those beyond the tensor's edge, as row-major bytes, uint8 (bytes,).

    Args:
        storage: Storage of the checkpoint's folder.
        array: Array of the chunk.
        cell: Index of the file in the array's grid of chunk files.

    Raises:
        StrategyError: The zarr package isn't installed.
        CorruptCheckpoint: The chunk can't be decoded.
        UnsupportedValue: The chunk is too large to be decoded at once, or its compressor isn't the last codec.
    """
    name = array.file_name(cell)
    _check_size(array, array.file_bytes)
    package = zarr_package(array.name)
    data = storage.read(name)
    # Headers are checked first: a small file could fill the memory, and a short one be read beyond its end.
    check_headers(array, data, repr(storage.where(name)))
    try:
        values = _values(package, array, name.removeprefix(f"{array.name}/"), data, cell)
    except CheckpointingException:
        raise
    except Exception as error:  # Codecs raise exceptions of any class.
        cause = f"{type(error).__name__}: {error}"[:300]
        fix = "Install the codecs of the program that wrote it. If they are installed, the file is damaged: restore it."
        raise CorruptCheckpoint(
            error_text(f"load: {storage.where(name)!r} cannot be decoded", found=cause, fix=fix)
        ) from error
    return torch.from_numpy(values.reshape(-1).view(np.uint8).copy())


def filled(array: StoredArray, length: int) -> torch.Tensor:
    """Return `length` bytes of elements that all have the array's fill value, uint8 (bytes,).

    Raises:
        UnsupportedValue: So many bytes might not fit in memory.
        CorruptCheckpoint: The fill value doesn't fit the dtype.
    """
    _check_size(array, length)
    item = torch.frombuffer(bytearray(fill_item(array.fill, array.dtype, repr(array.name))), dtype=torch.uint8)
    return item.repeat(length // item.numel())


def _check_size(array: StoredArray, length: int) -> None:
    """Raise UnsupportedValue if a decoded chunk of this length in bytes is too large for memory."""
    if length > _MOST_DECODED:
        found, expected = f"{length} bytes", f"at most {_MOST_DECODED}"
        heading = f"load: a chunk of array {array.name!r} is too large to be decoded"
        raise UnsupportedValue(
            error_text(heading, found=found, expected=expected, fix="Rewrite it with smaller chunks.")
        )


def zarr_package(what: str) -> Any:
    """Import the zarr package, which only compressed or otherwise encoded chunks need, and return it.

    Raises:
        StrategyError: The package isn't installed.
    """
    try:
        return import_module("zarr")
    except ImportError as error:
        fix = "pip install 'shardtree[zarr]'"
        text = error_text(f"load: {what!r} is compressed, which needs the zarr package", fix=fix)
        raise StrategyError(text) from error


def _values(package: Any, array: StoredArray, name: str, data: bytes, cell: Shape) -> np.ndarray[Any, Any]:
    # The package gets an array in memory with only this chunk, so that the file can come from any storage.
    file = "zarr.json" if array.prefix or "codecs" in array.document else ".zarray"
    buffer = package.core.buffer.default_buffer_prototype().buffer
    document = json.dumps(_numpy_document(array)).encode()
    store = package.storage.MemoryStore({file: buffer.from_bytes(document), name: buffer.from_bytes(data)})
    # The package's own reader decodes the chunk, so that codecs run in the way that it intends.
    region = tuple(
        slice(at * step, min(size, (at + 1) * step))
        for at, step, size in zip(cell, array.chunk, array.shape, strict=False)
    )
    zarr_array = package.open_array(store, mode="r", zarr_format=3 if file == "zarr.json" else 2)
    values = np.asarray(zarr_array[region])
    expected = tuple(part.stop - part.start for part in region)
    if values.shape != expected or values.dtype.itemsize != array.dtype.itemsize:
        raise ValueError(f"decoded to {values.shape} {values.dtype}, expected {expected} {dtype_name(array.dtype)}")
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


def _numpy_document(array: StoredArray) -> dict[str, Any]:
    """Return the array's metadata, with an unsigned integer dtype in place of one that NumPy and zarr-python lack."""
    document, name = dict(array.document), zarr_name(array.dtype)
    if name == dtype_name(array.dtype):
        return document
    fill = document.get("fill_value")
    bits = 0 if fill is None else int.from_bytes(fill_item(fill, array.dtype, repr(array.name)), "little")
    is_v3 = "codecs" in document
    words = {"data_type": name} if is_v3 else {"dtype": f"<u{array.dtype.itemsize}"}
    if is_v3 and document.get("data_type") == name:
        return document  # Our own arrays already have integers.
    return document | words | {"fill_value": bits}


# This section reads tensors: plain chunks straight from files into the destination, others decoded one at a time.


def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous CPU tensor, in place, and return a report of the reads.

    Raises:
        KeyMismatch: The checkpoint lacks a key.
        ShapeError: A tensor is stored with another global shape or dtype, or not completely.
        UnsupportedValue: torch lacks the dtype.
        CorruptCheckpoint: Stored bytes aren't what was saved, or contradict the metadata.
    """
    group = read_arrays(checkpoint)
    check_taken(group.untaken, [shard.key for shard in shards])
    columns = shard_columns(shards, checkpoint.world.rank)
    plan = plan_shards(group.index, shards, columns, group.gaps)
    memories = [shard.data for shard in shards]
    plain, virtual_plan = _split(group, plan)
    report = read_planned(checkpoint, group.index.file, plain, memories)
    for number, part in _by_file(virtual_plan):
        report += _read_virtual(checkpoint, group, number, part, memories)
    return report


def _cost(checkpoint: Checkpoint, group: Group, shards: Sequence[ShardedTensor], plan: LoadPlan) -> ReadCost:
    """Return the cost of a plan; a chunk that must be decoded counts as a read of its whole file."""
    plain, virtual_plan = _split(group, plan)
    numbers = [number for number in virtual_plan.files if group.sources[number][1] is not None]
    lengths = [checkpoint.storage.length(group.index.file(number).name) or 0 for number in numbers]
    pieces = len(virtual_plan.runs.file) + len(virtual_plan.strided.file)
    decoded_cost = ReadCost(virtual_plan.bytes_read, sum(lengths), pieces, len(numbers))
    return planned_cost(checkpoint, group.index.file, plain) + decoded_cost


def _split(group: Group, plan: LoadPlan) -> tuple[LoadPlan, LoadPlan]:
    """Split a plan in two: reads of plain files, and reads of virtual files.

    A virtual file is a chunk that must be decoded, or one that isn't stored and has the fill value.
    """
    virtual_files = np.array(sorted(group.sources), dtype=np.int64)
    runs, strided = np.isin(plan.runs.file, virtual_files), np.isin(plan.strided.file, virtual_files)
    return plan.select(~runs, ~strided), plan.select(runs, strided)


def _read_virtual(
    checkpoint: Checkpoint, group: Group, number: int, plan: LoadPlan, memories: Sequence[torch.Tensor]
) -> ReadReport:
    """Copy from one virtual file to the shards' memories, as a plan says, and return a report of the reads.

    A virtual file is a chunk that must be decoded, or one that isn't stored and has the fill value.

    Args:
        checkpoint: Checkpoint to read.
        group: Content of its folder, with the source of each virtual file.
        number: Number of the virtual file.
        plan: Reads of this file.
        memories: Data of the shards to fill.
    """
    array, cell = group.sources[number]
    file = group.index.file(number)
    if cell is not None and checkpoint.storage.length(file.name) is None:
        check_lengths(checkpoint, [file])
    chunk = filled(array, file.length) if cell is None else decoded(checkpoint.storage, array, cell)
    return fetch_from_memory({number: byte_buffer(chunk)}, plan, memories, progress=checkpoint.options.progress)


def _by_file(plan: LoadPlan) -> list[tuple[int, LoadPlan]]:
    """Split a plan by file: return pairs of a file's number and the reads of this file."""
    numbers = np.array(plan.files, dtype=np.int64)
    runs, strided = (np.argsort(rows.file, kind="stable") for rows in (plan.runs, plan.strided))
    ends = np.append(numbers, numbers[-1:] + 1)
    of_runs = np.searchsorted(plan.runs.file[runs], ends).tolist()
    of_strided = np.searchsorted(plan.strided.file[strided], ends).tolist()
    return [
        (number, plan.select(runs[slice(*run_span)], strided[slice(*strided_span)]))
        for number, run_span, strided_span in zip(
            numbers.tolist(), pairwise(of_runs), pairwise(of_strided), strict=True
        )
    ]


def read_arrays(checkpoint: Checkpoint) -> Group:
    """Return the arrays, objects and index of a checkpoint's folder, memoised for the open checkpoint."""
    # It is memoised, since listing the chunks of thousands of arrays takes long.
    return checkpoint.once(_read_arrays)


def _read_arrays(checkpoint: Checkpoint) -> Group:
    if is_own(checkpoint.fields):
        return Group(decode_columns(*read_checked(checkpoint, "index")), (), {})
    if checkpoint.fields["sharded_backend_version"] == MEGATRON:
        # These v2 arrays get no fill value, so that a missing chunk is an error.
        return read_group(checkpoint.storage, *find_arrays(checkpoint.storage))
    arrays, _, untaken = find_arrays(checkpoint.storage)
    return read_group(checkpoint.storage, [_with_fill(array) for array in arrays], untaken=untaken)


def _with_fill(array: StoredArray) -> StoredArray:
    """Return the array; a v2 array without a fill value gets 0, since zarr-python omits v2 chunks of only zeros."""
    return replace(array, fill=0) if array.fill is None and array.document["zarr_format"] == 2 else array


def load_metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
    """Return every stored tensor by key, as one whole shard without data, and every object by unique key."""
    group = read_arrays(checkpoint)
    cost, files = partial(_cost, checkpoint, group), partial(needed_files, checkpoint.storage, group)
    return IndexMetadata(group.index, untaken=group.untaken, gaps=group.gaps, cost=cost, files=files)


def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order.

    Raises:
        KeyMismatch: The checkpoint lacks an object.
        CorruptCheckpoint: Stored bytes aren't what was saved.
    """
    return objects_from_index(checkpoint, read_arrays(checkpoint).index, objects) if objects else []


# Megatron-Core's old format has a file for each object.


def load_legacy_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each sharded object, in order, from a checkpoint in Megatron-Core's old format.

    Raises:
        KeyMismatch: The checkpoint lacks an object.
        UnsafeFile: An object needs a class that isn't known to be harmless, and pickles aren't allowed.
        CorruptCheckpoint: A file isn't sound.
    """
    index = read_arrays(checkpoint).index
    keys, old_keys = [item.unique_key for item in objects], [old_unique_key(item) for item in objects]
    # Objects are looked up by both names, since old releases of Megatron-Core omitted the last number.
    exact, old = (index.find_objects(names) for names in (keys, old_keys))
    numbers = [by_key if by_key >= 0 else by_old_key for by_key, by_old_key in zip(exact, old, strict=True)]
    check_objects_known(keys, [number >= 0 for number in numbers])
    names = [index.file(int(index.object_file[number])).name for number in numbers]
    return [decoded_object(checkpoint, name, object_bytes(checkpoint, name)) for name in names]


def object_bytes(checkpoint: Checkpoint, name: str) -> Buffer:
    """Return the bytes of an object's file in Megatron-Core's old format."""
    with checkpoint.storage.open(name) as reader:
        data = reader.read()
    checkpoint.options.progress(data.nbytes)
    return data


def decoded_object(checkpoint: Checkpoint, name: str, data: Buffer) -> Any:
    """Return the value that an object's file in Megatron-Core's old format encodes, given the file's name and bytes."""
    what, options = checkpoint.storage.where(name), checkpoint.options
    return decode_archive(data, what=what, types=options.types, allow_pickle=options.allow_pickle)
