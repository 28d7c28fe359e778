"""The index of a checkpoint in numpy columns: tensors, their chunks, objects and files; text columns, and lookups.

A checkpoint may have a million chunks, so the columns are views of the index file's bytes, without a Python object for
each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....core.codec import check_storable, dtype_from_name
from ....core.geometry import Column, box_column, span_numbers
from ....core.layouts import TensorKind
from ....core.mapping import ShardedTensor, whole_tensors
from ....core.plans import StoredChunks
from ....errors import UnsupportedValue
from ...storage import Hashes, StoredFile

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The index of a checkpoint: keys, shapes, dtypes and locations of all stored values.

    A chunk is a box of a tensor, or a flat range of a box, in consecutive bytes of a file. Tensors, objects, dtypes and
    files are referred to by number, their position in the columns. Texts are concatenated in UTF-8, with their offsets.

    Attributes:
        key_text: Keys of the tensors, sorted, uint8 (characters,).
        key_start: Offsets of the keys in `key_text`, int64 (keys + 1,).
        key_axes: Number of axes of each tensor, int64 (keys,).
        key_prepended: Number of prepended axes of each tensor, int64 (keys,).
        key_dtype: Number of each tensor's dtype, int64 (keys,).
        key_shape: Global shapes, right-aligned, int64 (keys, axes).
        dtype_text: Names of the dtypes, uint8 (characters,).
        dtype_start: Offsets of the names in `dtype_text`, int64 (dtypes + 1,).
        chunk_key: Number of each chunk's tensor, ascending, int64 (chunks,).
        chunk_offset: Offsets of the chunks' boxes, right-aligned, int64 (chunks, axes).
        chunk_shape: Shapes of the chunks' boxes, right-aligned, int64 (chunks, axes).
        chunk_start: First element of the flat range in the box, -1 for a whole box, int64 (chunks,).
        chunk_stop: One past the last element of the flat range, -1 for a whole box, int64 (chunks,).
        chunk_file: Number of each chunk's file, int64 (chunks,).
        chunk_byte: Offset of each chunk in its file, int64 (chunks,).
        chunk_length: Length of each chunk in bytes, int64 (chunks,).
        object_text: Unique keys of the objects, sorted, uint8 (characters,).
        object_start: Offsets of the unique keys in `object_text`, int64 (objects + 1,).
        object_file: Number of each object's file, int64 (objects,).
        object_byte: Offset of each object in its file, int64 (objects,).
        object_length: Length of each object in bytes, int64 (objects,).
        file_text: Names of the files inside the checkpoint, uint8 (characters,).
        file_start: Offsets of the names in `file_text`, int64 (files + 1,).
        file_length: Length of each file in bytes, int64 (files,).
        file_block: Number of each file's first block, int64 (files + 1,).
        block_hash: XXH3-64 hash of each block, file by file, uint64 (blocks,).
        x_fingerprint: Fingerprint of each tensor, uint64 (keys,); None if the save stored none.
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
    x_fingerprint: Hashes | None = None

    def keys(self) -> list[str]:
        """Return the tensors' keys, sorted; a tensor's number is the position of its key."""
        return texts(self.key_text, self.key_start)

    def object_names(self) -> list[str]:
        """Return the objects' unique keys, sorted; an object's number is the position of its unique key."""
        return texts(self.object_text, self.object_start)

    def file_names(self) -> list[str]:
        """Return the names of the files, by number."""
        return texts(self.file_text, self.file_start)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns as contiguous arrays, by name, without those that are None."""
        columns = {name: getattr(self, name) for name in ALL_COLUMNS}
        return {name: np.ascontiguousarray(column) for name, column in columns.items() if column is not None}

    def find_keys(self, keys: Sequence[str]) -> list[int]:
        """Return the number of each key's tensor (its position in `keys()`), -1 for missing ones."""
        return find_texts(self.key_text, self.key_start, keys)

    def find_objects(self, unique_keys: Sequence[str]) -> list[int]:
        """Return each object's number (its position in `object_names()`), -1 for missing ones."""
        return find_texts(self.object_text, self.object_start, unique_keys)

    def file(self, number: int) -> StoredFile:
        """Return the name, length and block hashes of a data file, given its number."""
        hashes = self.block_hash[self.file_block[number] : self.file_block[number + 1]]
        name, length = text_at(self.file_text, self.file_start, number), int(self.file_length[number])
        return StoredFile(name, length, hashes if hashes.size else None)

    def kind(self, number: int) -> TensorKind:
        """Return the dtype and shape of a stored tensor, given its number.

        Raises:
            UnsupportedValue: this torch lacks the tensor's dtype; other tensors can be read.
        """
        axes = int(self.key_axes[number])
        shape = self.key_shape[number, self.key_shape.shape[1] - axes :].tolist()
        name = text_at(self.dtype_text, self.dtype_start, int(self.key_dtype[number]))
        try:
            return TensorKind(_readable(name), tuple(shape), int(self.key_prepended[number]))
        except UnsupportedValue as error:
            key = text_at(self.key_text, self.key_start, number)[:100]
            raise UnsupportedValue(f"open: {key!r} cannot be read, other tensors can: {error}") from None

    def kinds(self, numbers: Sequence[int]) -> list[TensorKind]:
        """Return the dtypes and shapes of several stored tensors, given their numbers.

        Raises:
            UnsupportedValue: this torch lacks a tensor's dtype.
        """
        rows = np.array(numbers, dtype=np.int64)
        by_number = [_readable_or_none(name) for name in texts(self.dtype_text, self.dtype_start)]
        dtypes = [by_number[number] for number in self.key_dtype[rows].tolist()]
        if None in dtypes:
            return [self.kind(number) for number in numbers]
        # A model repeats few kinds in many layers, so each kind is made once.
        kinds: dict[tuple[Any, ...], TensorKind] = {}
        fields = zip(dtypes, _shapes(self, rows), self.key_prepended[rows].tolist(), strict=True)
        return [kinds.get(kind) or kinds.setdefault(kind, TensorKind(*kind)) for kind in fields]


ALL_COLUMNS = tuple(field.name for field in fields(Index))
COLUMNS = tuple(name for name in ALL_COLUMNS if name != "x_fingerprint")
"""Names of the columns that every index has."""


# Text columns: concatenated UTF-8 texts and their offsets.


def text_columns(texts: Sequence[str]) -> tuple[Bytes, Column]:
    """Return a text column: the concatenated UTF-8 of texts, and each text's offset, followed by the total length.

    Examples:
        >>> text, start = text_columns(["ab", "c"])
        >>> bytes(text), start.tolist()
        (b'abc', [0, 2, 3])
    """
    encodings = [text.encode("utf-8") for text in texts]
    start = np.zeros(len(encodings) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in encodings], out=start[1:])
    return np.frombuffer(b"".join(encodings), dtype=np.uint8), start


def text_at(text: Bytes, start: Column, number: int) -> str:
    """Return a single text of a text column (see `text_columns`), given its number.

    Examples:
        >>> text_at(*text_columns(["ab", "c"]), 1)
        'c'
    """
    return text[start[number] : start[number + 1]].tobytes().decode("utf-8")


def texts(text: Bytes, start: Column) -> list[str]:
    """Return all texts of a text column (see `text_columns`).

    Examples:
        >>> texts(*text_columns(["ab", "c"]))
        ['ab', 'c']
    """
    data, places = text.tobytes(), start.tolist()
    if data.isascii():  # bytes are characters, so one call decodes all texts
        whole = data.decode("ascii")
        return [whole[begin:end] for begin, end in pairwise(places)]
    return [data[begin:end].decode("utf-8") for begin, end in pairwise(places)]


_MOST_WORDS = 64


def ascend(text: Bytes, start: Column) -> bool:
    """Return whether the texts of a text column are strictly ascending by their bytes.

    Examples:
        >>> [ascend(*text_columns(texts)) for texts in (["a", "ab", "b"], ["b", "ab"], ["a", "a"])]
        [True, False, False]
    """
    # Eight bytes of all texts at a time are compared as numbers: decoding each text would dominate an open's time.
    buffer = np.concatenate([text, np.zeros(8, dtype=np.uint8)])
    words = np.ndarray(text.size + 1, dtype=">u8", buffer=buffer, strides=(1,))
    begin, length = start[:-1], np.diff(start)
    row = np.arange(max(length.size - 1, 0))  # rows of texts that are equal to their successors so far
    for at in range(0, 8 * _MOST_WORDS, 8):
        if row.size == length.size - 1:
            word = _words_at(words, begin + at, length - at)
            left, right = word[:-1], word[1:]
        else:
            left, right = (_words_at(words, begin[rows] + at, length[rows] - at) for rows in (row, row + 1))
        if (left > right).any():
            return False
        row = row[left == right]
        # The words are padded with zeros, so if a text ends here, the lengths decide: the shorter one is smaller.
        at_end = row[np.maximum(length[row], length[row + 1]) <= at + 8]
        if (length[at_end] >= length[at_end + 1]).any():
            return False
        if at_end.size == row.size:
            return True
        row = np.setdiff1d(row, at_end, assume_unique=True) if at_end.size else row
    edges = start.tolist()
    triples = (edges[number : number + 3] for number in row.tolist())
    return all(text[low:middle].tobytes() < text[middle:high].tobytes() for low, middle, high in triples)


def _words_at(words: NDArray[Any], at: Column, left: Column) -> NDArray[np.uint64]:
    """Return eight bytes of each text as a big-endian number, with zeros beyond the end of the text.

    Args:
        words: Number made of the eight bytes at each offset of the text column.
        at: Offset in the text column at which each text is read.
        left: Number of bytes from there to the end of the text; may be negative.
    """
    if left.min(initial=8) >= 8:
        return words[at].astype(np.uint64)
    word = words[np.minimum(at, words.size - 1)].astype(np.uint64)
    spare = (64 - 8 * left).clip(0, 63).astype(np.uint64)
    return np.where(left > 0, word >> spare << spare, np.uint64(0))


def find_texts(text: Bytes, start: Column, names: Sequence[str]) -> list[int]:
    """Return the position of each name in a sorted text column, -1 for missing ones.

    A few names are looked up by bisection, so that finding one key in a million needs no pass over all of them.

    Examples:
        >>> find_texts(*text_columns(["ab", "c"]), ["c", "x"])
        [1, -1]
    """
    if len(names) * 32 < start.size:
        return [_bisect(text, start, name.encode("utf-8")) for name in names]
    stored_names = texts(text, start)
    if stored_names == list(names):
        return list(range(len(stored_names)))
    numbers = {name: number for number, name in enumerate(stored_names)}
    return [numbers.get(name, -1) for name in names]


def _bisect(text: Bytes, start: Column, name: bytes) -> int:
    low, high = 0, start.size - 1
    while low < high:
        middle = (low + high) // 2
        if text[start[middle] : start[middle + 1]].tobytes() < name:
            low = middle + 1
        else:
            high = middle
    is_there = low < start.size - 1 and text[start[low] : start[low + 1]].tobytes() == name
    return low if is_there else -1


# Lookups in the rows of an index: tensors, their chunks and their files.

_AT_ONCE = 64
"""Number of shards that are made together: enough to amortise the call, but too few to trigger the garbage collector in
a loop that drops them."""


def item_sizes(index: Index) -> Column:
    """Return the item size of each dtype of an index in bytes, -1 for dtypes that this torch can't read."""
    dtypes = map(_readable_or_none, texts(index.dtype_text, index.dtype_start))
    return np.array([-1 if dtype is None else dtype.itemsize for dtype in dtypes], dtype=np.int64)


def _readable_or_none(name: str) -> torch.dtype | None:
    try:
        return _readable(name)
    except UnsupportedValue:
        return None


def _readable(name: str) -> torch.dtype:
    dtype = dtype_from_name(name)
    check_storable(dtype, "open: dtype in the index")
    return dtype


def stored_alike(index: Index, numbers: Column, kinds: Sequence[TensorKind]) -> bool:
    """Return whether all tensors are stored with the expected global shapes and dtypes.

    Args:
        index: Index of the checkpoint.
        numbers: Numbers of the tensors in the index, -1 for missing ones, int64 (tensors,).
        kinds: Expected dtype and shape of each tensor; prepended axes aren't compared.
    """
    if (numbers < 0).any():
        return False
    width = index.key_shape.shape[1]
    expected_shapes = [kind.global_shape for kind in kinds]
    axes = np.fromiter(map(len, expected_shapes), dtype=np.int64, count=len(kinds))
    try:
        shapes = box_column(expected_shapes, fill=1, axes=width)
    except OverflowError:  # larger than any stored shape
        return False
    if shapes.shape[1] > width or (axes != index.key_axes[numbers]).any() or (shapes != index.key_shape[numbers]).any():
        return False
    by_number = [_readable_or_none(name) for name in texts(index.dtype_text, index.dtype_start)]
    return [by_number[number] for number in index.key_dtype[numbers].tolist()] == [kind.dtype for kind in kinds]


def chunks_of(index: Index, numbers: Column) -> StoredChunks:
    """Return the stored chunks of the given tensors.

    Args:
        index: Index of the checkpoint.
        numbers: Distinct numbers of the tensors in the index, int64 (tensors,). The result's `key` column has positions
            in `numbers`.
    """
    first = np.searchsorted(index.chunk_key, numbers, side="left")
    count = np.searchsorted(index.chunk_key, numbers, side="right") - first
    rows = _rows_of(first, count)
    # Most loads request all tensors: then the index's own column is the result, without a copy.
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
    """Return the integers in ranges of `count` from `first`; if they are adjacent, as a slice, which copies nothing."""
    if first.size and (first[1:] == first[:-1] + count[:-1]).all():
        return slice(int(first[0]), int(first[-1] + count[-1]))
    return span_numbers(first, count)[1]


def whole_shard(index: Index, number: int, key: str) -> ShardedTensor:
    """Return a stored tensor as a `ShardedTensor` that covers it whole, without data."""
    kind = index.kind(number)
    (shard,) = whole_tensors([key], [kind.dtype], [kind.global_shape])
    return shard


def whole_shards(index: Index) -> Iterator[ShardedTensor]:
    """Yield each stored tensor as a `ShardedTensor` that covers it whole, without data; made a few at a time.

    Raises:
        UnsupportedValue: this torch lacks a tensor's dtype; raised after the tensors before it.
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
    """Return the global shapes of tensors, given their row numbers in the index."""
    axes = index.key_shape.shape[1]
    # Columns are converted one by one, since a list for each row would keep the garbage collector busy.
    shapes = list(zip(*index.key_shape[rows].T.tolist(), strict=True))
    skips = (axes - index.key_axes[rows]).tolist()
    return [shape[skip:] for shape, skip in zip(shapes, skips, strict=True)] if any(skips) else shapes


def int64(values: Sequence[int]) -> Column:
    """Return numbers as an int64 column."""
    return np.array(values, dtype=np.int64)
