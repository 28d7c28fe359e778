"""The cells of an array's grid: which of them have files, and which boxes of the tensor these files have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from ...errors import CorruptCheckpoint, UnsupportedValue, error_text
from ...kit import Column, Storage, row_major_strides
from ._array import Shape, StoredArray

_MOST_FILLED = 2**40
"""Upper bound of the bytes of a tensor that no file has: zarr's writers omit chunks of the fill value, such as the
moments of a new optimizer, but not a tebibyte of it."""

MOST_CELLS = 2**21
"""Upper bound of the cells without a file, which are listed one by one: a crafted tiny file may name a huge grid."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPieces:
    """Boxes of a tensor that are contiguous bytes of a chunk: the chunk itself, or rows of a chunk at an edge.

    Attributes:
        row: Number of each piece's chunk, int64 (pieces,).
        offset: Offset of each piece in the tensor, int64 (pieces, axes).
        shape: Shape of each piece, int64 (pieces, axes).
        element: Offset of each piece in its chunk, in elements, int64 (pieces,).
    """

    row: Column
    offset: Column
    shape: Column
    element: Column


def pieces(offset: Column, chunk: Shape, box: Shape) -> ChunkPieces:
    """Return the parts of chunks that lie inside the tensor, divided into boxes that are contiguous in a chunk.

    Args:
        offset: Offset of each chunk in the tensor, int64 (chunks, axes).
        chunk: Shape of all chunks, which may reach beyond the tensor.
        box: Shape of the tensor.

    Examples:
        >>> rows = pieces(np.array([[0, 0], [0, 2]]), (2, 2), (2, 3))
        >>> rows.offset.tolist(), rows.shape.tolist(), rows.element.tolist()
        ([[0, 0], [0, 2], [1, 2]], [[2, 2], [1, 1], [1, 1]], [0, 0, 2])
    """
    whole = np.array(chunk, dtype=np.int64)
    shape = np.minimum(whole, np.array(box, dtype=np.int64) - offset)
    # An edge chunk is stored at full length with padding: elements are contiguous only from its last cut axis on.
    before = _before_last_cut(shape < whole)
    rows = np.where(before, shape, 1)
    count = rows.prod(axis=1)
    row = np.repeat(np.arange(count.size), count)
    number = np.arange(row.size) - (np.cumsum(count) - count)[row]
    at = number[:, None] // row_major_strides(rows)[row] % rows[row]
    element = (at * row_major_strides(whole[None])).sum(axis=1)
    return ChunkPieces(row, offset[row] + at, np.where(before, 1, shape)[row], element)


def count_pieces(offset: Column, chunk: Shape, box: Shape) -> float:
    """Return the number of boxes that `pieces` would return, as a float, which cannot overflow."""
    whole = np.array(chunk, dtype=np.int64)
    shape = np.minimum(whole, np.array(box, dtype=np.int64) - offset)
    return float(np.where(_before_last_cut(shape < whole), shape, 1).astype(np.float64).prod(axis=1).sum())


def _before_last_cut(
    cut: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return a mask of the axes before each chunk's last cut axis, bool (chunks, axes).

    `cut` is the mask of the axes along which the tensor's edge cuts a chunk.
    """
    after: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = np.zeros_like(cut)
    after[:, :-1] = np.logical_or.accumulate(cut[:, :0:-1], axis=1)[:, ::-1]
    return after


def stored_cells(storage: Storage, array: StoredArray) -> Column:
    """Return the cells that have a file, in row-major order, int64 (cells, axes)."""
    # The folder is listed: so the cost depends on the number of files, whatever grid the metadata claims.
    if not array.shape:
        return np.zeros((int(storage.length(array.file_name((0,))) is not None), 1), dtype=np.int64)
    cells = [
        cell
        for cell in _listed_cells(storage, array)
        if all(at < count for at, count in zip(cell, array.counts, strict=True))
    ]
    return np.array(sorted(cells), dtype=np.int64).reshape(-1, len(array.shape))


def _listed_cells(storage: Storage, array: StoredArray) -> Iterator[Shape]:
    axes = len(array.shape)
    if array.separator == ".":
        for name in storage.names(array.name):
            parts = name.split(".")
            if array.prefix and parts.pop(0) != array.prefix:
                continue
            if len(parts) == axes and all(map(_is_number, parts)):
                yield tuple(map(int, parts))
        return
    folder = f"{array.name}/{array.prefix}" if array.prefix else array.name
    yield from _nested_cells(storage, folder, axes)


def _nested_cells(storage: Storage, folder: str, axes: int) -> Iterator[Shape]:
    for name in filter(_is_number, storage.names(folder)):
        if axes == 1:
            yield (int(name),)
        else:
            for inner in _nested_cells(storage, f"{folder}/{name}", axes - 1):
                yield (int(name), *inner)


def _is_number(text: str) -> bool:
    # isdigit() alone accepts digits of other scripts, and int() would read 007 as 7, which is another file.
    return text.isascii() and text.isdigit() and len(text) < 20 and (text == "0" or text[0] != "0")


def missing_cells(array: StoredArray, cells_with_files: Column, most: int = MOST_CELLS) -> Column:
    """Return the cells that have no file, int64 (cells, axes).

    Args:
        array: Array with the grid.
        cells_with_files: Cells that have a file, int64 (stored, axes).
        most: Upper bound of the result's size, which is cells times axes.

    Raises:
        UnsupportedValue: There are too many cells, or too many bytes in them.
    """
    # A few bytes of metadata may describe a grid of 2**60 cells; only as many as fit the memory are listed.
    total = prod(array.counts)
    most //= len(array.box)
    if total - len(cells_with_files) > most:
        found, expected = f"{total - len(cells_with_files)} of {total} chunks missing", f"at most {most} missing"
        fix = "Rewrite the array with larger chunks."
        heading = f"open: array {array.name!r} has too many chunks without a file"
        raise UnsupportedValue(error_text(heading, found=found, expected=expected, fix=fix))
    fill_bytes = min(prod(array.box) * array.dtype.itemsize, (total - len(cells_with_files)) * array.file_bytes)
    if fill_bytes > _MOST_FILLED:
        found, expected = f"{fill_bytes} bytes in chunks to fill", f"at most {_MOST_FILLED}"
        fix = "Rewrite the array with all its chunks stored, or move it out of the checkpoint's folder."
        heading = f"open: the missing chunks of array {array.name!r} are too large to fill with its fill value"
        raise UnsupportedValue(error_text(heading, found=found, expected=expected, fix=fix))
    if total == len(cells_with_files):
        return cells_with_files[:0]
    strides = row_major_strides(np.array([array.counts], dtype=np.int64))
    flags = np.ones(total, dtype=np.bool_)
    flags[(cells_with_files * strides).sum(axis=1)] = False
    cells: Column = np.flatnonzero(flags)[:, None] // strides % np.array(array.counts, dtype=np.int64)
    return cells


# This section reads and writes the index of a file with several chunks: zarr's sharding codec, with plain chunks.

_CRC_BYTES = 4
_ENTRY_BYTES = 16
_NOT_STORED = 2**64 - 1  # By zarr's spec, this is the offset and length of a chunk that isn't stored.


def inner_counts(array: StoredArray) -> tuple[int, ...]:
    """Return the number of inner chunks of a file along each axis.

    Examples:
        >>> import torch
        >>> inner_counts(StoredArray("w", "w", torch.float32, (8, 6), (4, 6), inner=(1, 6)))
        (4, 1)
    """
    return tuple(size // step for size, step in zip(array.chunk, array.inner or array.chunk, strict=True))


def encode_shard_index(begin: Column, length: Column) -> bytes:
    """Return the index of a file: offset and length of each inner chunk, in bytes, then the CRC-32C of these numbers.

    Examples:
        >>> encode_shard_index(np.array([0]), np.array([8])).hex()
        '00000000000000000800000000000000309e4b00'
    """
    entries = np.stack([begin, length], axis=1).astype("<u8").tobytes()
    return entries + crc32c(entries).to_bytes(_CRC_BYTES, "little")


def index_bytes(array: StoredArray) -> int:
    """Return the number of bytes of a file's index."""
    return int(np.prod(inner_counts(array), dtype=object)) * _ENTRY_BYTES + _CRC_BYTES * array.index_checked


def read_shard_index(storage: Storage, array: StoredArray, name: str) -> tuple[Column, Column]:
    """Return the inner chunks that a file has: their row-major numbers, and their offsets in the file, in bytes.

    Args:
        storage: Storage of the file.
        array: Array with inner chunks.
        name: Name of the file.

    Raises:
        CorruptCheckpoint: The file is too short, its index fails the CRC, or an inner chunk has a wrong length or lies
            outside of the file.
    """
    # Python's integers are used, since numbers of the metadata may exceed 64 bits, and must not wrap around.
    length, size = storage.length(name) or 0, index_bytes(array)
    # This is checked before memory is allocated: metadata can claim any number of inner chunks.
    if size > length:
        raise _unsound(storage, name, f"{length} bytes", f"an index of {size} bytes")
    data = bytearray(size)
    with storage.open(name) as reader:
        reader.read_into(0 if array.index_first else length - size, [memoryview(data)])
    if array.index_checked:
        data, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if crc32c(bytes(data)).to_bytes(_CRC_BYTES, "little") != crc:
            raise _unsound(storage, name, "an index with another CRC", "the CRC that was written with it")
    entries = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
    numbers = np.flatnonzero((entries != _NOT_STORED).any(axis=1))
    begin, count = entries[numbers].T
    whole = int(np.prod(array.inner or (), dtype=object)) * array.dtype.itemsize
    # Inner chunks are plain bytes here, so each must have the same length. The comparison avoids begin + count, which
    # could overflow uint64.
    wrong = (count != whole) | (begin > max(0, length - whole))
    if wrong.any() or whole > length:
        found = f"an inner chunk at byte {begin[wrong][:1]} of {count[wrong][:1]} bytes" if wrong.any() else "none"
        raise _unsound(storage, name, found, f"chunks of {whole} bytes inside {length} bytes")
    return numbers, begin.astype(np.int64)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of a few bytes. Python's zlib has only the other CRC-32, and this loop is slow.

    Examples:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'

    References:
        RFC 3720, appendix B.4.
    """
    # An index has a few hundred bytes, so that a loop is fast enough and needs no further package.
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    def shifted(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(map(shifted, range(256)))


def _unsound(storage: Storage, name: str, found: str, expected: str) -> CorruptCheckpoint:
    fix = "The file was damaged after it was saved; load another checkpoint."
    return CorruptCheckpoint(
        error_text(f"open: {storage.where(name)!r} is not a valid zarr shard", found=found, expected=expected, fix=fix)
    )


def inner_cells(array: StoredArray, cell: Column, numbers: Column) -> Column:
    """Return the indices of a file's inner chunks in the array's grid of inner chunks, int64 (chunks, axes).

    Args:
        array: Array with inner chunks.
        cell: Index of the file in the grid of files, int64 (axes,).
        numbers: Numbers of the chunks in the file, int64 (chunks,).
    """
    counts = np.array(inner_counts(array), dtype=np.int64)
    strides = np.append(np.cumprod(counts[:0:-1])[::-1], 1).astype(np.int64)
    places: Column = cell * counts + numbers[:, None] // strides % counts
    return places
