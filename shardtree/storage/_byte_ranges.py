"""CRC32s of byte ranges of a file, checked while the file is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..codec import crc32
from ..geometry import Column
from ._blocks import covered
from ._storage import Buffer, Reader

_STEP_BYTES = 1024 * 1024
_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Byte ranges of a file, ascending, with their CRC32s.

    Attributes:
        begin: first byte of each, int64 (ranges,).
        end: one past its last byte, int64 (ranges,).
        crc32: of its bytes, 0 if the format recorded none, int64 (ranges,).
    """

    begin: Column
    end: Column
    crc32: Column


class RangeHasher:
    """Computes CRC32s of the bytes that are read, in parts each of which lies within one byte range.

    Each part is in `hashes`: its first byte → (one past its last byte, its CRC32).
    """

    __slots__ = ("_at", "_begin", "_crc32", "_first", "hashes")

    def __init__(self, ranges: ByteRanges) -> None:
        self.hashes: dict[int, tuple[int, int]] = {}
        self._begin = frozenset(ranges.begin.tolist())
        self._first = self._at = -1
        self._crc32 = 0

    def update(self, buffer: Buffer, byte: int) -> None:
        """Hash the file's bytes that begin at `byte`; they lie in one range."""
        if byte != self._at or byte in self._begin:
            self._first, self._crc32 = byte, 0
        self._at = byte + buffer.nbytes
        self._crc32 = crc32(buffer, self._crc32)
        # Where several targets read the same bytes these come more than once; the longest part is kept.
        if self._at > self.hashes.get(self._first, (0, 0))[0]:
            self.hashes[self._first] = (self._at, self._crc32)


def range_crc32(hashes: dict[int, tuple[int, int]], begin: int, end: int) -> int | None:
    """Return the CRC32 of a byte range from those of its parts, None if the parts don't tile it.

    Args:
        hashes: first byte of a part → (one past its last byte, its CRC32).
        begin: first byte of the range.
        end: one past its last byte.

    Examples:
        >>> parts = {8: (12, crc32(b"some")), 12: (14, crc32(b"th"))}
        >>> range_crc32(parts, 8, 14) == crc32(b"someth"), range_crc32(parts, 8, 15)
        (True, None)
    """
    # CRC32s of adjacent parts can be combined, so that threads that read parts of one range needn't read them twice.
    found, at = 0, begin
    while at < end:
        until, known = hashes.get(at, (0, 0))
        if not at < until <= end:
            return None
        found = joined_crc32(found, known, until - at) if at > begin else known
        at = until
    return found


def read_crc32(reader: Reader, begin: int, end: int) -> int:
    """Read a byte range of a file and return its CRC32."""
    scratch = memoryview(bytearray(min(_STEP_BYTES, end - begin)))
    found = 0
    for byte in range(begin, end, _STEP_BYTES):
        part = scratch[: min(_STEP_BYTES, end - byte)]
        reader.read_into(byte, [part])
        found = crc32(part, found)
    return found


def joined_crc32(left: int, right: int, length: int) -> int:
    """Return the CRC32 of two byte strings joined, from the CRC32 of each.

    Args:
        left: of the first.
        right: of the second.
        length: of the second, in bytes.

    Examples:
        >>> joined_crc32(crc32(b"check"), crc32(b"sum"), 3) == crc32(b"checksum")
        True

    References:
        zlib's crc32_combine: the left sum times x to the number of bits that follow it, modulo the polynomial.
    """
    return _times(_shift(length), left) ^ right


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """Return x to the power of 8 * `length`, modulo the polynomial; the highest bit is that of x^0."""
    # Square and multiply: the length can have 40 bits, and one step for each byte would take longer than reading it.
    power, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return power


def _times(left: int, right: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ _POLYNOMIAL if right & 1 else right >> 1
    return product


def unread(ranges: ByteRanges, begin: Column, end: Column) -> Column:
    """Return how many bytes of each byte range lie outside some spans.

    Args:
        ranges: of a file.
        begin: first byte of each span, int64 (spans,), ascending; spans may overlap.
        end: one past its last byte, int64 (spans,).

    Examples:
        >>> import numpy as np
        >>> ranges = ByteRanges(np.array([0, 20]), np.array([10, 30]), np.array([0, 0]))
        >>> unread(ranges, np.array([2, 4]), np.array([6, 25])).tolist()
        [2, 5]
    """
    found = covered(begin, end, ranges.end) - covered(begin, end, ranges.begin)
    return ranges.end - ranges.begin - found
