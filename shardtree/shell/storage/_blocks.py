"""Block hashes: XXH3-64 over blocks of 256 KiB that tile a file from its first byte to its last."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...core.geometry import Column
from ._storage import Buffer

BLOCK_BYTES = 256 * 1024

Hashes = NDArray[np.uint64]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


def digest(data: bytes | Buffer | Iterable[bytes | Buffer]) -> str:
    """Return the XXH3-64 hash of bytes as 16 hexadecimal digits.

    Args:
        data: The bytes, or buffers that are hashed as if they were one; each is used before the next one is made.

    Examples:
        >>> digest(b"")
        '2d06800538d394c2'
        >>> digest([b"ab", b"c"]) == digest(b"abc")
        True
    """
    if isinstance(data, bytes | bytearray | memoryview):
        return xxhash.xxh3_64_hexdigest(data)
    hasher = xxhash.xxh3_64()
    for buffer in data:
        hasher.update(buffer)
    return hasher.hexdigest()


def block_count(length: int) -> int:
    """Return how many blocks tile a file of that length in bytes.

    Examples:
        >>> block_count(0), block_count(1), block_count(BLOCK_BYTES + 1)
        (0, 1, 2)
    """
    return -(-length // BLOCK_BYTES)


def touched_units(begin: Column, end: Column, length: int, unit: int) -> Flags:
    """Return which units of a file contain a byte of some spans.

    Args:
        begin: int64 (spans,).
        end: one past the last byte, int64 (spans,).
        length: of the file, in bytes.
        unit: in bytes; units tile the file.

    Returns:
        bool (units,).

    Examples:
        >>> touched_units(np.array([5, 9]), np.array([15, 9]), length=32, unit=10)
        array([ True,  True, False, False])
    """
    # Sums of +1 where a span begins and -1 after it ends: a plan can have a million spans, so no loop over them.
    rows = begin < end
    flags = np.zeros(-(-length // unit), dtype=np.bool_)
    if rows.any():
        first, stop = begin[rows] // unit, -(-end[rows] // unit)
        # Only from the first unit to the last: a file of many GB has a hundred times as many as one read of it.
        low, high = int(first.min()), int(stop.max())
        starts, stops = (np.bincount(edges - low, minlength=high - low + 1) for edges in (first, stop))
        flags[low:high] = (starts - stops).cumsum()[:-1] > 0
    return flags


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
    counts: Column = np.diff(edges) - np.diff(covered_bytes(begin, end, edges))
    return counts


def covered_bytes(begin: Column, end: Column, edges: Column) -> Column:
    """Return how many bytes before each of some places of a file lie in any of some spans.

    Args:
        begin: int64 (spans,), ascending; spans may overlap.
        end: one past the last byte, int64 (spans,).
        edges: the places, int64 (edges,).

    Examples:
        >>> covered_bytes(np.array([10, 15]), np.array([20, 30]), np.array([10, 16, 99])).tolist()
        [0, 6, 20]
    """
    reach = np.maximum.accumulate(end)
    # Cut from each span what earlier ones cover; after that none overlap, and their lengths can be summed.
    begin = np.maximum(begin, np.concatenate((begin[:1], reach[:-1])))
    end = np.maximum(begin, end)
    sums = np.concatenate(([0], np.cumsum(end - begin)))
    starts, stops = (np.searchsorted(column, edges, side="left") for column in (begin, reach))
    # Before an edge lie all spans that ended by then, and the beginning of the one that reaches across it.
    return np.asarray(sums[stops] + np.where(starts > stops, edges - np.append(begin, 0)[stops], 0))


# Which blocks a read checks.

Verify = Literal["whole", "all"] | None
"""Which blocks are checked: "whole": those that are read nearly whole, and in small files all that are touched; "all":
all that are touched; None: none."""

# Checking only the blocks that happen to be read whole would check nothing in a file that is smaller than a block: a
# flipped bit there was loaded in silence, and so were files of one length that had changed places. In large files it
# left out the first block, which begins with a header that no load reads, and the ends of tensors. These blocks are
# few.
_SMALL_FILE_BYTES = 4 * 1024 * 1024
NEARLY_WHOLE_BYTES = 64 * 1024
"""A block of which no more than this is missing is read whole."""


def run_blocks(begin: int, end: int, length: int, verify: Verify) -> range:
    """Return the blocks of a file with hashes that are to be checked where one run is read, as by `requests_of`.

    Args:
        begin: first byte of the run.
        end: one past its last byte.
        length: of the file, in bytes.
        verify: which blocks are checked.

    Examples:
        >>> run_blocks(100, 3 * BLOCK_BYTES - 100_000, 9 * 2**20, "whole"), run_blocks(100, 200, 9 * 2**20, "all")
        (range(0, 2), range(0, 1))
    """
    if verify is None:
        return range(0)
    first, stop = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)

    def lacks(block: int) -> int:
        low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, length)
        return max(begin - low, 0) + max(high - end, 0)

    if not checks_all(length, verify):
        # Only the first and the last one can lack anything.
        first += first < stop and lacks(first) > NEARLY_WHOLE_BYTES
        stop -= first < stop and lacks(stop - 1) > NEARLY_WHOLE_BYTES
    return range(first, stop)


def block_spans(blocks: Flags, length: int) -> tuple[Column, Column]:
    """Return begin and end of each run of flagged blocks of a file, int64 (runs,) each."""
    edges = np.diff(np.concatenate(([False], blocks, [False])).astype(np.int8))
    begin, end = (np.flatnonzero(edges == sign) * BLOCK_BYTES for sign in (1, -1))
    return begin, np.minimum(end, length)


def checks_all(length: int, verify: Verify) -> bool:
    """Return whether all blocks of a file of that length that are read from are checked."""
    return verify == "all" or length <= _SMALL_FILE_BYTES


class BlockHasher:
    """Hashes the blocks of a file, or of byte ranges of it, while its bytes are read or written.

    Blocks that were seen whole are in `hashes`, by number. A range that begins or ends inside a block leaves that
    block out, unless the next range continues where it ended. A block that was seen twice with different bytes has
    the hash -1, which equals none.
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
            # One call for each whole block: a streaming hash object costs two more, and copies into its own buffer.
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
            self._note((self._at + start) // BLOCK_BYTES, xxhash.xxh3_64_intdigest(buffer[start : start + BLOCK_BYTES]))
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

    def _note(self, number: int, value: int) -> None:
        # A disk that returns other bytes on a second read delivered some of them to a tensor: fail either way.
        if self.hashes.setdefault(number, value) != value:
            self.hashes[number] = -1


def hash_column(hasher: BlockHasher) -> Hashes:
    """Return a finished file's block hashes, uint64 (blocks,)."""
    return np.array([hasher.hashes[number] for number in sorted(hasher.hashes)], dtype=np.uint64)


# Hashing a file's bytes while they are written.

_PART_BYTES = 4 * BLOCK_BYTES


def hashed(buffers: Iterable[Buffer], hasher: BlockHasher) -> Generator[Buffer, None, None]:
    """Yield a file's bytes unchanged, hashing each part right before it is yielded.

    Large buffers come in parts that end at multiples of a MiB of the file: the system caches a file in larger pages
    when it is written in aligned pieces.
    """
    # Hashing right before the write brings the part into the processor's cache, where the write finds it: a save takes
    # no longer so than without hashes, and a second thread that hashes beside the write would read all memory again.
    for part in in_parts(buffers):
        hasher.update(part)
        yield part
    hasher.finish()


def in_parts(buffers: Iterable[Buffer], at: int = 0) -> Generator[Buffer, None, None]:
    """Yield buffers in parts that end at multiples of a MiB of their file; `at` is the byte at which they begin.

    Examples:
        >>> [part.nbytes for part in in_parts([memoryview(bytes(10)), memoryview(bytes(1024 * 1024))])]
        [10, 1048566, 10]
    """
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            part = buffer[start : start + _PART_BYTES - at % _PART_BYTES]
            yield part
            start += part.nbytes
            at += part.nbytes


def block_hashes(buffers: Iterable[Buffer]) -> Hashes:
    """Return the hashes of all blocks of a file, given as buffers in order.

    Examples:
        >>> block_hashes([memoryview(bytes(BLOCK_BYTES)), memoryview(b"end")]).size
        2
    """
    hasher = BlockHasher()
    for _ in hashed(buffers, hasher):
        pass
    return hash_column(hasher)


# Reporting a file's bytes while they are written.

_REPORTED_BYTES = 1024 * 1024


def reported(buffers: Iterable[Buffer], progress: Callable[[int], None]) -> Iterator[Buffer]:
    """Yield buffers unchanged, and call `progress` with the length of each once it is written.

    Examples:
        >>> sizes = []
        >>> _ = list(reported([memoryview(b"ab"), memoryview(b"c")], sizes.append))
        >>> sizes
        [2, 1]
    """
    for buffer in buffers:
        yield buffer
        progress(buffer.nbytes)


def reported_parts(
    parts: Iterable[tuple[int, Buffer]], progress: Callable[[int], None]
) -> Iterator[tuple[int, Buffer]]:
    """Yield parts of a file, each with its first byte, unchanged, and call `progress` once a MiB or all is written."""
    # Not a call for each part: a shard of columns has one for every row.
    nbytes = 0
    for byte, buffer in parts:
        yield byte, buffer
        nbytes += buffer.nbytes
        if nbytes >= _REPORTED_BYTES:
            progress(nbytes)
            nbytes = 0
    if nbytes:
        progress(nbytes)
