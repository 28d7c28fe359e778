"""The chunk files of a save: a tensor's shards are its chunks if they form a regular grid; else it is one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ...errors import IntegrityError, error_text
from ...kit import (
    Buffer,
    Column,
    LazyTensor,
    Runs,
    ShardColumns,
    ShardedTensor,
    Storage,
    StoredChunks,
    TensorKind,
    check_storable,
    checked_data,
    digest,
    plan_load,
    row_major_bits,
    row_major_strides,
    select_rows,
    tensor_buffers,
    volumes,
    write_hashed,
    write_parts,
)
from ._array import Shape, StoredArray
from ._cells import encode_shard_index, inner_counts
from ._group import inner_cells

_UNQUOTED = "+=@,()[]"
_LONGEST = 200  # File systems allow 255 bytes in a name, and temporary names are longer.
_RESERVED = {"zarr.json", "metadata.json"}


def array_name(key: str) -> str:
    """Return the folder of a key's array: the key itself if its characters are harmless.

    Other characters are percent-encoded, as in a URL, and so is the first character of a reserved or hidden name. A
    name longer than 200 characters is cut, and ends with a hash of the key.

    Examples:
        >>> array_name("decoder.layers.0.weight"), array_name("a/b"), array_name(".."), array_name("_shardtree")
        ('decoder.layers.0.weight', 'a%2Fb', '%2E.', '%5Fshardtree')
        >>> array_name("x" * 300)[170:]
        'xxxxxxxxxxxxx~a5d1b4607dc83554'
    """
    name = quote(key, safe=_UNQUOTED)
    if name[0] in "._" or name in _RESERVED:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 17]}~{digest(key.encode())}"


@dataclass(frozen=True, slots=True, eq=False)
class ArrayLayout:
    """The zarr array of a tensor: its chunk files, the shards that go into each file, and the ranks that write them.

    Attributes:
        array: Array as its metadata will describe it.
        rows: Index of each of the tensor's shards in the shards that all ranks write, int64 (shards,). Shards without
            elements are left out.
        columns: The same shards, with as many axes as the tensor.
        cells: Indices of the chunk files in the array's grid of files, in row-major order, int64 (files, axes).
        file: Row of each shard's file in `cells`, int64 (shards,).
        writer: Rank that writes each file, -1 if several do, int64 (files,).
        metadata_writer: Rank that writes the array's zarr.json.
    """

    array: StoredArray
    rows: Column
    columns: ShardColumns
    cells: Column
    file: Column
    writer: Column
    metadata_writer: int


def array_layouts(writes: ShardColumns, rank: int | None = None) -> Iterator[ArrayLayout]:
    """Yield the layout of each tensor's array. All ranks compute the same layouts, so that they needn't exchange any.

    Args:
        writes: Shards that all ranks write, only one replica of each.
        rank: Rank that writes a part of each yielded tensor; None to yield all tensors.

    Raises:
        IntegrityError: A file would have gaps, or two tensors would have the same folder.
        UnsupportedValue: A dtype can't be stored.
    """
    numbers = np.unique(writes.key if rank is None else writes.key[writes.rank == rank])
    # Only rows of these tensors are sorted, so that a rank's work doesn't grow with the tensors of others.
    rows = np.flatnonzero(np.isin(writes.key, numbers))
    order = rows[np.argsort(writes.key[rows], kind="stable")]
    begins = np.searchsorted(writes.key[order], numbers).tolist()
    names: dict[str, str] = {}
    for number, (begin, end) in zip(numbers.tolist(), pairwise([*begins, len(order)]), strict=True):
        key = writes.keys[number]
        other = names.setdefault(array_name(key), key)
        if other != key:
            heading = f"save: tensors {other!r} and {key!r} would have the same folder"
            raise IntegrityError(error_text(heading, fix="Rename one of them."))
        yield _array_layout(writes, number, order[begin:end])


def _array_layout(writes: ShardColumns, number: int, rows: Column) -> ArrayLayout:
    key, kind = writes.keys[number], writes.kinds[number]
    check_storable(kind.dtype, f"save: {key!r}")
    metadata_writer = int(writes.rank[rows[0]])
    # A tensor without elements has no chunk file, only metadata.
    rows = rows[writes.elements[rows] > 0]
    columns, axes = select_rows(writes, rows), max(1, len(kind.global_shape))
    columns = replace(columns, offset=columns.offset[:, -axes:], shape=columns.shape[:, -axes:])
    box = kind.global_shape or (1,)
    cell = _regular_cell(columns, box)
    # Without a regular grid, there is one chunk for the whole tensor, and each rank writes its bytes to it.
    step, inner = _file_shape(columns, box, cell) if cell else (tuple(max(1, size) for size in box), None)
    shapes = (step, inner) if kind.global_shape else ((), None)
    array = StoredArray(array_name(key), key, kind.dtype, kind.global_shape, shapes[0], inner=shapes[1])
    cells, file = _cells(columns, step, array.counts)
    _check_filled(array, columns, cells, file)
    return ArrayLayout(array, rows, columns, cells, file, _writers(columns.rank, file, len(cells)), metadata_writer)


def _cells(columns: ShardColumns, step: Shape, counts: Shape) -> tuple[Column, Column]:
    """Return the grid indices of the chunk files, int64 (files, axes), and each shard's file number, int64 (shards,).

    Files are in row-major order, and numbered in this order.

    Args:
        columns: Shards of a tensor.
        step: Shape of a file's box.
        counts: Shape of the grid of files.
    """
    place = columns.offset // np.array(step, dtype=np.int64)
    strides = row_major_strides(np.array([counts], dtype=np.int64))
    _, first, file = np.unique((place * strides).sum(axis=1), return_index=True, return_inverse=True)
    return place[first], file.reshape(-1)


def _regular_cell(columns: ShardColumns, box: Shape) -> Shape | None:
    """Return the cells' shape if the boxes of all shards are cells of a regular grid over the tensor; else None."""
    if not len(columns):
        return None
    cell = columns.shape.max(axis=0)
    at_edge = np.minimum(cell, np.array(box, dtype=np.int64) - columns.offset)
    regular = (columns.offset % cell == 0).all() and (columns.shape == at_edge).all()
    return tuple(cell.tolist()) if regular else None


def _file_shape(columns: ShardColumns, box: Shape, cell: Shape) -> tuple[Shape, Shape | None]:
    """Return the shapes of files and of inner chunks, if shards have the shape `cell`; None for no inner chunks."""
    # Neighbouring cells of one rank share a file; otherwise stacked layers would have a small file for each layer.
    counts = tuple(-(-size // step) for size, step in zip(box, cell, strict=True))
    whole = (columns.start < 0) | (columns.stop - columns.start == volumes(columns.shape))
    if len(columns) < 2 or not whole.all() or prod(counts) != len(columns):
        return cell, None
    writers = np.empty(counts, dtype=np.int64)
    writers[tuple((columns.offset // np.array(cell)).T)] = columns.rank
    factors = _common_blocks(writers)
    if prod(factors) == 1:
        return cell, None
    return tuple(size * factor for size, factor in zip(cell, factors, strict=True)), cell


def _common_blocks(writers: np.ndarray[Any, np.dtype[np.int64]]) -> Shape:
    """Return the shape of the largest blocks that divide the array `writers` evenly, with equal elements in each block.

    Examples:
        >>> _common_blocks(np.array([[0, 1], [0, 1], [2, 2], [2, 2]]))
        (2, 1)
    """
    factors = []
    for axis, size in enumerate(writers.shape):
        for factor in (divisor for divisor in range(size, 0, -1) if size % divisor == 0):
            blocks = writers.reshape(*writers.shape[:axis], size // factor, factor, *writers.shape[axis + 1 :])
            first = blocks.take([0], axis=axis + 1)
            if (blocks == first).all():
                writers = first.squeeze(axis + 1)
                factors.append(factor)
                break
    return tuple(factors)


def _check_filled(array: StoredArray, columns: ShardColumns, cells: Column, file: Column) -> None:
    """Raise IntegrityError unless the shards fill each file that they are written to."""
    # Other readers would read zeros from a gap, without an error.
    step = np.array(array.step, dtype=np.int64)
    room = volumes(np.minimum(step, np.array(array.box, dtype=np.int64) - cells * step))
    elements = np.bincount(file, weights=columns.elements, minlength=len(cells)).astype(np.int64)
    if (elements != room).any():
        first = int(np.flatnonzero(elements != room)[0])
        heading = f"save: the shards of {array.key!r} leave gaps in chunk {tuple(cells[first].tolist())}"
        fix = "Save the whole tensor, or shards of a regular grid."
        raise IntegrityError(
            error_text(heading, found=f"{elements[first]} elements", expected=int(room[first]), fix=fix)
        )


def _writers(rank: Column, file: Column, files: int) -> Column:
    low, high = np.full(files, np.iinfo(np.int64).max), np.full(files, -1, dtype=np.int64)
    np.minimum.at(low, file, rank)
    np.maximum.at(high, file, rank)
    return np.where(low == high, low, -1)


_ZEROS = bytes(64 * 1024)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFile:
    """A rank's part of a chunk file: runs of bytes, each contiguous both in a shard and in the file.

    Attributes:
        name: Name of the file.
        length: Length of the whole file in bytes.
        is_shared: True if other ranks write other parts of the file.
        shard: Index of each run's shard in the rank's shards, int64 (runs,).
        byte: Offset of each run in the shard's row-major bytes, int64 (runs,).
        target: Offset of each run in the file, ascending, int64 (runs,).
        count: Length of each run in bytes, int64 (runs,).
        index: Bytes of the index of inner chunks, at the end of the file.
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
    """Yield the part of each chunk file of a tensor that a rank writes.

    Args:
        part: Layout of the tensor's array.
        rank: Rank that writes.
        numbers: Position of each of the tensor's shards in the rank's list of shards, -1 for shards of other ranks,
            int64 (shards,).
    """
    array, shards = part.array, np.flatnonzero(numbers >= 0)
    files, file = np.unique(part.file[shards], return_inverse=True)
    step = array.inner or array.step
    columns = select_rows(part.columns, shards)
    # Shards are usually whole chunks, which need no plan.
    at_edge = (columns.shape != np.array(step, dtype=np.int64)).any()
    runs = _planned_runs(part, columns, files, step) if at_edge else _whole(array, columns, file.reshape(-1), step)
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
            numbers[shards][runs.file[rows]],
            runs.byte[rows],
            runs.target_byte[rows],
            runs.length[rows],
            index,
        )


def _whole(array: StoredArray, columns: ShardColumns, file: Column, step: Shape) -> Runs:
    """Return one run of bytes from each shard to its chunk file. The boxes of all shards must be whole chunks.

    `file` is the index of each shard's chunk file, and `step` the shape of a chunk. In the result, `file` holds indices
    of shards, since shards are the source here, and `target` holds indices of chunk files.
    """
    place = columns.offset // np.array(step, dtype=np.int64) % np.array(inner_counts(array) or (1,), dtype=np.int64)
    strides = row_major_strides(np.array([inner_counts(array) or (1,)], dtype=np.int64))
    item_size = array.dtype.itemsize
    target = (place * strides).sum(axis=1) * (prod(step) * item_size) + np.maximum(columns.start, 0) * item_size
    number = np.arange(len(columns))
    return Runs(number, np.zeros_like(number), file, target, columns.elements * item_size)


def _planned_runs(part: ArrayLayout, columns: ShardColumns, files: Column, step: Shape) -> Runs:
    """Return the runs of bytes from shards to chunk files. The shards' boxes may have any shape.

    `files` are rows of `part.cells`, and `step` is the shape of a chunk. In the result, `file` holds indices of shards,
    since shards are the source here, and `target` holds indices into `files`.
    """
    # The write is planned as a load of chunks from shards, since the same code finds their intersections.
    slots = _slots(part.array, part.cells[files])
    slots_per_file = len(slots) // len(files)
    targets = replace(
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
    sources = StoredChunks(zeros, columns.offset, columns.shape, columns.start, columns.stop, number, zeros)
    runs = plan_load(targets, sources, shortest_run=1).runs
    before = runs.target % slots_per_file * (prod(step) * part.array.dtype.itemsize)
    return replace(runs, target=runs.target // slots_per_file, target_byte=before + runs.target_byte)


def _slots(array: StoredArray, cells: Column) -> Column:
    """Return the index of every chunk of some files in the grid of chunks; `cells` are indices in the grid of files."""
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
) -> NDArray[np.uint64] | None:
    """Write a rank's part of a chunk file. Return the file's block hashes, or None if other ranks write parts of it.

    Raises:
        ShapeError: A tensor no longer has the dtype or shape of its shard.
    """
    # An asynchronous save without a snapshot may see a tensor that was replaced since the call.
    for number in np.unique(file.shard).tolist():
        checked_data(shards[number])
    # No rank sees all bytes of a shared file, so that none could hash its blocks.
    if file.is_shared:
        write_parts(storage, file.name, file.length, _parts(file, shards), durable=durable, progress=progress)
        return None
    buffers, length = _buffers(file, shards), file.length
    written = write_hashed(
        storage, file.name, buffers, length=length, durable=durable, checksums=checksums, progress=progress
    )
    return written.hashes


def _buffers(file: ChunkFile, shards: Sequence[ShardedTensor]) -> Iterator[Buffer]:
    """Yield a whole chunk file's bytes: the shards' runs in order, zeros beyond the tensor's edge, and the index."""
    memories: dict[int, Buffer] = {}
    end = 0
    rows = (column.tolist() for column in (file.shard, file.byte, file.target, file.count))
    for number, byte, target, count in zip(*rows, strict=True):
        yield from _zeros(target - end)
        # A whole tensor is written in parts, so that a lazy tensor or a view is never whole in memory.
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
    """Yield each run of `file`, as its offset in the file and its bytes, with one shard's data in memory at a time."""
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
