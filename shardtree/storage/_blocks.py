"""Block hashes: XXH3-64 over blocks of 256 KiB that tile a file from its first byte to its last."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..geometry import Column
from ._storage import Buffer

BLOCK_BYTES = 256 * 1024

Hashes = NDArray[np.uint64]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


def digest(data: bytes | Buffer) -> str:
    """Return the XXH3-64 hash of bytes as 16 hexadecimal digits.

    Examples:
        >>> digest(b"")
        '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def block_count(length: int) -> int:
    """Return how many blocks tile a file of that length in bytes.

    Examples:
        >>> block_count(0), block_count(1), block_count(BLOCK_BYTES + 1)
        (0, 1, 2)
    """
    return -(-length // BLOCK_BYTES)


def block_hash(block: bytes | Buffer) -> int:
    """Return the hash of one whole block.

    Examples:
        >>> hex(block_hash(b""))
        '0x2d06800538d394c2'
    """
    return xxhash.xxh3_64_intdigest(block)


def touched(begin: Column, end: Column, length: int, unit: int) -> Flags:
    """Return which units of a file hold a byte of some spans.

    Args:
        begin: int64 (spans,).
        end: one past the last byte, int64 (spans,).
        length: of the file, in bytes.
        unit: in bytes; units tile the file.

    Returns:
        bool (units,).

    Examples:
        >>> touched(np.array([5, 9]), np.array([15, 9]), length=32, unit=10)
        array([ True,  True, False, False])
    """
    rows = begin < end
    count = -(-length // unit)
    opened = np.bincount(begin[rows] // unit, minlength=count + 1)
    closed = np.bincount(-(-end[rows] // unit), minlength=count + 1)
    return (opened - closed).cumsum()[:count] > 0


def missing(begin: Column, end: Column, length: int) -> Column:
    """Return how many bytes of each block of a file lie in none of some spans.

    Args:
        begin: int64 (spans,), ascending; spans may overlap.
        end: one past the last byte, int64 (spans,).
        length: of the file, in bytes.

    Returns:
        int64 (blocks,).

    Examples:
        >>> missing(np.array([10, 15]), np.array([20, 30]), length=BLOCK_BYTES + 5).tolist()
        [262124, 5]
    """
    edges = np.minimum(np.arange(block_count(length) + 1) * BLOCK_BYTES, length)
    counts: Column = np.diff(edges) - np.diff(covered(begin, end, edges))
    return counts


def covered(begin: Column, end: Column, edges: Column) -> Column:
    """Return how many bytes before each of some places of a file lie in any of some spans.

    Args:
        begin: int64 (spans,), ascending; spans may overlap.
        end: one past the last byte, int64 (spans,).
        edges: the places, int64 (edges,).

    Examples:
        >>> covered(np.array([10, 15]), np.array([20, 30]), np.array([10, 16, 99])).tolist()
        [0, 6, 20]
    """
    reached = np.maximum.accumulate(end)
    # Each span without what those before it hold: these overlap no more.
    begin = np.maximum(begin, np.concatenate((begin[:1], reached[:-1])))
    end = np.maximum(begin, end)
    sums = np.concatenate(([0], np.cumsum(end - begin)))
    opened, closed = (np.searchsorted(column, edges, side="left") for column in (begin, reached))
    # Up to an edge lie the spans that ended before it, and of one that goes on beyond it the beginning.
    return np.asarray(sums[closed] + np.where(opened > closed, edges - np.append(begin, 0)[closed], 0))


class BlockHasher:
    """Hashes the blocks of a file, or of stretches of it, as its bytes go by.

    Blocks that were seen whole are in `hashes`, by number; -1 of one that was seen more than once, not each time the
    same. A stretch that begins or ends inside of a block leaves that block out, unless the next stretch goes on where
    it ended.
    """

    __slots__ = ("_at", "_file_length", "_open", "hashes")

    def __init__(self, file_length: int | None = None, hashes: dict[int, int] | None = None) -> None:
        self.hashes: dict[int, int] = {} if hashes is None else hashes
        self._file_length = file_length
        self._at = 0
        self._open: xxhash.xxh3_64 | None = xxhash.xxh3_64()

    def update(self, buffer: Buffer, byte: int | None = None) -> None:
        """Take the file's next bytes, or those that begin at `byte`."""
        if byte is not None and byte != self._at:
            self._at = byte
            self._open = xxhash.xxh3_64() if byte % BLOCK_BYTES == 0 else None
        start, length = 0, buffer.nbytes
        while start < length:
            into = self._at % BLOCK_BYTES
            if not into and length - start >= BLOCK_BYTES:
                start += self._take_blocks(buffer[start:])
            else:
                start += self._take_part(buffer[start : start + BLOCK_BYTES - into])
        if self._at == self._file_length:
            self.finish()

    def finish(self) -> None:
        """Close the last block, which may be a short one: the file ends here."""
        if self._at % BLOCK_BYTES and self._open is not None:
            self._note(self._at // BLOCK_BYTES, self._open.intdigest())
            self._open = None

    def _take_blocks(self, buffer: Buffer) -> int:
        """Hash the whole blocks that a buffer begins with, and return how many bytes these are."""
        size = buffer.nbytes // BLOCK_BYTES * BLOCK_BYTES
        for start in range(0, size, BLOCK_BYTES):
            self._note((self._at + start) // BLOCK_BYTES, block_hash(buffer[start : start + BLOCK_BYTES]))
        self._at += size
        self._open = xxhash.xxh3_64()
        return size

    def _take_part(self, part: Buffer) -> int:
        """Add a part of one block to it."""
        number = self._at // BLOCK_BYTES
        self._at += part.nbytes
        if self._open is not None:
            self._open.update(part)
        if self._at % BLOCK_BYTES == 0:
            if self._open is not None:
                self._note(number, self._open.intdigest())
            self._open = xxhash.xxh3_64()
        return part.nbytes

    def _note(self, number: int, found: int) -> None:
        if self.hashes.setdefault(number, found) != found:
            self.hashes[number] = -1


def hash_column(hasher: BlockHasher) -> Hashes:
    """Return a finished file's block hashes, uint64 (blocks,)."""
    return np.array([hasher.hashes[number] for number in sorted(hasher.hashes)], dtype=np.uint64)
