"""Block hashes: XXH3-64 over blocks of 256 KiB that tile a file from its first byte to its last."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...core import limits
from ...core.geometry import Column
from ._storage import Buffer

BLOCK_BYTES = 256 * 1024

Hashes = NDArray[np.uint64]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


def digest(data: bytes | Buffer | Iterable[bytes | Buffer]) -> str:
    """Return the XXH3-64 hash of bytes as 16 hexadecimal digits.

    Args:
        data: Bytes, or buffers that are hashed as one string. An iterator may reuse a buffer's memory for the next one.

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
    """Return the number of blocks in a file of `length` bytes.

    Examples:
        >>> block_count(0), block_count(1), block_count(BLOCK_BYTES + 1)
        (0, 1, 2)
    """
    return -(-length // BLOCK_BYTES)


def touched_units(begin: Column, end: Column, length: int, unit: int) -> Flags:
    """Return a flag for each unit of a file: whether any span has a byte in it.

    Args:
        begin: First byte of each span, int64 (spans,).
        end: One past the last byte of each span, int64 (spans,).
        length: Length of the file, in bytes.
        unit: Size of a unit, in bytes; units tile the file.

    Returns:
        Flags, bool (units,).

    Examples:
        >>> touched_units(np.array([5, 9]), np.array([15, 9]), length=32, unit=10)
        array([ True,  True, False, False])
    """
    # A plan can have a million spans, so there is no loop: +1 where a span begins, -1 after its end, summed up.
    rows = begin < end
    flags = np.zeros(-(-length // unit), dtype=np.bool_)
    if rows.any():
        first, stop = begin[rows] // unit, -(-end[rows] // unit)
        # Only the units from the first to the last are counted: a file of many GB has far more than one read touches.
        low, high = int(first.min()), int(stop.max())
        starts, stops = (np.bincount(edges - low, minlength=high - low + 1) for edges in (first, stop))
        flags[low:high] = (starts - stops).cumsum()[:-1] > 0
    return flags


def missing(begin: Column, end: Column, length: int) -> Column:
    """Return the number of uncovered bytes in each block of a file; a byte is covered if it lies in a span.

    Args:
        begin: First byte of each span, ascending, int64 (spans,); spans may overlap.
        end: One past the last byte of each span, int64 (spans,).
        length: Length of the file, in bytes.

    Returns:
        Numbers of missing bytes, int64 (blocks,).

    Examples:
        >>> missing(np.array([10, 15]), np.array([20, 30]), length=BLOCK_BYTES + 5).tolist()
        [262124, 5]
    """
    edges = np.minimum(np.arange(block_count(length) + 1) * BLOCK_BYTES, length)
    counts: Column = np.diff(edges) - np.diff(covered_bytes(begin, end, edges))
    return counts


def covered_bytes(begin: Column, end: Column, edges: Column) -> Column:
    """Return the number of covered bytes before each given offset of a file.

    A byte is covered if it lies in at least one of the spans.

    Args:
        begin: First byte of each span, ascending, int64 (spans,); spans may overlap.
        end: One past the last byte of each span, int64 (spans,).
        edges: Offsets in the file, such as the boundaries of blocks, int64 (edges,).

    Returns:
        Number of covered bytes between the beginning of the file and each offset, int64 (edges,).

    Examples:
        >>> covered_bytes(np.array([10, 15]), np.array([20, 30]), np.array([10, 16, 99])).tolist()
        [0, 6, 20]
    """
    reach = np.maximum.accumulate(end)
    # Each span loses the bytes that earlier spans cover; then no two overlap, and their lengths can be summed.
    begin = np.maximum(begin, np.concatenate((begin[:1], reach[:-1])))
    end = np.maximum(begin, end)
    sums = np.concatenate(([0], np.cumsum(end - begin)))
    starts, stops = (np.searchsorted(column, edges, side="left") for column in (begin, reach))
    # Before an edge lie all spans that end before it, and the beginning of the span that reaches across it.
    return np.asarray(sums[stops] + np.where(starts > stops, edges - np.append(begin, 0)[stops], 0))


# The blocks that a read checks.

Verify = Literal["whole", "all"] | None
"""The blocks that a read checks. "whole": blocks that are read nearly whole, and all touched blocks of small files;
"all": all touched blocks; None: no block."""

# If only blocks that are read whole were checked, files smaller than a block would never be: a flipped bit in one was
# loaded silently, and so were two files of equal length that had been swapped. In large files the first block, which
# begins with a header that no load reads, and the ends of tensors would be skipped. Checking these few costs little.
_SMALL_FILE_BYTES = 4 * 1024 * 1024
NEARLY_WHOLE_BYTES = 64 * 1024
"""A block is read whole if at most this many of its bytes aren't wanted."""


def run_blocks(begin: int, end: int, length: int, verify: Verify) -> range:
    """Return the blocks that are checked if a load reads a single contiguous run of a file with block hashes.

    This is a shortcut for load plans of one run; `requests_of` determines the same blocks, for all plans.

    Args:
        begin: First byte of the run.
        end: One past the last byte of the run.
        length: Length of the file, in bytes.
        verify: Choice of the blocks to check: "whole", "all" or None, as `Verify` explains.

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
        # Only the first and the last block can be incomplete.
        first += first < stop and lacks(first) > NEARLY_WHOLE_BYTES
        stop -= first < stop and lacks(stop - 1) > NEARLY_WHOLE_BYTES
    return range(first, stop)


def block_spans(blocks: Flags, length: int) -> tuple[Column, Column]:
    """Return the byte ranges of consecutive flagged blocks: first byte, and one past the last, int64 (ranges,) each."""
    edges = np.diff(np.concatenate(([False], blocks, [False])).astype(np.int8))
    begin, end = (np.flatnonzero(edges == sign) * BLOCK_BYTES for sign in (1, -1))
    return begin, np.minimum(end, length)


def checks_all(length: int, verify: Verify) -> bool:
    """Return whether a load checks every block that it touches in a file, not only blocks that it reads nearly whole.

    Args:
        length: Length of the file, in bytes. In a small file, every touched block is checked.
        verify: Choice of the blocks to check: "whole" or "all", as `Verify` explains.
    """
    return verify == "all" or length <= _SMALL_FILE_BYTES


class BlockHasher:
    """Incremental hasher of a file's blocks; `update` takes the bytes while they are read or written.

    The bytes come in the file's order, or as byte ranges at any offsets. `hashes` maps the number of each block that
    was seen whole to its hash. A block that a range covers only in part has no hash, unless the next range continues
    there. A block that was seen twice with different bytes gets the hash -1, which no block has.
    """

    __slots__ = ("_at", "_file_length", "_open", "hashes")

    def __init__(self, file_length: int | None = None, hashes: dict[int, int] | None = None) -> None:
        self.hashes: dict[int, int] = {} if hashes is None else hashes
        self._file_length = file_length
        self._at = 0
        self._open: xxhash.xxh3_64 | None = xxhash.xxh3_64()

    def update(self, buffer: Buffer, byte: int | None = None) -> None:
        """Hash a buffer: the file's next bytes, or its bytes at the offset `byte`."""
        if byte is not None and byte != self._at:
            self._at = byte
            self._open = xxhash.xxh3_64() if byte % BLOCK_BYTES == 0 else None
        start, length = 0, buffer.nbytes
        while start < length:
            into = self._at % BLOCK_BYTES
            # Whole blocks take one call each: a streaming hash object costs two more, and copies into its own buffer.
            if not into and length - start >= BLOCK_BYTES:
                start += self._take_blocks(buffer[start:])
            else:
                start += self._take_part(buffer[start : start + BLOCK_BYTES - into])
        if self._at == self._file_length:
            self.finish()

    def finish(self) -> None:
        """Complete the hash of the file's last block, which may be shorter than the others."""
        if self._at % BLOCK_BYTES and self._open is not None:
            self._note(self._at // BLOCK_BYTES, self._open.intdigest())
            self._open = None

    def _take_blocks(self, buffer: Buffer) -> int:
        """Hash the whole blocks at the beginning of a buffer, and return their length in bytes."""
        size = buffer.nbytes // BLOCK_BYTES * BLOCK_BYTES
        for start in range(0, size, BLOCK_BYTES):
            self._note((self._at + start) // BLOCK_BYTES, xxhash.xxh3_64_intdigest(buffer[start : start + BLOCK_BYTES]))
        self._at += size
        self._open = xxhash.xxh3_64()
        return size

    def _take_part(self, part: Buffer) -> int:
        """Add a part of one block to that block's incomplete hash, and return the part's length in bytes."""
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
        # If a disk returns other bytes on a second read, either read may have filled a tensor: the check must fail.
        if self.hashes.setdefault(number, value) != value:
            self.hashes[number] = -1


def hash_column(hasher: BlockHasher) -> Hashes:
    """Return the block hashes of a finished file, uint64 (blocks,)."""
    return np.array([hasher.hashes[number] for number in sorted(hasher.hashes)], dtype=np.uint64)


# Hashing a file's bytes while they are written.


def hashed(buffers: Iterable[Buffer], hasher: BlockHasher) -> Generator[Buffer, None, None]:
    """Yield a file's bytes unchanged, and hash each part right before it is yielded.

    Large buffers are split at multiples of a MiB of the file, since the system caches a file in larger pages if it is
    written in aligned pieces.
    """
    # Hashing right before the write brings the part into the processor's cache, where the write finds it: hashes then
    # cost a save no time. A second thread that hashes beside the write would read all memory again.
    for part in in_parts(buffers):
        hasher.update(part)
        yield part
    hasher.finish()


def in_parts(buffers: Iterable[Buffer], at: int = 0) -> Generator[Buffer, None, None]:
    """Yield a file's buffers, cut at file offsets that are multiples of 1 MiB; the first buffer begins at offset `at`.

    Examples:
        >>> [part.nbytes for part in in_parts([memoryview(bytes(10)), memoryview(bytes(1024 * 1024))])]
        [10, 1048566, 10]
    """
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            part = buffer[start : start + limits.STEP_BYTES - at % limits.STEP_BYTES]
            yield part
            start += part.nbytes
            at += part.nbytes


def block_hashes(buffers: Iterable[Buffer]) -> Hashes:
    """Return the hashes of all blocks of a file whose content is the buffers, in order.

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
    """Yield buffers unchanged, and call `progress` with the length of each after it is written.

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
    """Yield (offset, bytes) parts of a file unchanged, and call `progress` after each MiB and at the end."""
    # Parts aren't reported one by one: a column shard has one for every row.
    nbytes = 0
    for byte, buffer in parts:
        yield byte, buffer
        nbytes += buffer.nbytes
        if nbytes >= _REPORTED_BYTES:
            progress(nbytes)
            nbytes = 0
    if nbytes:
        progress(nbytes)
