"""The native format's dispatch-table rows for saves: a rank's data files, written in parallel; and the common state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import torch

from ....core import limits
from ....core.ambient import collector_paused
from ....core.codec import encode_tree
from ....core.fingerprints import piece_total, run_pieces
from ....core.geometry import Column
from ....core.layouts import ShardColumns, select_rows, shard_columns
from ....core.mapping import ShardedObject, ShardedTensor
from ....errors import CheckpointingException, error_text
from ...storage import (
    BlockHasher,
    Buffer,
    Hashes,
    SizedBuffers,
    hash_column,
    hashed,
    in_parts,
    in_threads,
    in_turn,
    is_in_place,
    make_folder,
    reported,
    sync_folder,
    tensor_buffers,
    usual_threads,
)
from .._checks import checked_data
from .._metadata import write_checked
from .._values import AsyncRequest, Fields, PendingSave
from ..index import (
    RankFiles,
    rank_file,
    save_with_index,
)
from ._layout import Entries, FilePart, gathered, parts, together

# Fingerprints are added up from the bytes as they are written, which saves a second pass over memory.


def _with_total(buffers: Iterator[Buffer], shard: ShardedTensor, totals: list[int]) -> Iterator[Buffer]:
    """Yield a shard's buffers unchanged, and compute the shard's summand in its tensor's fingerprint.

    Args:
        buffers: Row-major bytes of the shard, with whole elements in each buffer.
        shard: The shard.
        totals: List to which the summand is appended after the last buffer.
    """
    box = (1,) * shard.prepend_axis_num + shard.local_shape
    first = 0 if shard.flattened_range is None else shard.flattened_range.start
    total = 0
    for buffer in buffers:
        elements = torch.frombuffer(buffer, dtype=torch.uint8).view(shard.dtype)
        total += sum(in_threads(piece_total, run_pieces(elements, shard.global_offset, box, first)))
        first += elements.numel()
        yield buffer
    totals.append(total % 2**64)


Hashing = Callable[[Iterable[Buffer], BlockHasher], Generator[Buffer, None, None]]


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    length: int
    hashes: Hashes | None
    totals: list[int]


def write_files(
    pending: PendingSave, layout: Sequence[FilePart], columns: ShardColumns, row: Column, threads: int
) -> RankFiles:
    """Write a rank's data files, and return their description for the index.

    Args:
        pending: Checkpoint that is being written.
        layout: Layout of the files.
        columns: Columns of the rank's tensor shards.
        row: For each shard in the layout, its row in `columns`, int64 (shards,); -1 for an object.
        threads: Number of files that are written at a time.

    Raises:
        ShapeError: a tensor was changed since the save began.
        StorageError: a file can't be written.
    """
    names = tuple(rank_file(pending, "safetensors", part) for part in range(len(layout)))
    # The folder may be missing: a request that was abandoned, and whose folder was removed, may run once more.
    make_folder(pending.storage, pending.save_id, durable=pending.options.durable)
    files = _write_all(pending, names, layout, threads)
    if pending.options.durable and names:
        sync_folder(pending.storage, pending.save_id)
    none = np.zeros(0, dtype=np.int64)
    # Rows are in the order of the files, including objects.
    rows = np.concatenate([none, *(row[part.entries.number] for part in layout)])
    file = np.concatenate([none, *(np.full(len(part.byte), number) for number, part in enumerate(layout))])
    byte = np.concatenate([none, *(part.byte for part in layout)])
    return RankFiles(
        files=names,
        lengths=tuple(file.length for file in files),
        hashes=tuple(file.hashes for file in files),
        columns=select_rows(columns, rows[rows >= 0]),
        file=file[rows >= 0],
        byte=byte[rows >= 0],
        objects=tuple(_objects(layout)),
        totals=np.array([total for file in files for total in file.totals], dtype=np.uint64)
        if pending.options.fingerprint
        else None,
    )


def _objects(layout: Sequence[FilePart]) -> Iterator[tuple[str, int, int, int]]:
    for number, part in enumerate(layout):
        columns = (part.entries.sources, part.entries.keys, part.byte.tolist(), part.entries.length.tolist())
        for source, key, byte, length in zip(*columns, strict=True):
            if isinstance(source, bytes):
                yield key, number, byte, length


def _write_all(pending: PendingSave, names: Sequence[str], layout: Sequence[FilePart], threads: int) -> list[_File]:
    progress = in_turn(pending.options.progress)
    failure = Event()

    def write(number: int) -> _File:
        part, totals = layout[number], list[int]()
        buffers = reported(_part_buffers(part, totals if pending.options.fingerprint else None), progress)
        hasher = BlockHasher() if pending.options.checksums else None
        with closing(in_parts(buffers) if hasher is None else hashed(buffers, hasher)) as stream:
            try:
                # Buffers of CPU tensors stay valid; those of tensors on a device lie in reused staging memory.
                stay = all(
                    isinstance(source, bytes) or (isinstance(source.data, torch.Tensor) and source.data.is_cpu)
                    for source in part.entries.sources
                )
                content = SizedBuffers(part.length, _until_failure(stream, failure), stay=stay)
                length = pending.storage.write(names[number], content, durable=pending.options.durable)
            except _OtherFailed:
                # `in_threads` raises the other thread's error, which is the cause.
                return _File(0, None, [])
        return _File(length, None if hasher is None else hash_column(hasher), totals)

    return in_threads(write, range(len(layout)), threads, stop=failure.set)


class _OtherFailed(Exception):
    """Raised to stop writing a file after another file of the same save has failed."""


def _until_failure(buffers: Iterable[Buffer], failure: Event) -> Iterator[Buffer]:
    for buffer in buffers:
        if failure.is_set():
            raise _OtherFailed
        yield buffer


def _part_buffers(part: FilePart, totals: list[int] | None) -> Iterator[Buffer]:
    yield memoryview(part.header)
    entries = part.entries
    for rows in together(entries) if totals is None else _each(entries):
        sources = entries.sources[rows]
        if len(sources) > 1:
            yield gathered([source for source in sources if isinstance(source, ShardedTensor)])
            continue
        if isinstance(source := sources[0], bytes):
            buffers: Iterator[Buffer] = iter([memoryview(source)])
        else:
            buffers = tensor_buffers(checked_data(source))
            buffers = buffers if totals is None else _with_total(buffers, source, totals)
        size = 0
        for buffer in buffers:
            size += buffer.nbytes
            yield buffer
        if size != entries.length[rows.start]:
            found, expected = f"{size} bytes", f"{entries.length[rows.start]} bytes"
            heading = f"save: the data of {entries.keys[rows.start]!r} changed in size during the save"
            raise CheckpointingException(error_text(heading, found=found, expected=expected))


def _each(entries: Entries) -> Iterator[slice]:
    return (slice(row, row + 1) for row in range(len(entries)))


# The rows of the native format: data files by each rank, the index and the common state by rank 0.


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree as one file, and return the fields of metadata.json that describe it."""
    data = encode_tree(common, allow_pickle=pending.options.allow_pickle)
    name = f"{pending.save_id}/common.safetensors"
    entry = write_checked(pending.storage, name, data, durable=pending.options.durable)
    return {"save_id": pending.save_id, "common": entry}


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[RankFiles]:
    """Compute the layout of the data files of a rank's shards, and return the request that writes them."""
    with collector_paused():
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        threads = pending.options.threads or usual_threads()
        # Each thread would hold another copy of a lazy tensor, a tensor on a device, or a large view.
        threads = threads if threads == 1 or all(map(_in_memory, tensors)) else 1
        layout = parts(shards, allow_pickle=pending.options.allow_pickle, most_files=threads)
        columns = shard_columns(tensors, pending.world.rank)
        is_tensor = np.array([isinstance(shard, ShardedTensor) for shard in shards], dtype=np.bool_)
        row = np.where(is_tensor, np.cumsum(is_tensor) - 1, -1)
    return save_with_index(pending, partial(write_files, pending, layout, columns, row, threads))


def _in_memory(shard: ShardedTensor) -> bool:
    """Return whether a shard is on the CPU and needs at most a small copy, so that files may be written in parallel."""
    data = shard.data
    return isinstance(data, torch.Tensor) and data.is_cpu and (is_in_place(data) or data.nbytes <= limits.COPIED_BYTES)
