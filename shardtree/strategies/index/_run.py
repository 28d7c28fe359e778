"""One box that is one run of one stored chunk, such as a few rows of a large tensor: found and read without a plan."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from ...errors import StorageError
from ...geometry import Column
from ...mapping import ShardedTensor
from ...plans import LoadPlan, Runs, runs_plan
from ...storage import BLOCK_BYTES, Buffer, ReadReport, StoredFile
from .._missing import check_lengths, missing_file
from .._values import Checkpoint
from ._columns import Index
from ._rows import kind_at
from ._texts import find_texts, text_at

MOST_BYTES = 4 * 1024 * 1024
"""A longer run is left to several threads."""


class Run(NamedTuple):
    """The bytes of a stored box, consecutive in a file.

    Attributes:
        file: number of the file.
        byte: where they begin in it.
        length: in bytes.
    """

    file: int
    byte: int
    length: int


def single_run(index: Index, shard: ShardedTensor) -> Run | None:
    """Return where a requested box lies, if that is one run of one chunk and nothing is wrong with it, else None.

    Args:
        index: what is stored.
        shard: what is asked for.
    """
    (number,) = find_texts(index.key_text, index.key_start, [shard.key])
    if number < 0 or shard.flattened_range is not None:
        return None
    kind = kind_at(index, number)
    if (kind.dtype, kind.global_shape) != (shard.dtype, shard.global_shape):
        return None
    box = (1,) * shard.prepend_axis_num + shard.local_shape
    row = _only_chunk(index, number, shard.global_offset, box)
    if row is None or index.chunk_start[row] >= 0:
        return None
    first = index.chunk_shape.shape[1] - len(box)
    offset, shape = index.chunk_offset[row, first:].tolist(), index.chunk_shape[row, first:].tolist()
    begin = [at - low for at, low in zip(shard.global_offset, offset, strict=True)]
    if not _is_run(begin, box, shape):
        return None
    element = 0
    for at, size in zip(begin, shape, strict=True):
        element = element * size + at
    byte = int(index.chunk_byte[row]) + element * kind.dtype.itemsize
    return Run(int(index.chunk_file[row]), byte, prod(box) * kind.dtype.itemsize)


def _only_chunk(index: Index, number: int, offset: tuple[int, ...], box: tuple[int, ...]) -> int | None:
    """Return the one chunk of a tensor that has anything of a box, None where there are more, or none."""
    first, last = index.chunk_key.searchsorted((number, number + 1)).tolist()
    if last - first == 1:
        return int(first)
    axes = index.chunk_shape.shape[1] - len(box)
    begin, end = (columns[first:last, axes:] for columns in (index.chunk_offset, index.chunk_shape))
    meets = ((begin < np.add(offset, box)) & (begin + end > offset)).all(axis=1)
    rows = np.flatnonzero(meets).tolist()
    return first + rows[0] if len(rows) == 1 else None


def _is_run(begin: list[int], box: tuple[int, ...], shape: list[int]) -> bool:
    """Return whether a box with elements lies inside of a row-major box, its elements one after the other."""
    inside = all(at >= 0 and at + size <= whole for at, size, whole in zip(begin, box, shape, strict=True))
    cut = max((axis for axis in range(len(box)) if box[axis] != shape[axis]), default=0)
    return inside and all(size == 1 for size in box[:cut]) and 0 not in box


def run_plan(run: Run) -> LoadPlan:
    """Return the plan that reads a run into the first of the targets."""
    file, byte, length = (np.array([number], dtype=np.int64) for number in run)
    zero: Column = np.zeros(1, dtype=np.int64)
    return runs_plan(Runs(file, byte, zero, zero, length))


def read_run(checkpoint: Checkpoint, index: Index, run: Run, memory: Buffer) -> ReadReport:
    """Read a run into memory by one call; nothing is checked but that the file is as long as it was.

    Raises:
        CorruptCheckpoint: it isn't.
    """
    name, length = text_at(index.file_text, index.file_start, run.file), int(index.file_length[run.file])
    try:
        with checkpoint.storage.open(name) as reader:
            if reader.length != length:
                raise missing_file(checkpoint, name, length)
            reader.read_into(run.byte, [memory])
    except StorageError:
        check_lengths(checkpoint, [StoredFile(name, length)])  # that it isn't there is damage, or another save's doing
        raise
    checkpoint.options.progress(run.length)
    blocks = (run.byte + run.length - 1) // BLOCK_BYTES - run.byte // BLOCK_BYTES + 1
    return ReadReport(run.length, 0, blocks, 1)
