"""Writing one rank's part of chunk files: which bytes of which shards go where in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ...codec import row_major_bits
from ...errors import ShapeError, error_text
from ...geometry import Column, row_major_strides
from ...layouts import ShardColumns, TensorKind, select_rows
from ...lazy import LazyTensor
from ...mapping import ShardedTensor
from ...plans import Runs, StoredChunks, plan_load
from ...storage import (
    BlockHasher,
    Buffer,
    Hashes,
    SizedBuffers,
    Storage,
    hash_column,
    hashed,
    in_parts,
    tensor_buffers,
    write_parts,
)
from .._checks import misfit
from ._array import Shape, StoredArray
from ._cells import encode_shard_index, inner_counts
from ._group import inner_cells
from ._layout import ArrayLayout

_ZEROS = bytes(64 * 1024)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFile:
    """What a rank writes of one chunk file.

    Attributes:
        name: of the file.
        length: of the whole file, in bytes.
        is_shared: whether other ranks write other parts of it.
        shard: for each run, the number of its shard among the rank's, int64 (runs,).
        byte: where each begins in the shard's row-major bytes, int64 (runs,).
        target: where each begins in the file, ascending, int64 (runs,).
        count: bytes in each, int64 (runs,).
        index: the bytes at the end of the file.
    """

    name: str
    length: int
    is_shared: bool
    shard: Column
    byte: Column
    target: Column
    count: Column
    index: bytes = b""


def chunk_files(part: ArrayLayout, rank: int, numbers: Column) -> Iterator[ChunkFile]:
    """Yield what a rank writes of a tensor's files.

    Args:
        part: where the tensor's shards go.
        rank: who writes.
        numbers: for each of the tensor's shards, which of the rank's shards it is; -1 for others', int64 (shards,).
    """
    array, own = part.array, np.flatnonzero(numbers >= 0)
    files, file = np.unique(part.file[own], return_inverse=True)
    step = array.inner or array.step
    columns = select_rows(part.columns, own)
    # Shards that are whole chunks, the usual case, need no plan.
    at_edge = (columns.shape != np.array(step, dtype=np.int64)).any()
    runs = _planned(part, columns, files, step) if at_edge else _whole(array, columns, file.reshape(-1), step)
    order = np.lexsort((runs.target_byte, runs.target))
    ends = np.searchsorted(runs.target[order], np.arange(len(files) + 1)).tolist()
    chunks, chunk_bytes = prod(inner_counts(array)), prod(step) * array.dtype.itemsize
    index = _index(chunks, chunk_bytes) if array.inner is not None else b""
    for number, cell in enumerate(part.cells[files].tolist()):
        rows = order[ends[number] : ends[number + 1]]
        yield ChunkFile(
            array.file_name(tuple(cell)),
            chunks * chunk_bytes + len(index),
            bool(part.writer[files[number]] != rank),
            numbers[own][runs.file[rows]],
            runs.byte[rows],
            runs.target_byte[rows],
            runs.length[rows],
            index,
        )


def _whole(array: StoredArray, columns: ShardColumns, file: Column, step: Shape) -> Runs:
    """Return the runs of shards whose boxes are whole chunks, one each; the target is the number of the file."""
    place = columns.offset // np.array(step, dtype=np.int64) % np.array(inner_counts(array) or (1,), dtype=np.int64)
    strides = row_major_strides(np.array([inner_counts(array) or (1,)], dtype=np.int64))
    item_size = array.dtype.itemsize
    target = (place * strides).sum(axis=1) * (prod(step) * item_size) + np.maximum(columns.start, 0) * item_size
    number = np.arange(len(columns))
    return Runs(number, np.zeros_like(number), file, target, columns.elements * item_size)


def _planned(part: ArrayLayout, columns: ShardColumns, files: Column, step: Shape) -> Runs:
    """Return the runs of shards of any boxes; the target is the number of the file."""
    # Writing is planned as a load of chunks from shards: the same code finds which bytes meet.
    slots = _slots(part.array, part.cells[files])
    each = len(slots) // len(files)
    wanted = replace(
        columns,
        key=np.zeros(len(slots), dtype=np.int64),
        keys=(part.array.key,),
        kinds=(TensorKind(part.array.dtype, part.array.shape, 0),),
        offset=slots * np.array(step, dtype=np.int64),
        shape=np.tile(np.array(step, dtype=np.int64), (len(slots), 1)),
        start=np.full(len(slots), -1, dtype=np.int64),
        stop=np.full(len(slots), -1, dtype=np.int64),
    )
    number, zeros = np.arange(len(columns)), np.zeros(len(columns), dtype=np.int64)
    stored = StoredChunks(zeros, columns.offset, columns.shape, columns.start, columns.stop, number, zeros)
    runs = plan_load(wanted, stored, shortest_run=1).runs
    before = runs.target % each * (prod(step) * part.array.dtype.itemsize)
    return replace(runs, target=runs.target // each, target_byte=before + runs.target_byte)


def _slots(array: StoredArray, cells: Column) -> Column:
    """Return the places of the chunks in some files, in the files' order."""
    if array.inner is None:
        return cells
    numbers = np.arange(prod(inner_counts(array)))
    return np.concatenate([inner_cells(array, cell, numbers) for cell in cells])


def _index(chunks: int, chunk_bytes: int) -> bytes:
    begin = np.arange(chunks, dtype=np.int64) * chunk_bytes
    return encode_shard_index(begin, np.full(chunks, chunk_bytes, dtype=np.int64))


def write_chunk_file(
    storage: Storage,
    file: ChunkFile,
    shards: Sequence[ShardedTensor],
    *,
    durable: bool,
    checksums: bool,
    progress: Callable[[int], None],
) -> Hashes | None:
    """Write a file, or a rank's part of it, and return its block hashes; None where other ranks write it too.

    Raises:
        ShapeError: a tensor no longer has the dtype or shape of its shard.
    """
    # An asynchronous save without a snapshot may see a tensor that was replaced since the call.
    wrong = [misfit(shards[number]) for number in np.unique(file.shard).tolist()]
    if any(wrong):
        found = next(filter(None, wrong))
        raise ShapeError(error_text("save: a tensor was changed while it waited to be written", found=found))
    # No rank sees all bytes of a file that several write, so that none could hash its blocks.
    if file.is_shared:
        write_parts(storage, file.name, file.length, _reported_parts(_parts(file, shards), progress), durable=durable)
        return None
    hasher = BlockHasher() if checksums else None
    buffers = _buffers(file, shards)
    with closing(in_parts(buffers) if hasher is None else hashed(buffers, hasher)) as stream:
        storage.write(file.name, SizedBuffers(file.length, reported(stream, progress)), durable=durable)
    return None if hasher is None else hash_column(hasher)


def _buffers(file: ChunkFile, shards: Sequence[ShardedTensor]) -> Iterator[Buffer]:
    """Yield a whole file: the runs in order, zeros where an edge chunk reaches beyond its tensor, the index."""
    memories: dict[int, Buffer] = {}
    end = 0
    rows = (column.tolist() for column in (file.shard, file.byte, file.target, file.count))
    for number, byte, target, count in zip(*rows, strict=True):
        yield from _zeros(target - end)
        # A whole tensor is passed on in parts, so that a lazy one or a view is never whole in memory.
        if byte == 0 and count == shards[number].data.nbytes:
            yield from tensor_buffers(shards[number].data)
        else:
            if number not in memories:
                memories[number] = _memory(shards[number])
            yield memories[number][byte : byte + count]
        end = target + count
    yield from _zeros(file.length - len(file.index) - end)
    if file.index:
        yield memoryview(file.index)


def _parts(file: ChunkFile, shards: Sequence[ShardedTensor]) -> Iterator[tuple[int, Buffer]]:
    """Yield a rank's parts of a shared file, one shard after the other, so that one is in memory at a time."""
    order = np.argsort(file.shard, kind="stable")
    last, memory = -1, memoryview(b"")
    rows = (column[order].tolist() for column in (file.shard, file.byte, file.target, file.count))
    for number, byte, target, count in zip(*rows, strict=True):
        if number != last:
            last, memory = number, _memory(shards[number])
        yield target, memory[byte : byte + count]


def _memory(shard: ShardedTensor) -> Buffer:
    data = shard.data
    return memoryview(row_major_bits(data.read() if isinstance(data, LazyTensor) else data).numpy())


def _zeros(count: int) -> Iterator[Buffer]:
    while count > 0:
        yield memoryview(_ZEROS)[:count]
        count -= len(_ZEROS)


def reported(buffers: Iterator[Buffer], progress: Callable[[int], None]) -> Iterator[Buffer]:
    """Yield buffers unchanged, and call `progress` with the length of each once it is written.

    Examples:
        >>> sizes = []
        >>> _ = list(reported(iter([memoryview(b"ab"), memoryview(b"c")]), sizes.append))
        >>> sizes
        [2, 1]
    """
    for buffer in buffers:
        yield buffer
        progress(buffer.nbytes)


def _reported_parts(
    parts: Iterator[tuple[int, Buffer]], progress: Callable[[int], None]
) -> Iterator[tuple[int, Buffer]]:
    for byte, buffer in parts:
        yield byte, buffer
        progress(buffer.nbytes)
