"""Stored files and their checksums: block hashes, or CRC32s of byte ranges; and the report of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from ...core.codec import crc32, crc32_thread_bytes
from ...core.deferred import notebook_html
from ...core.geometry import Column, rows_of
from ...core.plans import Runs, Strided
from ...errors import CorruptCheckpoint, error_text, plural, shorten, size_text
from ._blocks import (
    BLOCK_BYTES,
    NEARLY_WHOLE_BYTES,
    BlockHasher,
    Hashes,
    covered_bytes,
    hash_column,
    hashed,
    in_parts,
    reported,
)
from ._storage import Buffer, SizedBuffers, Storage
from ._threads import Task

Rows = TypeVar("Rows", Runs, Strided)


@dataclass(frozen=True, slots=True, eq=False)
class StoredFile:
    """A file of a checkpoint, as the index describes it.

    Attributes:
        name: Name in the checkpoint's storage.
        length: Length in bytes.
        hashes: Hashes of the file's blocks, uint64 (blocks,); None if the format has none.
        ranges: Byte ranges with CRC32s, for formats that have these instead of block hashes. No run or strided piece
            of a load may cross the boundary of a range.
    """

    name: str
    length: int
    hashes: Hashes | None = None
    ranges: ByteRanges | None = None


def _ignore(_: int) -> None:
    pass


def write_hashed(
    storage: Storage,
    name: str,
    buffers: Iterable[Buffer],
    *,
    length: int | None = None,
    durable: bool,
    checksums: bool = True,
    progress: Callable[[int], None] = _ignore,
) -> StoredFile:
    """Write a file, hash its blocks on the way, and return its description.

    Args:
        storage: Folder of the checkpoint.
        name: Name of the file.
        buffers: Bytes of the file, in order.
        length: Total number of bytes, if known, so that storages can reserve space.
        durable: Whether to return only after the file is on the medium.
        checksums: Whether to hash the blocks.
        progress: Function that is called with the number of bytes written since its last call.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> write_hashed(MemoryStorage(), "a", [memoryview(b"abc")], durable=False).hashes.size
        1
    """
    hasher = BlockHasher() if checksums else None
    with closing(in_parts(buffers) if hasher is None else hashed(buffers, hasher)) as stream:
        content = reported(stream, progress)
        written = storage.write(name, content if length is None else SizedBuffers(length, content), durable=durable)
    return StoredFile(name, written, None if hasher is None else hash_column(hasher))


@dataclass(frozen=True, slots=True, repr=False)
class ReadReport:
    """Report of a load on one rank.

    Attributes:
        bytes_read: Bytes of tensors and objects that were read.
        blocks_checked: Number of blocks or byte ranges whose checksum was compared.
        blocks_unchecked: Number of blocks that were read only in part, were excluded from checks, or have no hash.
        files: Number of files opened.
        left_out: Paths of stored plain values that aren't in the result. Either the value is in a list, tuple or
            instance of a class that can't be rebuilt, since the target omits shards in it; or the common state is a
            union of the ranks' states, and no rank's target has the value's key. For a load of all tensors without a
            target: names of the tensors that can't be read.
        unfilled: Paths of plain tensors of the target that aren't in the result, since nothing is stored for them.
        uncompared: Keys of optimizer states whose master weights weren't compared with the model's weights, because of
            ``verify=None``.
        bytes_sent: Bytes sent to other ranks that wanted them.
        bytes_received: Bytes received from other ranks.
        exchange: Reason why ranks did or didn't read for each other, if ``exchange="auto"`` decided it.
        kept: Paths of the target's own values in the result, kept where a list, tuple or class needs a value and none
            is stored.
    """

    bytes_read: int = 0
    blocks_checked: int = 0
    blocks_unchecked: int = 0
    files: int = 0
    left_out: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange: str = ""
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a summary of a few lines: bytes read, blocks checked, values not loaded.

        Examples:
            >>> print(ReadReport(1536, 4, 1, 2, left_out=("['step']",)))
            1.5 kB read from 2 files; 4 blocks checked, 1 unchecked
            1 left out: ['step']
        """
        blocks = f"{plural(self.blocks_checked, 'block')} checked, {self.blocks_unchecked} unchecked"
        lines = [f"{size_text(self.bytes_read)} read from {plural(self.files, 'file')}; {blocks}"]
        if self.bytes_sent or self.bytes_received:
            lines.append(f"{size_text(self.bytes_sent)} sent to other ranks, {size_text(self.bytes_received)} received")
        lines += [self.exchange] if self.exchange else []
        for label, names in self._names():
            if names:
                lines.append(f"{len(names)} {label}: {', '.join(shorten(names, shown=3))}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        more = "".join(f", {len(names)} {what}" for what, names in self._names() if names)
        return f"ReadReport({size_text(self.bytes_read)} read from {plural(self.files, 'file')}{more})"

    def _names(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        names = ("left out", self.left_out), ("unfilled", self.unfilled), ("uncompared", self.uncompared)
        return *names, ("kept as the target has them", self.kept)

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __add__(self, other: ReadReport) -> ReadReport:
        return ReadReport(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


# Byte ranges to check.


def ranges_to_check(ranges: ByteRanges, runs: Runs, *, everything: bool) -> list[int]:
    """Return the indices of the byte ranges whose CRC32 is checked when a file's runs are read.

    These are the ranges no longer than a block and those that are read nearly whole; with `everything`, all of them. A
    range without a CRC32 is never checked.
    """
    enough = ranges.end - ranges.begin <= BLOCK_BYTES
    if runs.byte.size:
        enough = enough | (bytes_outside(ranges, runs.byte, runs.byte + runs.length) <= NEARLY_WHOLE_BYTES)
    numbers: list[int] = np.flatnonzero((ranges.crc32 != 0) & (everything | enough)).tolist()
    return numbers


# Errors.


def wrong_length(file: StoredFile, length: int, path: str) -> CorruptCheckpoint:
    """Return the error for a file whose length differs from the index."""
    return CorruptCheckpoint(
        error_text(
            f"load: {path!r} has the wrong length",
            found=f"{length} bytes",
            expected=f"{file.length} bytes",
            fix="The file was cut or replaced after it was saved; load another checkpoint.",
        )
    )


def damage_error(path: str, what: str, spans: Iterable[str]) -> CorruptCheckpoint:
    """Return the error for a file whose content differs from the saved one.

    Args:
        path: Path or URL of the file.
        what: Description of the damage.
        spans: Texts about the damaged byte ranges, such as "bytes 0 to 262144".
    """
    fix = "The medium or a later program damaged it; load another checkpoint."
    return CorruptCheckpoint(error_text(f"load: {path!r} is damaged: {what}", offenders=spans, fix=fix))


# Rows of one file.


def in_file_order(pieces: Strided) -> Strided:
    """Return strided pieces, sorted by file."""
    return rows_of(pieces, np.argsort(pieces.file, kind="stable")) if pieces.file.size > 1 else pieces


def of_file(rows: Rows, number: int) -> Rows:
    """Return the runs, or strided pieces, of a single file.

    Args:
        rows: Columns of runs or strided pieces, sorted by file.
        number: Number of the file.
    """
    return rows_of(rows, slice(*np.searchsorted(rows.file, [number, number + 1]).tolist()))


_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Byte ranges of a file, ascending, with their CRC32s.

    Attributes:
        begin: First byte of each range, int64 (ranges,).
        end: One past the last byte of each range, int64 (ranges,).
        crc32: CRC32 of each range, 0 if the format recorded none, int64 (ranges,).
    """

    begin: Column
    end: Column
    crc32: Column


class RangeHasher:
    """Computes the CRC32s of parts of byte ranges while they are read.

    `hashes` maps the first byte of each part to (one past its last byte, its CRC32).
    """

    __slots__ = ("_at", "_begin", "_crc32", "_first", "hashes")

    def __init__(self, ranges: ByteRanges) -> None:
        self.hashes: dict[int, tuple[int, int]] = {}
        self._begin = frozenset(ranges.begin.tolist())
        self._first = self._at = -1
        self._crc32 = 0

    def update(self, buffer: Buffer, byte: int) -> None:
        """Hash bytes at the offset `byte` of the file; they must lie within one range."""
        if byte != self._at or byte in self._begin:
            self._first, self._crc32 = byte, 0
        self._at = byte + buffer.nbytes
        self._crc32 = crc32(buffer, self._crc32)
        # Bytes that several targets read come more than once; the longest part is kept.
        if self._at > self.hashes.get(self._first, (0, 0))[0]:
            self.hashes[self._first] = (self._at, self._crc32)


def range_crc32(hashes: dict[int, tuple[int, int]], begin: int, end: int) -> int | None:
    """Return the CRC32 of a byte range, computed from its parts' CRC32s, or None if the parts don't tile it.

    Args:
        hashes: Mapping from the first byte of a part to (one past its last byte, its CRC32).
        begin: First byte of the range.
        end: One past the last byte of the range.

    Examples:
        >>> parts = {8: (12, crc32(b"some")), 12: (14, crc32(b"th"))}
        >>> range_crc32(parts, 8, 14) == crc32(b"someth"), range_crc32(parts, 8, 15)
        (True, None)
    """
    # CRC32s of adjacent parts can be combined, so threads that read parts of one range needn't read them twice.
    checksum, at = 0, begin
    while at < end:
        until, part = hashes.get(at, (0, 0))
        if not at < until <= end:
            return None
        checksum = joined_crc32(checksum, part, until - at) if at > begin else part
        at = until
    return checksum


def crc32_behind(buffer: Buffer, before: int) -> Callable[[], int]:
    """Extend a CRC32 by a buffer, in another thread if it is large; return a function that returns the result.

    Args:
        buffer: Bytes to add, which must not change until the returned function has been called.
        before: CRC32 of the bytes before them; 0 if there are none.

    Examples:
        >>> hex(crc32_behind(memoryview(b"123456789"), 0)())
        '0xcbf43926'
    """
    compute = partial(crc32, buffer, before)
    return partial(int, compute()) if buffer.nbytes < crc32_thread_bytes() else Task(compute).result


def joined_crc32(left: int, right: int, length: int) -> int:
    """Return the CRC32 of two concatenated byte strings, from the CRC32 of each.

    Args:
        left: CRC32 of the first string.
        right: CRC32 of the second string.
        length: Length of the second string, in bytes.

    Examples:
        >>> joined_crc32(crc32(b"check"), crc32(b"sum"), 3) == crc32(b"checksum")
        True

    References:
        zlib's crc32_combine: left * x**(8 * length) + right, as polynomials modulo the CRC's polynomial.
    """
    return _times(_shift(length), left) ^ right


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """Return x**(8 * length) modulo the CRC's polynomial; bits are reversed: the highest of 32 belongs to x**0."""
    # Square and multiply: the length can have 40 bits, and a step per byte would take longer than reading the bytes.
    power, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return power


def _times(left: int, right: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ _POLYNOMIAL if right & 1 else right >> 1
    return product


def bytes_outside(ranges: ByteRanges, begin: Column, end: Column) -> Column:
    """Return, for each byte range, the number of its bytes outside of all spans.

    Args:
        ranges: Byte ranges of a file.
        begin: First byte of each span, ascending, int64 (spans,); spans may overlap.
        end: One past the last byte of each span, int64 (spans,).

    Returns:
        Numbers of bytes, int64 (ranges,).

    Examples:
        >>> import numpy as np
        >>> ranges = ByteRanges(np.array([0, 20]), np.array([10, 30]), np.array([0, 0]))
        >>> bytes_outside(ranges, np.array([2, 4]), np.array([6, 25])).tolist()
        [2, 5]
    """
    inside = covered_bytes(begin, end, ranges.end) - covered_bytes(begin, end, ranges.begin)
    return ranges.end - ranges.begin - inside
