"""What the rows of an index say of a tensor, its chunks and its files."""

from __future__ import annotations

import numpy as np
import torch

from ...codec import check_storable, dtype_from_name
from ...errors import UnsupportedValue
from ...geometry import Column
from ...layouts import TensorKind
from ...mapping import ShardedTensor
from ...plans import StoredChunks
from ...storage import StoredFile
from ._columns import Index
from ._texts import text_at, texts


def item_sizes(index: Index) -> Column:
    """Return how many bytes an element of each of an index's dtypes has, -1 where this torch can't read it."""
    return np.array([_item_size(name) for name in texts(index.dtype_text, index.dtype_start)], dtype=np.int64)


def _item_size(name: str) -> int:
    try:
        return _readable(name).itemsize
    except UnsupportedValue:
        return -1


def _readable(name: str) -> torch.dtype:
    dtype = dtype_from_name(name)
    check_storable(dtype, "open: dtype in the index")
    return dtype


def kind_at(index: Index, number: int) -> TensorKind:
    """Return what all shards of a stored tensor agree on.

    Raises:
        UnsupportedValue: this torch lacks the tensor's dtype; others can be read.
    """
    axes = int(index.key_axes[number])
    shape = index.key_shape[number, index.key_shape.shape[1] - axes :].tolist()
    name = text_at(index.dtype_text, index.dtype_start, int(index.key_dtype[number]))
    try:
        return TensorKind(_readable(name), tuple(shape), int(index.key_prepended[number]))
    except UnsupportedValue as error:
        key = text_at(index.key_text, index.key_start, number)[:100]
        raise UnsupportedValue(f"open: {key!r} can't be read, other tensors can: {error}") from None


def chunks_of(index: Index, numbers: Column) -> StoredChunks:
    """Return the stored chunks of some tensors.

    Args:
        index: the checkpoint's index.
        numbers: the tensors' numbers in the index, each once, int64 (tensors,); the result numbers them by position.
    """
    first = np.searchsorted(index.chunk_key, numbers, side="left")
    count = np.searchsorted(index.chunk_key, numbers, side="right") - first
    rows = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return StoredChunks(
        key=np.repeat(np.arange(numbers.size), count),
        offset=index.chunk_offset[rows],
        shape=index.chunk_shape[rows],
        start=index.chunk_start[rows],
        stop=index.chunk_stop[rows],
        file=index.chunk_file[rows],
        byte=index.chunk_byte[rows],
    )


def file_at(index: Index, number: int) -> StoredFile:
    """Return a data file of the checkpoint, with its block hashes."""
    hashes = index.block_hash[index.file_block[number] : index.file_block[number + 1]]
    name, length = text_at(index.file_text, index.file_start, number), int(index.file_length[number])
    return StoredFile(name, length, hashes if hashes.size else None)


def whole_shard(index: Index, number: int, key: str) -> ShardedTensor:
    """Return a stored tensor as one shard without data."""
    kind = kind_at(index, number)
    axes = len(kind.global_shape)
    return ShardedTensor(key, None, kind.dtype, kind.global_shape, kind.global_shape, (0,) * axes, (1,) * axes)
