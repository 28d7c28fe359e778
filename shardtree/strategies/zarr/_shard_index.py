"""The index inside a file that holds several chunks: zarr's sharding codec, chunks as plain bytes."""

from __future__ import annotations

from functools import cache

import numpy as np

from ...errors import CorruptCheckpoint, error_text
from ...geometry import Column
from ...storage import Storage
from ._array import StoredArray

_CRC_BYTES = 4
_ENTRY_BYTES = 16
_NOT_STORED = 2**64 - 1


def inner_counts(array: StoredArray) -> tuple[int, ...]:
    """Return how many inner chunks one file has along each axis.

    Examples:
        >>> import torch
        >>> inner_counts(StoredArray("w", "w", torch.float32, (8, 6), (4, 6), inner=(1, 6)))
        (4, 1)
    """
    return tuple(size // step for size, step in zip(array.chunk, array.inner or array.chunk, strict=True))


def encode_shard_index(begin: Column, length: Column) -> bytes:
    """Return the index of a file: where each inner chunk begins and how long it is, in bytes, and the CRC of that.

    Examples:
        >>> encode_shard_index(np.array([0]), np.array([8])).hex()
        '00000000000000000800000000000000309e4b00'
    """
    entries = np.stack([begin, length], axis=1).astype("<u8").tobytes()
    return entries + crc32c(entries).to_bytes(_CRC_BYTES, "little")


def index_bytes(array: StoredArray) -> int:
    """Return how many bytes the index of a file takes."""
    return int(np.prod(inner_counts(array), dtype=object)) * _ENTRY_BYTES + _CRC_BYTES * array.index_checked


def read_shard_index(storage: Storage, array: StoredArray, name: str) -> tuple[Column, Column]:
    """Return which inner chunks a file holds, by row-major number, and where each begins in it.

    Raises:
        CorruptCheckpoint: the file is too short, the index isn't what was written, or a chunk isn't whole.
    """
    length, size = storage.length(name) or 0, index_bytes(array)
    if size > length:
        raise _unsound(storage, name, f"{length} bytes", f"an index of {size} bytes")
    data = bytearray(size)
    with storage.open(name) as reader:
        reader.read_into(0 if array.index_first else length - size, [memoryview(data)])
    if array.index_checked:
        data, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
        if crc32c(bytes(data)).to_bytes(_CRC_BYTES, "little") != crc:
            raise _unsound(storage, name, "an index with another CRC", "that which it was written with")
    entries = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
    stored = np.flatnonzero((entries != _NOT_STORED).any(axis=1))
    begin, count = entries[stored].T
    whole = int(np.prod(array.inner or (), dtype=object)) * array.dtype.itemsize
    wrong = (count != whole) | (begin > max(0, length - whole))
    if wrong.any() or whole > length:
        found = f"an inner chunk at byte {begin[wrong][:1]} of {count[wrong][:1]} bytes" if wrong.any() else "none"
        raise _unsound(storage, name, found, f"chunks of {whole} bytes inside {length} bytes")
    return stored, begin.astype(np.int64)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes, of which there are few: the zlib of Python has only the other CRC-32.

    Examples:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'

    References:
        RFC 3720, appendix B.4.
    """
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
        error_text(f"open: {storage.where(name)!r} is not sound", found=found, expected=expected, fix=fix)
    )
