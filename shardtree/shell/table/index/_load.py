"""Loads of files that an index describes, and their cost. Only the needed bytes are read, into the targets' memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from ....core import plans
from ....core.ambient import collector_paused
from ....core.geometry import Column
from ....core.layouts import ShardColumns, TensorKind, shard_columns
from ....core.mapping import ShardedTensor
from ....core.plans import LoadPlan
from ....errors import CorruptCheckpoint, IntegrityError, StorageError, error_text
from ...storage import ReadReport, StoredFile, can, fetch, fetch_cost, fetch_run
from .._checks import check_fit
from .._metadata import check_lengths
from .._values import Checkpoint
from ._columns import Index, chunks_of, stored_alike
from ._metadata import DeferredMetadata, IndexMetadata

# A box that is a single run of a stored chunk, such as a few rows of a large tensor, is read without a plan, since
# making the plan would take longer than the read.

RUN_BYTES = 4 * 1024 * 1024
"""Longer runs are read by several threads."""


class FileRun(NamedTuple):
    """A contiguous byte range of a file that holds exactly one box.

    Attributes:
        file: Number of the file.
        byte: Offset in the file.
        length: Length in bytes.
    """

    file: int
    byte: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorLookup:
    """Facts that the index has about a tensor, looked up before a box of it is read.

    Attributes:
        kind: Dtype and shape.
        first: Number of the tensor's first chunk.
        last: One past the number of its last chunk.
        chunk: The tensor's chunk if there is only one, and it is a whole box; otherwise None.
    """

    kind: TensorKind
    first: int
    last: int
    chunk: StoredChunk | None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A stored chunk that is a whole box rather than a flat range.

    Attributes:
        offset: Offset of the box along each axis.
        shape: Shape of the box.
        number: Number of the chunk's file.
        file: The chunk's file.
        byte: Offset of the chunk in the file.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    number: int
    file: StoredFile
    byte: int


Find = Callable[[str], TensorLookup | None]
"""Function from a tensor's key to its entry in the index, or None if it isn't stored."""

_REMEMBERED = 1024


def _stored_tensor(index: Index, key: str) -> TensorLookup | None:
    (number,) = index.find_keys([key])
    if number < 0:
        return None
    first, last = index.chunk_key.searchsorted((number, number + 1)).tolist()
    kind = index.kind(number)
    chunk = _chunk_at(index, first, len(kind.global_shape)) if last - first == 1 else None
    return TensorLookup(kind, first, last, chunk)


def _chunk_at(index: Index, row: int, axes: int) -> StoredChunk | None:
    if index.chunk_start[row] >= 0:
        return None
    first = index.chunk_shape.shape[1] - axes
    offset, shape = (tuple(column[row, first:].tolist()) for column in (index.chunk_offset, index.chunk_shape))
    number = int(index.chunk_file[row])
    return StoredChunk(offset, shape, number, index.file(number), int(index.chunk_byte[row]))


def single_run(index: Index, shard: ShardedTensor, find: Find | None = None) -> tuple[StoredFile, FileRun] | None:
    """Return the file and the byte range of a requested box if it is contiguous in a single stored chunk.

    The result is None if it is not, if the shard is a flat range, or if it does not fit the stored tensor.

    Args:
        index: Index of the stored tensors.
        shard: Requested shard.
        find: Function that looks a key up in the index, such as a memoised one; None for a plain lookup.
    """
    tensor = (find or partial(_stored_tensor, index))(shard.key)
    if tensor is None or shard.flattened_range is not None:
        return None
    kind, chunk = tensor.kind, tensor.chunk
    if kind.dtype is not shard.dtype or kind.global_shape != shard.global_shape:
        return None
    at, box = shard.global_offset, shard.local_shape
    if shard.prepend_axis_num:
        box = (1,) * shard.prepend_axis_num + box
    if chunk is None:
        row = _only_chunk(index, tensor.first, tensor.last, at, box)
        chunk = None if row is None else _chunk_at(index, row, len(box))
        if chunk is None:
            return None
    element = _first_element(chunk, at, box)
    if element is None:
        return None
    size = kind.dtype.itemsize
    return chunk.file, FileRun(chunk.number, chunk.byte + element * size, prod(box) * size)


def _first_element(chunk: StoredChunk, offset: tuple[int, ...], box: tuple[int, ...]) -> int | None:
    """Return the offset in elements of a box in a chunk, or None if the box is not a contiguous part of the chunk."""
    # If a box is longer than 1 along an axis, it must be whole along all later axes.
    element, is_long = 0, False
    for axis, size in enumerate(box):
        begin, whole = offset[axis] - chunk.offset[axis], chunk.shape[axis]
        if begin < 0 or begin + size > whole or not size or (is_long and size != whole):
            return None
        is_long = is_long or size != 1
        element = element * whole + begin
    return element


def _only_chunk(index: Index, first: int, last: int, offset: tuple[int, ...], box: tuple[int, ...]) -> int | None:
    """Return the number of the only chunk of a tensor that intersects a box; None if several or none do.

    Args:
        index: Index of the stored tensors.
        first: Number of the tensor's first chunk.
        last: One past the number of its last chunk.
        offset: Offset of the box in the tensor.
        box: Shape of the box.
    """
    axes = index.chunk_shape.shape[1] - len(box)
    begin, end = (columns[first:last, axes:] for columns in (index.chunk_offset, index.chunk_shape))
    meets = ((begin < np.add(offset, box)) & (begin + end > offset)).all(axis=1)
    rows = np.flatnonzero(meets).tolist()
    return first + rows[0] if len(rows) == 1 else None


def run_plan(run: FileRun) -> LoadPlan:
    """Return the plan for loading a single shard from one byte range of a file."""
    file, byte, length = (np.array([number], dtype=np.int64) for number in run)
    zero: Column = np.zeros(1, dtype=np.int64)
    return plans.runs_plan(plans.Runs(file, byte, zero, zero, length))


# Loads through a plan.


def load_from_index(checkpoint: Checkpoint, index: Index, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data in place, and return a report of the bytes read.

    The data must be contiguous tensors on the CPU or on a device with staged copies, such as CUDA. Formats whose chunks
    are row-major bytes in files use this function for LOAD_SHARDED.

    Raises:
        KeyMismatch: a key isn't stored.
        ShapeError: a tensor is stored with another global shape or dtype.
        CorruptCheckpoint: stored bytes are damaged.
    """
    options = checkpoint.options
    place = single_run(index, shards[0], _finder_of(checkpoint, index)) if len(shards) == 1 else None
    if place is not None and (run := place[1]).length <= RUN_BYTES:
        report = fetch_run(checkpoint.storage, place[0], run.byte, shards[0].data, verify=options.verify)
        if report is not None:
            options.progress(run.length)
            return report
    # The garbage collector would traverse a large tree again and again while nothing is freed.
    with collector_paused():
        plan = plan_shards(index, shards, shard_columns(shards, checkpoint.world.rank))
    return read_planned(checkpoint, index.file, plan, [shard.data for shard in shards])


def _finder_of(checkpoint: Checkpoint, index: Index) -> Find:
    newest = checkpoint.once(_Newest)
    if newest.find is None or newest.index is not index:
        # Lookups are memoised: one takes longer than reading a few rows, and such reads often share a tensor.
        newest.index, newest.find = index, lru_cache(_REMEMBERED)(partial(_stored_tensor, index))
    return newest.find


class _Newest:
    """A one-entry cache for an open checkpoint: the index that was used last, and a memoised lookup of its tensors."""

    __slots__ = ("find", "index")

    def __init__(self, _: Checkpoint) -> None:
        self.index: Index | None = None
        self.find: Find | None = None


def plan_shards(
    index: Index,
    shards: Sequence[ShardedTensor],
    columns: ShardColumns,
    gaps: Mapping[str, str] = MappingProxyType({}),
) -> LoadPlan:
    """Return the plan that fills shards from stored chunks, after comparing keys, shapes and dtypes.

    Args:
        index: Index of the stored tensors.
        shards: Requested shards.
        columns: Requested shards as columns, from `shard_columns`.
        gaps: Reasons why some elements of a tensor aren't stored, by key; the error about them gives these reasons.

    Raises:
        KeyMismatch: a key isn't stored.
        ShapeError: a tensor is stored with another global shape or dtype, or without some requested elements.
        IntegrityError: stored chunks of a tensor overlap.
    """
    if len(shards) == 1 and (run := single_run(index, shards[0])) is not None:
        return run_plan(run[1])
    numbers = np.array(index.find_keys(columns.keys), dtype=np.int64)
    if not stored_alike(index, numbers, columns.kinds):
        check_fit(_misfits(index, shards, cast=False, refusals={})[1])
    plan = plans.plan_load(columns, chunks_of(index, numbers))
    # Overlaps within a tensor are found only here, since opening the index would have to compare all chunks.
    if plan.doubled.size:
        keys = [repr(columns.keys[number]) for number in plan.doubled.tolist()]
        raise IntegrityError(
            error_text("load: the checkpoint contradicts itself: stored chunks overlap", offenders=keys)
        )
    partly = np.flatnonzero(plan.covered != columns.elements)
    if partly.size:
        lacking = [shards[row] for row in partly.tolist()]
        kinds, _ = _misfits(index, lacking, cast=False, refusals={})
        check_fit(plans.find_gaps(lacking, plan.covered[partly], kinds, gaps))
    return plan


def _misfits(
    index: Index, shards: Sequence[ShardedTensor], *, cast: bool, refusals: Mapping[str, str]
) -> tuple[dict[str, TensorKind], list[plans.Misfit]]:
    """Compare shards with the stored tensors; return dtypes and shapes of the stored ones by key, and the misfits.

    Args:
        index: Index of the stored tensors.
        shards: Requested shards.
        cast: Whether shards may have other dtypes than the stored tensors.
        refusals: Reasons why tensors can't be loaded at all, by key; each is a misfit.
    """
    keys = sorted({shard.key for shard in shards})
    numbers = {key: number for key, number in zip(keys, index.find_keys(keys), strict=True) if number >= 0}
    kinds = dict(zip(numbers, index.kinds([*numbers.values()]), strict=True))
    readable = [key for key in keys if key not in refusals]
    misfits: list[plans.Misfit] = [plans.Refusal(key, refusals[key]) for key in keys if key in refusals]
    if not kinds.keys() >= {*readable}:
        misfits += plans.find_unexpected(readable, [*index.keys()])
    stored_shards = [shard for shard in shards if shard.key in kinds and shard.key not in refusals]
    return kinds, [*misfits, *plans.find_mismatches(stored_shards, kinds, cast=cast)]


def read_planned(
    checkpoint: Checkpoint, file: Callable[[int], StoredFile], plan: LoadPlan, memories: Sequence[torch.Tensor]
) -> ReadReport:
    """Execute a plan, after checking the lengths of its files, and return a report.

    Args:
        checkpoint: The open checkpoint, with the options of the load.
        file: Function from a file's number in the plan to the file, such as an index's `file`.
        plan: The bytes to read, and their destinations.
        memories: Contiguous tensors, one for each requested shard, filled in place.

    Raises:
        CorruptCheckpoint: A file is missing or damaged.
    """
    files = {number: file(number) for number in plan.files}
    options = checkpoint.options
    read = partial(fetch, checkpoint.storage, files, plan, memories, verify=options.verify, progress=options.progress)
    if can(checkpoint.storage).read_range is None:
        check_lengths(checkpoint, files.values())
        return read()
    try:
        return read()  # every answer contains its file's length
    except (StorageError, CorruptCheckpoint):
        # A missing file means damage, or a later save, rather than an error of the storage.
        check_lengths(checkpoint, files.values())
        raise


# Explanations of a load, its problems and its cost, from the index alone.

_CONTRADICTION = "its stored chunks overlap; the checkpoint contradicts itself"


def explain_from_index(
    checkpoint: Checkpoint, metadata: IndexMetadata | DeferredMetadata, shards: Sequence[ShardedTensor], *, cast: bool
) -> plans.Prospect:
    """Return the problems and the cost of loading shards from a checkpoint with an index, without reading tensors.

    Args:
        checkpoint: Checkpoint that would be loaded.
        metadata: Metadata of the checkpoint.
        shards: Requested shards; their data is ignored.
        cast: Whether the load converts dtypes, so that a shard's dtype may differ from the stored one.
    """
    keys = {shard.key for shard in shards}
    base = metadata if isinstance(metadata, IndexMetadata) else metadata.stored
    refusals = base.untaken if base.refused is None else base.refused(shards)
    index = (metadata if isinstance(metadata, IndexMetadata) else metadata.of(keys - refusals.keys())).index
    kinds, misfits = _misfits(index, shards, cast=cast, refusals=refusals)
    wrong = {misfit.key for misfit in misfits}
    dtypes = ((shard, kinds[shard.key].dtype) for shard in shards if shard.key in kinds and shard.key not in wrong)
    fit = [shard if shard.dtype == dtype else replace(shard, data=None, dtype=dtype) for shard, dtype in dtypes]
    columns = shard_columns(fit)
    numbers = index.find_keys(columns.keys)
    plan = plans.plan_load(columns, chunks_of(index, np.array(numbers, dtype=np.int64)))
    overlaps = [plans.Refusal(columns.keys[number], _CONTRADICTION) for number in plan.doubled.tolist()]
    cost = partial(planned_cost, checkpoint, index.file, plan) if base.cost is None else partial(base.cost, fit, plan)
    problems = (*misfits, *overlaps, *plans.find_gaps(fit, plan.covered, kinds, base.gaps))
    return plans.Prospect(problems, cost, tuple(base.uncompared(keys)))


def planned_cost(checkpoint: Checkpoint, file: Callable[[int], StoredFile], plan: LoadPlan) -> plans.ReadCost:
    """Return the cost of a plan, after checking the lengths of its files.

    Args:
        checkpoint: The open checkpoint, with the options of the load.
        file: Function from a file's number in the plan to the file, such as an index's `file`.
        plan: The bytes that would be read.

    Raises:
        CorruptCheckpoint: a file is missing, or has another length.
    """
    files = {number: file(number) for number in plan.files}
    check_lengths(checkpoint, files.values())
    return fetch_cost(files, plan, verify=checkpoint.options.verify, storage=checkpoint.storage)


def stored_columns(
    kinds: Mapping[str, TensorKind],
    key: Column,
    offset: Column,
    shape: Column,
    start: Column | None = None,
    stop: Column | None = None,
) -> ShardColumns:
    """Return stored chunks as `ShardColumns`, as if all were main replicas of rank 0.

    Args:
        kinds: Dtype and shape of each tensor, by key, in sorted order.
        key: Position of each chunk's tensor in `kinds`, int64 (chunks,).
        offset: Offsets of the chunks' boxes, int64 (chunks, axes), right-aligned as in `ShardColumns`.
        shape: Shapes of the chunks' boxes, int64 (chunks, axes), right-aligned as in `ShardColumns`.
        start: First element of each flat range, -1 for a whole box, int64 (chunks,); None if all are whole boxes.
        stop: One past the last element of each flat range, like `start`.
    """
    whole = np.full(len(key), -1, dtype=np.int64)
    return ShardColumns(
        tuple(kinds),
        tuple(kinds.values()),
        key,
        offset,
        shape,
        start=whole if start is None else start,
        stop=whole if stop is None else stop,
        rank=np.zeros(len(key), dtype=np.int64),
        main=np.ones(len(key), dtype=np.bool_),
    )
