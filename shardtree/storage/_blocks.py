"""Block hashes: XXH3-64 over blocks of 256 KiB that tile a file from its first byte to its last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from ._storage import Buffer

BLOCK_BYTES = 256 * 1024

Hashes = NDArray[np.uint64]


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


class BlockHasher:
    """Hashes the blocks of a file, or of stretches of it, as its bytes go by.

    Blocks that were seen whole are in `hashes`, by number. A stretch that begins or ends inside of a block
    leaves that block out, unless the next stretch goes on where it ended.
    """

    __slots__ = ("_at", "_file_length", "_open", "hashes")

    def __init__(self, file_length: int | None = None) -> None:
        self.hashes: dict[int, int] = {}
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
            part = buffer[start : start + BLOCK_BYTES - into]
            self._take(part, whole=into == 0 and part.nbytes == BLOCK_BYTES)
            start += part.nbytes
        if self._at == self._file_length:
            self.finish()

    def finish(self) -> None:
        """Close the last block, which may be a short one: the file ends here."""
        if self._at % BLOCK_BYTES and self._open is not None:
            self.hashes[self._at // BLOCK_BYTES] = self._open.intdigest()
            self._open = None

    def _take(self, part: Buffer, *, whole: bool) -> None:
        number = self._at // BLOCK_BYTES
        self._at += part.nbytes
        ends = self._at % BLOCK_BYTES == 0
        if whole:
            self.hashes[number] = xxhash.xxh3_64_intdigest(part)
        elif self._open is not None:
            self._open.update(part)
            if ends:
                self.hashes[number] = self._open.intdigest()
        if ends:
            self._open = xxhash.xxh3_64()


def hashed(buffers: Iterable[Buffer], hasher: BlockHasher) -> Iterator[Buffer]:
    """Yield the buffers as they are, hashing each on its way while it is in the processor's cache.

    Large buffers come in parts, so that a part is hashed shortly before it is written.
    """
    for buffer in buffers:
        for start in range(0, buffer.nbytes, 4 * BLOCK_BYTES):
            part = buffer[start : start + 4 * BLOCK_BYTES]
            hasher.update(part)
            yield part
    hasher.finish()


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


def hash_column(hasher: BlockHasher) -> Hashes:
    """Return a finished file's block hashes, uint64 (blocks,)."""
    return np.array([hasher.hashes[number] for number in sorted(hasher.hashes)], dtype=np.uint64)
