"""Plans of reads: contiguous runs of bytes and strided boxes, where requested shards and stored chunks intersect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import geometry, limits
from ..geometry import Column, group_sums
from ..layouts import BoxColumns, ShardColumns, check_columns, shard_boxes

SHORTEST_RUN = 64 * 1024
"""Number of bytes. Several shorter runs are read together, gaps included, which costs less than a read per run."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks:
    """Stored chunks and their locations in files.

    A chunk is a box of a tensor, or a flat range of a box. Its elements are row-major, in consecutive bytes.

    Attributes:
        key: Index of each chunk's tensor among the requested keys, int64 (chunks,).
        offset: Offset of each chunk's box in its tensor, int64 (chunks, axes); 0 on leading axes that a tensor lacks.
        shape: Shape of each chunk's box, int64 (chunks, axes); 1 on leading axes that a tensor lacks.
        start: First element of the flat range, counted in the box; -1 for a whole box, int64 (chunks,).
        stop: One past the last element of the flat range; -1 for a whole box, int64 (chunks,).
        file: Number of the file, int64 (chunks,).
        byte: Offset of the chunk's first element in the file, int64 (chunks,).
    """

    key: Column
    offset: Column
    shape: Column
    start: Column
    stop: Column
    file: Column
    byte: Column


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes to copy: each is contiguous both in a file and in the memory of a requested shard.

    A plan has them in the order of their files and offsets.

    Attributes:
        file: Number of the file, int64 (runs,).
        byte: Offset of the run in the file, int64 (runs,).
        target: Row of the shard in the request, int64 (runs,).
        target_byte: Offset of the run in the shard's memory, in bytes, int64 (runs,).
        length: Length in bytes, int64 (runs,).
    """

    file: Column
    byte: Column
    target: Column
    target_byte: Column
    length: Column


@dataclass(frozen=True, slots=True, eq=False)
class Strided:
    """Strided pieces to copy: each is a box of elements with one layout in a file and another in a shard's memory.

    Attributes:
        file: Number of the file, int64 (pieces,).
        byte: Offset of the piece's first element in the file, int64 (pieces,).
        target: Row of the shard in the request, int64 (pieces,).
        target_byte: Offset of the piece's first element in the shard's memory, in bytes, int64 (pieces,).
        shape: Shape of the piece, int64 (pieces, axes).
        stride: Strides in the file, in elements, int64 (pieces, axes).
        target_stride: Strides in the shard's memory, in elements, int64 (pieces, axes).
        item_size: Size of an element in bytes, int64 (pieces,).
    """

    file: Column
    byte: Column
    target: Column
    target_byte: Column
    shape: Column
    stride: Column
    target_stride: Column
    item_size: Column


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """The reads of a rank; nothing has been read yet.

    Attributes:
        runs: Runs that are read directly into the shards' memory.
        strided: Boxes of many short rows; one read gets several rows and the gaps between them.
        covered: Number of elements of each requested shard that stored chunks hold, int64 (shards,).
        doubled: Indices of requested keys with stored chunks that overlap each other, int64 (keys,), ascending.
    """

    runs: Runs
    strided: Strided
    covered: Column
    doubled: Column

    @property
    def bytes_read(self) -> int:
        """The number of bytes that the plan copies into shards; gaps that are read along with them don't count."""
        sizes = geometry.volumes(self.strided.shape) * self.strided.item_size
        return int(self.runs.length.sum() + sizes.sum())

    @property
    def files(self) -> list[int]:
        """The numbers of the files that the plan reads, ascending."""
        numbers: list[int] = np.union1d(self.runs.file, self.strided.file).tolist()
        return numbers

    def select(self, runs: Column | NDArray[np.bool_], strided: Column | NDArray[np.bool_]) -> LoadPlan:
        """Return a plan with only the selected runs and strided pieces; both selections are indices or flags."""
        return replace(self, runs=geometry.rows_of(self.runs, runs), strided=geometry.rows_of(self.strided, strided))


def plan_load(requests: ShardColumns, chunks: StoredChunks, *, shortest_run: int = SHORTEST_RUN) -> LoadPlan:
    """Return the reads that fill the requested shards from the stored chunks.

    Each requested byte is read once. Targets are row-major; a flat shard's elements are in the order of its range.

    Args:
        requests: Shards to fill.
        chunks: Stored chunks of these tensors, of the same dtypes. ``chunks.key`` has indices into ``requests.keys``.
        shortest_run: Smallest length in bytes of a contiguous run that gets a read of its own. A box of several shorter
            runs becomes one strided piece.

    Examples:
        >>> import torch, shardtree as st
        >>> right = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, 1, 2))
        >>> one = np.zeros(1, dtype=np.int64)
        >>> stored = StoredChunks(one, one[:, None] + [0, 0], one[:, None] + [4, 4], one - 1, one - 1, one, one + 128)
        >>> plan = plan_load(st.layouts.shard_columns([right]), stored, shortest_run=8)
        >>> plan.runs.byte.tolist(), plan.runs.length.tolist()
        ([136, 152, 168, 184], [8, 8, 8, 8])
    """
    check_columns("plan_load", requests)
    geometry.check_type("plan_load", "chunks", chunks, StoredChunks, "Pass the stored chunks.")
    axes = max(requests.offset.shape[1], chunks.offset.shape[1])
    targets = shard_boxes(
        geometry.widen(requests.offset, axes, 0), geometry.widen(requests.shape, axes, 1), requests.start, requests.stop
    )
    # Sorting a million chunks dominated the planning, so chunks outside of the request's reach are dropped first.
    key = requests.key[targets.shard]
    chunks = _reachable_chunks(key, targets, chunks, axes)
    sources = shard_boxes(chunks.offset, chunks.shape, chunks.start, chunks.stop)
    left, right = geometry.overlapping_pairs(
        key, targets.offset, targets.shape, chunks.key[sources.shard], sources.offset, sources.shape
    )
    pieces = _pieces(requests, chunks, targets, sources, left, right)
    # Weights are floats, exact for fewer than 2**53 elements of a shard.
    counts = np.bincount(pieces.target, weights=geometry.volumes(pieces.shape), minlength=len(requests)).astype(
        np.int64
    )
    runs, strided = _split(pieces, shortest_run)
    rows = geometry.distinct(right)
    boxes = (sources.offset.take(rows, axis=0), sources.shape.take(rows, axis=0))
    return LoadPlan(
        _merge(runs), strided, counts, geometry.shared_groups(chunks.key.take(sources.shard.take(rows)), *boxes)
    )


def _reachable_chunks(key: Column, boxes: BoxColumns, chunks: StoredChunks, axes: int) -> StoredChunks:
    """Return the chunks that may intersect a requested box: on most ranks, a small part of all stored chunks.

    Args:
        key: Index of each box's tensor among the requested keys, int64 (boxes,).
        boxes: Requested boxes.
        chunks: All stored chunks.
        axes: Number of axes to which the chunks' offsets and shapes are padded.
    """
    offset, shape = geometry.widen(chunks.offset, axes, 0), geometry.widen(chunks.shape, axes, 1)
    rows, _ = geometry.rows_in_reach(geometry.reach_of(key, boxes.offset, boxes.shape), chunks.key, offset, shape)
    # Taking all rows would copy every column.
    if rows.size == len(chunks.key):
        return replace(chunks, offset=offset, shape=shape)
    numbers = (column.take(rows) for column in (chunks.start, chunks.stop, chunks.file, chunks.byte))
    return StoredChunks(chunks.key.take(rows), offset.take(rows, axis=0), shape.take(rows, axis=0), *numbers)


def runs_plan(runs: Runs) -> LoadPlan:
    """Return a plan that reads only these runs, sorted by file and offset.

    Examples:
        >>> one = np.ones(1, dtype=np.int64)
        >>> runs_plan(Runs(file=one, byte=one, target=one - 1, target_byte=one - 1, length=one * 8)).bytes_read
        8
    """
    none = np.zeros(0, dtype=np.int64)
    boxes = np.zeros((0, 1), dtype=np.int64)
    return LoadPlan(_merge(runs), Strided(none, none, none, none, boxes, boxes, boxes, none), none, none)


def _pieces(
    requests: ShardColumns, chunks: StoredChunks, targets: BoxColumns, sources: BoxColumns, left: Column, right: Column
) -> Strided:
    """Return the intersections of requested boxes with stored boxes, as strided pieces.

    Args:
        requests: Requested shards.
        chunks: Stored chunks.
        targets: Boxes of the requested shards.
        sources: Boxes of the stored chunks.
        left: Row in `targets` of each intersecting pair, int64 (pieces,).
        right: Row in `sources` of each intersecting pair, int64 (pieces,).
    """
    box, source_box = targets.shape.take(left, axis=0), sources.shape.take(right, axis=0)
    place, source_place = targets.offset.take(left, axis=0), sources.offset.take(right, axis=0)
    offset, shape = geometry.intersect(place, box, source_place, source_box)
    stride, target_stride = geometry.row_major_strides(source_box), geometry.row_major_strides(box)
    target, chunk = targets.shard.take(left), sources.shard.take(right)
    item_size = requests.item_size.take(requests.key.take(target))
    element = sources.position.take(right) + _dot(offset - source_place, stride)
    target_element = targets.position.take(left) + _dot(offset - place, target_stride)
    return Strided(
        file=chunks.file.take(chunk),
        byte=chunks.byte.take(chunk) + element * item_size,
        target=target,
        target_byte=target_element * item_size,
        shape=shape,
        stride=stride,
        target_stride=target_stride,
        item_size=item_size,
    )


def _dot(left: Column, right: Column) -> Column:
    """Return the dot product of each row of one array with the same row of the other, int64 (rows,)."""
    total = left[:, 0] * right[:, 0]
    for axis in range(1, left.shape[1]):
        total += left[:, axis] * right[:, axis]
    return total


def _split(pieces: Strided, shortest_run: int) -> tuple[Runs, Strided]:
    """Divide pieces into those that are best read run by run, which are returned as runs, and the other pieces."""
    run = np.ones(len(pieces.file), dtype=np.int64)
    rows = pieces.shape.copy()
    for axis in range(pieces.shape.shape[1] - 1, -1, -1):
        # An axis lengthens the run while neighbours along it are exactly one run apart in the file and in the target.
        joins = (pieces.shape[:, axis] == 1) | (
            (pieces.stride[:, axis] == run)
            & (pieces.target_stride[:, axis] == run)
            & (rows[:, axis + 1 :] == 1).all(axis=1)
        )
        run = np.where(joins, run * pieces.shape[:, axis], run)
        rows[:, axis] = np.where(joins, 1, pieces.shape[:, axis])
    count = geometry.volumes(rows)
    # Several short runs are read as one strided piece: a call for each of them would cost more than reading the gaps
    # between them too.
    direct = (count == 1) | (run * pieces.item_size >= shortest_run)
    plain, others = np.flatnonzero(direct), np.flatnonzero(~direct)
    runs = _runs(geometry.rows_of(pieces, plain), rows.take(plain, axis=0), count[plain], run[plain])
    return runs, geometry.rows_of(pieces, others)


def _runs(pieces: Strided, rows: Column, count: Column, run: Column) -> Runs:
    piece, number = geometry.span_numbers(np.zeros_like(count), count)
    at = number[:, None] // geometry.row_major_strides(rows)[piece] % rows[piece]
    item_size = pieces.item_size[piece]
    return Runs(
        file=pieces.file[piece],
        byte=pieces.byte[piece] + _dot(at, pieces.stride[piece]) * item_size,
        target=pieces.target[piece],
        target_byte=pieces.target_byte[piece] + _dot(at, pieces.target_stride[piece]) * item_size,
        length=run[piece] * item_size,
    )


def _merge(runs: Runs) -> Runs:
    """Return runs in file order, after joining runs that are adjacent in both file and memory: one call reads them."""
    # File order reads storage forwards, and makes neighbours that are joined adjacent rows.
    order = np.lexsort((runs.byte, runs.file))
    file, byte, target, target_byte, length = (
        column[order] for column in (runs.file, runs.byte, runs.target, runs.target_byte, runs.length)
    )
    new = np.ones(order.size, dtype=bool)
    new[1:] = (
        (file[1:] != file[:-1])
        | (target[1:] != target[:-1])
        | (byte[1:] != byte[:-1] + length[:-1])
        | (target_byte[1:] != target_byte[:-1] + length[:-1])
    )
    first = np.flatnonzero(new)
    # `reduceat` fails without indices.
    total = np.add.reduceat(length, first) if first.size else length
    return Runs(file[first], byte[first], target[first], target_byte[first], total)


# Rounds and groups of bounded size: reads that need a buffer besides their target go in rounds.


def read_rounds(columns: ShardColumns, *, most_bytes: int = limits.CAST_BYTES) -> Column:
    """Divide reads into rounds of bounded size; return the number of each shard's round, int64 (shards,).

    All shards of a tensor are in one round. No rank reads more than `most_bytes` in a round, unless a single tensor is
    larger.

    Args:
        columns: Shards that one rank reads, or that all ranks read.
        most_bytes: Upper bound of the bytes that a rank reads in one round.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets(key, torch.zeros(4)) for key in "abc"]
        >>> read_rounds(st.layouts.shard_columns(shards), most_bytes=32).tolist()
        [0, 0, 1]
    """
    ranks = int(columns.rank.max(initial=-1)) + 1
    sizes = group_sums((columns.key, columns.rank), columns.nbytes, (len(columns.keys), ranks))
    rounds, number, room = [], 0, np.full(ranks, most_bytes, dtype=np.int64)
    for size in sizes:
        # A round ends for all ranks at once: ranks that exchange the read bytes must compute the same rounds.
        if (size > room).any() and (room < most_bytes).any():
            number, room = number + 1, np.full(ranks, most_bytes, dtype=np.int64)
        room = room - size
        rounds.append(number)
    return np.array(rounds, dtype=np.int64)[columns.key] if rounds else columns.key


# Groups of bounded size.

T = TypeVar("T")


def grouped(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield items in groups of bounded size, in order; only a single item may exceed the bound.

    Args:
        items: Items to group.
        nbytes: Function that returns the size of an item.
        most_bytes: Upper bound of a group's size.

    Examples:
        >>> list(grouped(["abc", "d", "e", "fghij"], len, 4))
        [['abc', 'd'], ['e'], ['fghij']]
    """
    group: list[T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group
