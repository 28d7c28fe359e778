"""A shard's bytes, cut where they part in the whole tensor: with where in its file each piece goes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...errors import ShapeError, error_text
from ...geometry import Column, box_column, flat_boxes, row_major_strides, volumes
from ...mapping import ShardedTensor
from ...storage import Buffer, tensor_buffers
from .._checks import misfit

_PIECE_BYTES = 1024 * 1024

_STEP = 4096
"""Runs that are computed at once."""


def shard_pieces(shard: ShardedTensor, begin: int) -> Iterator[tuple[int, Buffer]]:
    r"""Yield the bytes of a shard, each piece with the byte of the file that it goes to.

    Args:
        shard: with data.
        begin: the byte of the file at which the whole tensor begins.

    Raises:
        ShapeError: the data isn't what the shard says.

    Examples:
        >>> import torch
        >>> right = ShardedTensor.from_rank_offsets("w", torch.tensor([[1], [2]], dtype=torch.int8), (1, 1, 2))
        >>> [(byte, bytes(piece)) for byte, piece in shard_pieces(right, 100)]
        [(101, b'\x01'), (103, b'\x02')]
    """
    if misfit(shard):
        raise ShapeError(error_text("save: a tensor was changed while it waited to be written", found=misfit(shard)))
    buffers = tensor_buffers(shard.data)
    buffer, at = memoryview(b""), 0
    for byte, length in shard_runs(shard):
        place, end = begin + byte, begin + byte + length
        while place < end:
            if at == buffer.nbytes:
                buffer, at = next(buffers), 0
            size = min(end - place, buffer.nbytes - at, _PIECE_BYTES)
            yield place, buffer[at : at + size]
            place, at = place + size, at + size


def shard_runs(shard: ShardedTensor) -> Iterator[tuple[int, int]]:
    """Yield (byte, length) of the runs that a shard has in its whole tensor, in the order of the shard's own bytes.

    Examples:
        >>> import torch
        >>> list(shard_runs(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2), (1, 1, 2))))
        [(8, 8), (24, 8)]
    """
    whole = box_column([shard.global_shape], fill=1)
    offset = box_column([shard.global_offset], fill=0)
    shape = box_column([(1,) * shard.prepend_axis_num + shard.local_shape], fill=1)
    if shard.flattened_range is not None:
        start, stop = (np.array([edge]) for edge in (shard.flattened_range.start, shard.flattened_range.stop))
        _, inside, shapes, _ = flat_boxes(shape, start, stop)
        offsets = offset + inside
    else:
        offsets, shapes = offset, shape
    for row in range(len(offsets)):
        yield from _box_runs(whole, offsets[row : row + 1], shapes[row : row + 1], shard.dtype.itemsize)


def _box_runs(whole: Column, offset: Column, shape: Column, item_size: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of a box, given with its whole tensor's shape as columns of one row."""
    if not volumes(shape)[0]:
        return
    strides = row_major_strides(whole)[0]
    axes = shape.shape[1]
    # Neighbours along an axis lie in one run while the axes below are whole.
    whole_below = [bool((shape[0, axis + 1 :] == whole[0, axis + 1 :]).all()) for axis in range(axes)]
    outer = whole_below.index(True)
    length = int(shape[0, outer:].prod()) * item_size
    first = int((offset[0] * strides).sum()) * item_size
    rows = shape[:, :outer]
    row_strides = row_major_strides(rows) if outer else rows
    count = int(volumes(rows)[0])
    for start in range(0, count, _STEP):
        number = np.arange(start, min(start + _STEP, count))
        at = number[:, None] // row_strides % rows if outer else np.zeros((number.size, 0), dtype=np.int64)
        for byte in (first + (at * strides[:outer]).sum(axis=1) * item_size).tolist():
            yield byte, length
