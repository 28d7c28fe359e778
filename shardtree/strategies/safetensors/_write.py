"""One rank's data files: written by as many threads as there are files, up to a few."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from threading import Event

import numpy as np

from ...errors import CheckpointingException, error_text
from ...geometry import Column
from ...layouts import ShardColumns, select_rows
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
from .._values import Draft
from ._gather import checked_data, gathered, together
from ._layout import Item, Part, part_name
from ._totals import with_total
from ._written import Written

Hashing = Callable[[Iterable[Buffer], BlockHasher], Generator[Buffer, None, None]]


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    length: int
    hashes: Hashes | None
    totals: list[int]


def write_files(draft: Draft, layout: Sequence[Part], columns: ShardColumns, row: Column, threads: int) -> Written:
    """Write a rank's data files, and return what the index says about them.

    Args:
        draft: the checkpoint.
        layout: the files.
        columns: the rank's tensor shards.
        row: of `columns` that each shard of the layout's items has, -1 for an object, int64 (shards,).
        threads: how many files are written at a time.

    Raises:
        ShapeError: a tensor was changed since the save began.
        StorageError: a file can't be written.
    """
    names = tuple(part_name(draft.save_id, draft.world.rank, draft.world.size, part) for part in range(len(layout)))
    # A request may be tried again after its folder was removed.
    draft.storage.make_folder(draft.save_id, durable=draft.options.durable)
    files = _write_all(draft, names, layout, threads)
    if draft.options.durable and names:
        draft.storage.sync_folder(draft.save_id)
    places, objects = [], []
    for number, part in enumerate(layout):
        for item, byte in zip(part.items, part.bytes_before, strict=True):
            if item.shard is None:
                objects.append((item.key, number, byte, item.length))
            else:
                places.append((int(row[item.number]), number, byte))
    rows, file_of, byte_of = np.array(places, dtype=np.int64).reshape(-1, 3).T
    return Written(
        files=names,
        lengths=tuple(file.length for file in files),
        hashes=tuple(file.hashes for file in files),
        columns=select_rows(columns, rows),
        file=file_of,
        byte=byte_of,
        objects=tuple(objects),
        totals=_sums(files) if draft.options.fingerprint else None,
    )


def _sums(files: Sequence[_File]) -> Hashes:
    return np.array([*chain.from_iterable(file.totals for file in files)], dtype=np.uint64)


def _write_all(draft: Draft, names: Sequence[str], layout: Sequence[Part], threads: int) -> list[_File]:
    tell = in_turn(draft.options.progress)
    # A thread is to spare for hashing only where a single one writes.
    hashing = hashed if min(threads, len(layout)) > 1 else hashed_beside
    unwanted = Event()

    def write(number: int) -> _File:
        part, totals = layout[number], list[int]()
        buffers = _with_progress(_part_buffers(part, totals if draft.options.fingerprint else None), tell)
        hasher = BlockHasher() if draft.options.checksums else None
        with closing(in_parts(buffers) if hasher is None else hashing(buffers, hasher)) as stream:
            try:
                wanted = SizedBuffers(part.length, _while_wanted(stream, unwanted))
                length = draft.storage.write(names[number], wanted, durable=draft.options.durable)
            except _Unwanted:
                # What another thread raised is what happened.
                return _File(0, None, [])
        return _File(length, None if hasher is None else hash_column(hasher), totals)

    return in_threads(write, range(len(layout)), threads, stop=unwanted.set)


class _Unwanted(Exception):
    """Another file of the same save can't be written."""


def _while_wanted(buffers: Iterable[Buffer], unwanted: Event) -> Iterator[Buffer]:
    for buffer in buffers:
        if unwanted.is_set():
            raise _Unwanted
        yield buffer


def _part_buffers(part: Part, totals: list[int] | None) -> Iterator[Buffer]:
    yield memoryview(part.header)
    for group in together(part.items) if totals is None else map(_alone, part.items):
        if len(group) > 1:
            yield gathered(group)
            continue
        (item,) = group
        size = 0
        buffers = _item_buffers(item)
        if totals is not None and item.shard is not None:
            buffers = with_total(buffers, item.shard, totals)
        for buffer in buffers:
            size += buffer.nbytes
            yield buffer
        if size != item.length:
            found, expected = f"{size} bytes of data", f"{item.length} bytes"
            raise CheckpointingException(
                error_text(f"save: {item.key!r} changed its size", found=found, expected=expected)
            )


def _alone(item: Item) -> list[Item]:
    return [item]


def _item_buffers(item: Item) -> Iterator[Buffer]:
    if item.payload is not None:
        yield memoryview(item.payload)
    elif item.shard is not None:
        yield from tensor_buffers(checked_data(item))


def _with_progress(buffers: Iterator[Buffer], tell: Callable[[int], None]) -> Iterator[Buffer]:
    for buffer in buffers:
        yield buffer
        tell(buffer.nbytes)
