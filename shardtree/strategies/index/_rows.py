"""What the rows of an index say of a tensor, its chunks and its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...codec import check_storable, dtype_from_name
from ...errors import UnsupportedValue
from ...geometry import Column, box_column
from ...layouts import TensorKind
from ...mapping import ShardedTensor, whole_tensors
from ...plans import StoredChunks
from ...storage import StoredFile
from ._columns import Index
from ._texts import text_at, texts

_AT_ONCE = 64
"""So few that a loop which lets go of shards never wakes the garbage collector, so many that a call for all pays."""


def item_sizes(index: Index) -> Column:
    """Return how many bytes an element of each of an index's dtypes has, -1 where this torch can't read it."""
    return np.array([_item_size(name) for name in texts(index.dtype_text, index.dtype_start)], dtype=np.int64)


def _item_size(name: str) -> int:
    dtype = _readable_or_none(name)
    return -1 if dtype is None else dtype.itemsize


def _readable_or_none(name: str) -> torch.dtype | None:
    try:
        return _readable(name)
    except UnsupportedValue:
        return None


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


def kinds_at(index: Index, numbers: Sequence[int]) -> list[TensorKind]:
    """Return what all shards of each of some stored tensors agree on.

    Raises:
        UnsupportedValue: as `kind_at`.
    """
    rows = np.array(numbers, dtype=np.int64)
    by_number = [_readable_or_none(name) for name in texts(index.dtype_text, index.dtype_start)]
    dtypes = [by_number[number] for number in index.key_dtype[rows].tolist()]
    if None in dtypes:
        return [kind_at(index, number) for number in numbers]
    # A model repeats few kinds in many layers; each is one object.
    known: dict[tuple[Any, ...], TensorKind] = {}
    fields = zip(dtypes, _shapes(index, rows), index.key_prepended[rows].tolist(), strict=True)
    return [known.get(each) or known.setdefault(each, TensorKind(*each)) for each in fields]


def stored_alike(index: Index, numbers: Column, kinds: Sequence[TensorKind]) -> bool:
    """Return whether some tensors are stored in certain global shapes and dtypes: a look at columns.

    Args:
        index: the checkpoint's index.
        numbers: the tensors' numbers in the index, -1 for one that isn't there, int64 (tensors,).
        kinds: what each is to be; prepended axes don't count.
    """
    if (numbers < 0).any():
        return False
    width = index.key_shape.shape[1]
    wanted = [kind.global_shape for kind in kinds]
    axes = np.fromiter(map(len, wanted), dtype=np.int64, count=len(kinds))
    try:
        shapes = box_column(wanted, fill=1, axes=width)
    except OverflowError:  # larger than anything that is stored
        return False
    if shapes.shape[1] > width or (axes != index.key_axes[numbers]).any() or (shapes != index.key_shape[numbers]).any():
        return False
    by_number = [_readable_or_none(name) for name in texts(index.dtype_text, index.dtype_start)]
    return [by_number[number] for number in index.key_dtype[numbers].tolist()] == [kind.dtype for kind in kinds]


def chunks_of(index: Index, numbers: Column) -> StoredChunks:
    """Return the stored chunks of some tensors.

    Args:
        index: the checkpoint's index.
        numbers: the tensors' numbers in the index, each once, int64 (tensors,); the result numbers them by position.
    """
    first = np.searchsorted(index.chunk_key, numbers, side="left")
    count = np.searchsorted(index.chunk_key, numbers, side="right") - first
    rows = _rows_of(first, count)
    # Most loads ask for all: then the index's own column says it.
    all_of_them = isinstance(rows, slice) and (numbers == np.arange(numbers.size)).all()
    return StoredChunks(
        key=index.chunk_key[rows] if all_of_them else np.repeat(np.arange(numbers.size), count),
        offset=index.chunk_offset[rows],
        shape=index.chunk_shape[rows],
        start=index.chunk_start[rows],
        stop=index.chunk_stop[rows],
        file=index.chunk_file[rows],
        byte=index.chunk_byte[rows],
    )


def _rows_of(first: Column, count: Column) -> Column | slice:
    """Return the rows of stretches, one after the other; a slice where they lie so, which copies nothing."""
    if first.size and (first[1:] == first[:-1] + count[:-1]).all():
        return slice(int(first[0]), int(first[-1] + count[-1]))
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)


def file_at(index: Index, number: int) -> StoredFile:
    """Return a data file of the checkpoint, with its block hashes."""
    hashes = index.block_hash[index.file_block[number] : index.file_block[number + 1]]
    name, length = text_at(index.file_text, index.file_start, number), int(index.file_length[number])
    return StoredFile(name, length, hashes if hashes.size else None)


def whole_shard(index: Index, number: int, key: str) -> ShardedTensor:
    """Return a stored tensor as one shard without data."""
    kind = kind_at(index, number)
    (shard,) = whole_tensors([key], [kind.dtype], [kind.global_shape])
    return shard


def whole_shards(index: Index) -> Iterator[ShardedTensor]:
    """Yield each stored tensor as one shard without data, made a few at a time.

    Raises:
        UnsupportedValue: this torch lacks a tensor's dtype; those before it come first.
    """
    keys, shapes = texts(index.key_text, index.key_start), _shapes(index, np.arange(index.key_axes.size))
    by_number = [_readable_or_none(name) for name in texts(index.dtype_text, index.dtype_start)]
    dtypes = [by_number[number] for number in index.key_dtype.tolist()]
    for first in range(0, len(keys), _AT_ONCE):
        rows = slice(first, first + _AT_ONCE)
        if None in dtypes[rows]:
            yield from (whole_shard(index, number, keys[number]) for number in range(len(keys))[rows])
        else:
            yield from whole_tensors(keys[rows], dtypes[rows], shapes[rows])


def _shapes(index: Index, rows: Column) -> list[tuple[int, ...]]:
    """Return the global shape of each of some tensors."""
    axes = index.key_shape.shape[1]
    # By columns: a list for each row would keep the garbage collector busy.
    shapes = list(zip(*index.key_shape[rows].T.tolist(), strict=True))
    skipped = (axes - index.key_axes[rows]).tolist()
    return [shape[skip:] for shape, skip in zip(shapes, skipped, strict=True)] if any(skipped) else shapes
