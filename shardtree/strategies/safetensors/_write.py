"""Writing one rank's data files, each by a thread of its own, up to a few."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from threading import Event

import numpy as np
import torch

from ...errors import CheckpointingException, error_text
from ...fingerprints import add_fingerprints, column_parts, piece_total, run_pieces
from ...geometry import Column
from ...layouts import ShardColumns, select_rows
from ...mapping import ShardedTensor
from ...storage import (
    BlockHasher,
    Buffer,
    Hashes,
    SizedBuffers,
    hash_column,
    hashed,
    hashed_beside,
    in_parts,
    in_threads,
    in_turn,
    tensor_buffers,
)
from .._values import PendingSave
from ._layout import Entries, Part, Source, checked_data, gathered, part_name, together

# Fingerprints of what a save writes, added up from the bytes as they are written: no second pass over memory


def with_total(buffers: Iterator[Buffer], shard: ShardedTensor, totals: list[int]) -> Iterator[Buffer]:
    """Yield a shard's buffers unchanged, and append their share of the tensor's fingerprint to a list.

    Args:
        buffers: the row-major bytes of the shard, whole elements in each.
        shard: whose they are.
        totals: the shard's share is appended once the last buffer was taken.
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


def fingerprint_column(columns: ShardColumns, totals: Sequence[Hashes | None]) -> Hashes | None:
    """Return the fingerprint of each key, uint64 (keys,), or None if no rank added any up.

    Args:
        columns: all ranks' shards, which cover their tensors once.
        totals: the shares of each rank's shards, in the order of the columns' rows.

    Raises:
        IntegrityError: the shards don't make whole tensors.
    """
    known = [each for each in totals if each is not None]
    if not known:
        return None
    found = add_fingerprints([column_parts(columns, np.concatenate(known))])
    return np.array([found[key] for key in columns.keys], dtype=np.uint64)


# What one rank wrote, sent to rank 0 for the commit


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What one rank wrote.

    Attributes:
        files: names of its data files.
        lengths: theirs, in bytes.
        hashes: of their blocks, file by file; None without checksums.
        columns: the tensor shards that it wrote.
        file: number of the rank's file for each shard, int64 (shards,).
        byte: where each shard begins in it, int64 (shards,).
        objects: unique key, file, byte and length in bytes of each object.
        totals: each shard's share of its tensor's fingerprint, uint64 (shards,); None without fingerprints.
    """

    files: tuple[str, ...]
    lengths: tuple[int, ...]
    hashes: tuple[Hashes | None, ...]
    columns: ShardColumns
    file: Column
    byte: Column
    objects: tuple[tuple[str, int, int, int], ...]
    totals: Hashes | None = None


Hashing = Callable[[Iterable[Buffer], BlockHasher], Generator[Buffer, None, None]]


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    length: int
    hashes: Hashes | None
    totals: list[int]


def write_files(
    pending: PendingSave, layout: Sequence[Part], columns: ShardColumns, row: Column, threads: int
) -> Written:
    """Write a rank's data files, and return what the index needs to know of them.

    Args:
        pending: the checkpoint.
        layout: the files.
        columns: the rank's tensor shards.
        row: the row of `columns` of each shard in the layout, -1 for an object, int64 (shards,).
        threads: how many files are written at a time.

    Raises:
        ShapeError: a tensor was changed since the save began.
        StorageError: a file can't be written.
    """
    names = tuple(
        part_name(pending.save_id, pending.world.rank, pending.world.size, part) for part in range(len(layout))
    )
    # Made again: an abandoned request, whose folder was removed, may be run once more.
    pending.storage.make_folder(pending.save_id, durable=pending.options.durable)
    files = _write_all(pending, names, layout, threads)
    if pending.options.durable and names:
        pending.storage.sync_folder(pending.save_id)
    rows, file_of, byte_of = _places(layout, row)
    return Written(
        files=names,
        lengths=tuple(file.length for file in files),
        hashes=tuple(file.hashes for file in files),
        columns=select_rows(columns, rows),
        file=file_of,
        byte=byte_of,
        objects=tuple(_objects(layout)),
        totals=_sums(files) if pending.options.fingerprint else None,
    )


def _places(layout: Sequence[Part], row: Column) -> tuple[Column, Column, Column]:
    """Return the rows of the tensor shards in the order in which they are written, their files and first bytes."""
    none = np.zeros(0, dtype=np.int64)
    rows = np.concatenate([none, *(row[part.entries.number] for part in layout)])
    file = np.concatenate([none, *(np.full(len(part.byte), number) for number, part in enumerate(layout))])
    byte = np.concatenate([none, *(part.byte for part in layout)])
    tensors = rows >= 0
    return rows[tensors], file[tensors], byte[tensors]


def _objects(layout: Sequence[Part]) -> Iterator[tuple[str, int, int, int]]:
    for number, part in enumerate(layout):
        columns = (part.entries.sources, part.entries.keys, part.byte.tolist(), part.entries.length.tolist())
        for source, key, byte, length in zip(*columns, strict=True):
            if isinstance(source, bytes):
                yield key, number, byte, length


def _sums(files: Sequence[_File]) -> Hashes:
    return np.array([*chain.from_iterable(file.totals for file in files)], dtype=np.uint64)


def _write_all(pending: PendingSave, names: Sequence[str], layout: Sequence[Part], threads: int) -> list[_File]:
    progress = in_turn(pending.options.progress)
    # Hashing gets a thread of its own only if a single one writes: otherwise all threads are busy with copies.
    hashing = hashed if min(threads, len(layout)) > 1 else hashed_beside
    has_failed = Event()

    def write(number: int) -> _File:
        part, totals = layout[number], list[int]()
        buffers = _with_progress(_part_buffers(part, totals if pending.options.fingerprint else None), progress)
        hasher = BlockHasher() if pending.options.checksums else None
        with closing(in_parts(buffers) if hasher is None else hashing(buffers, hasher)) as stream:
            try:
                wanted = SizedBuffers(part.length, _until_failure(stream, has_failed))
                length = pending.storage.write(names[number], wanted, durable=pending.options.durable)
            except _OtherFailed:
                # `in_threads` raises the other thread's error, which says what happened.
                return _File(0, None, [])
        return _File(length, None if hasher is None else hash_column(hasher), totals)

    return in_threads(write, range(len(layout)), threads, stop=has_failed.set)


class _OtherFailed(Exception):
    """Another file of the same save can't be written."""


def _until_failure(buffers: Iterable[Buffer], has_failed: Event) -> Iterator[Buffer]:
    for buffer in buffers:
        if has_failed.is_set():
            raise _OtherFailed
        yield buffer


def _part_buffers(part: Part, totals: list[int] | None) -> Iterator[Buffer]:
    yield memoryview(part.header)
    entries = part.entries
    for rows in together(entries) if totals is None else _each(entries):
        sources = entries.sources[rows]
        if len(sources) > 1:
            yield gathered([source for source in sources if isinstance(source, ShardedTensor)])
            continue
        buffers = _source_buffers(sources[0])
        if totals is not None and isinstance(sources[0], ShardedTensor):
            buffers = with_total(buffers, sources[0], totals)
        size = 0
        for buffer in buffers:
            size += buffer.nbytes
            yield buffer
        if size != entries.length[rows.start]:
            found, expected = f"{size} bytes of data", f"{entries.length[rows.start]} bytes"
            what = f"save: {entries.keys[rows.start]!r} changed its size"
            raise CheckpointingException(error_text(what, found=found, expected=expected))


def _each(entries: Entries) -> Iterator[slice]:
    return (slice(row, row + 1) for row in range(len(entries)))


def _source_buffers(source: Source) -> Iterator[Buffer]:
    if isinstance(source, bytes):
        yield memoryview(source)
    else:
        yield from tensor_buffers(checked_data(source))


def _with_progress(buffers: Iterator[Buffer], progress: Callable[[int], None]) -> Iterator[Buffer]:
    for buffer in buffers:
        yield buffer
        progress(buffer.nbytes)
