"""The global index in columns: which tensor, which box, which file, which byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...codec import dtype_from_name
from ...geometry import Column
from ...layouts import TensorKind
from ...plans import StoredChunks
from ...storage import Hashes, StoredFile

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Everything about a checkpoint but the elements. Texts are utf-8, one after the other, with where each starts.

    Attributes:
        key_text: tensors' keys, sorted, uint8 (characters,).
        key_start: int64 (keys + 1,).
        key_axes: rank of each tensor, int64 (keys,).
        key_prepended: how many of the axes are prepended, int64 (keys,).
        key_dtype: number of the dtype's name, int64 (keys,).
        key_shape: global shapes, right-aligned, int64 (keys, axes).
        dtype_text: names of the dtypes, uint8 (characters,).
        dtype_start: int64 (dtypes + 1,).
        chunk_key: number of the key, ascending, int64 (chunks,).
        chunk_offset: right-aligned, int64 (chunks, axes).
        chunk_shape: right-aligned, int64 (chunks, axes).
        chunk_start: first element of the flat range, -1 for a whole box, int64 (chunks,).
        chunk_stop: int64 (chunks,).
        chunk_file: number of the file, int64 (chunks,).
        chunk_byte: where the chunk begins in the file, int64 (chunks,).
        chunk_length: in bytes, int64 (chunks,).
        object_text: objects' unique keys, sorted, uint8 (characters,).
        object_start: int64 (objects + 1,).
        object_file: int64 (objects,).
        object_byte: int64 (objects,).
        object_length: int64 (objects,).
        file_text: names inside the checkpoint, uint8 (characters,).
        file_start: int64 (files + 1,).
        file_length: in bytes, int64 (files,).
        file_block: number of each file's first block hash, int64 (files + 1,).
        block_hash: XXH3-64 of each block, file by file, uint64 (blocks,).
    """

    key_text: Bytes
    key_start: Column
    key_axes: Column
    key_prepended: Column
    key_dtype: Column
    key_shape: Column
    dtype_text: Bytes
    dtype_start: Column
    chunk_key: Column
    chunk_offset: Column
    chunk_shape: Column
    chunk_start: Column
    chunk_stop: Column
    chunk_file: Column
    chunk_byte: Column
    chunk_length: Column
    object_text: Bytes
    object_start: Column
    object_file: Column
    object_byte: Column
    object_length: Column
    file_text: Bytes
    file_start: Column
    file_length: Column
    file_block: Column
    block_hash: Hashes


COLUMNS = tuple(field.name for field in fields(Index))


def text_columns(texts: Sequence[str]) -> tuple[Bytes, Column]:
    """Return texts as one utf-8 column, and where each starts.

    Examples:
        >>> text, start = text_columns(["ab", "c"])
        >>> bytes(text), start.tolist()
        (b'abc', [0, 2, 3])
    """
    encoded = [text.encode("utf-8") for text in texts]
    start = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in encoded], out=start[1:])
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), start


def text_at(text: Bytes, start: Column, number: int) -> str:
    """Return one text of a text column.

    Examples:
        >>> text_at(*text_columns(["ab", "c"]), 1)
        'c'
    """
    return text[start[number] : start[number + 1]].tobytes().decode("utf-8")


def texts(text: Bytes, start: Column) -> list[str]:
    """Return all texts of a text column.

    Examples:
        >>> texts(*text_columns(["ab", "c"]))
        ['ab', 'c']
    """
    joined, places = text.tobytes(), start.tolist()
    return [joined[begin:end].decode("utf-8") for begin, end in pairwise(places)]


def find_texts(text: Bytes, start: Column, wanted: Sequence[str]) -> list[int]:
    """Return the numbers of texts in a sorted text column; -1 for one that isn't there.

    A few are looked up by bisection, so that one key of a million needs no pass over all of them.

    Examples:
        >>> find_texts(*text_columns(["ab", "c"]), ["c", "x"])
        [1, -1]
    """
    if len(wanted) * 32 < start.size:
        return [_bisect(text, start, name.encode("utf-8")) for name in wanted]
    numbers = {name: number for number, name in enumerate(texts(text, start))}
    return [numbers.get(name, -1) for name in wanted]


def _bisect(text: Bytes, start: Column, name: bytes) -> int:
    low, high = 0, start.size - 1
    while low < high:
        middle = (low + high) // 2
        if text[start[middle] : start[middle + 1]].tobytes() < name:
            low = middle + 1
        else:
            high = middle
    found = low < start.size - 1 and text[start[low] : start[low + 1]].tobytes() == name
    return low if found else -1


def kind_at(index: Index, number: int) -> TensorKind:
    """Return what all shards of a stored tensor agree on."""
    axes = int(index.key_axes[number])
    shape = index.key_shape[number, index.key_shape.shape[1] - axes :].tolist()
    name = text_at(index.dtype_text, index.dtype_start, int(index.key_dtype[number]))
    return TensorKind(dtype_from_name(name), tuple(shape), int(index.key_prepended[number]))


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
    return StoredFile(text_at(index.file_text, index.file_start, number), int(index.file_length[number]), hashes)
