"""An object's bytes as a stream: parts of an upload, which share no memory with their source, and reads ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..errors import StorageError, error_text
from ._storage import Buffer

T = TypeVar("T")


def parts_of(buffers: Iterable[Buffer], size: int, lengths: list[int]) -> Iterator[bytearray]:
    """Yield the buffers' bytes in parts of one size, the last of which may be shorter; notes their lengths."""
    # Copied: the source may use its memory again as soon as it is asked for more, while a part is still on the way.
    part = bytearray()
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            step = buffer[at : at + size - len(part)]
            part += step
            at += step.nbytes
            if len(part) == size:
                lengths.append(size)
                yield part
                part = bytearray()
    if part:
        lengths.append(len(part))
        yield part


def noting(parts: Iterable[T], raised: list[BaseException]) -> Iterator[T]:
    """Yield the same, and note what the source raised."""
    try:
        yield from parts
    except BaseException as error:
        raised.append(error)
        raise


_AHEAD_BYTES = 8 * 1024 * 1024


class ObjectReader:
    """An open object; bytes that are read one after the other come in large requests."""

    def __init__(self, read: Callable[[int, int], tuple[Buffer, int]], where: str, length: int) -> None:
        self.length, self._read, self._where = length, read, where
        self._begin, self._ahead, self._next = 0, memoryview(b""), 0

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        data = self._bytes(byte, byte + sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]

    def mapped(self, begin: int = 0, end: int | None = None) -> Buffer:
        return memoryview(bytearray(self._bytes(begin, self.length if end is None else end)))

    def _bytes(self, begin: int, end: int) -> Buffer:
        at = begin - self._begin
        if not (at >= 0 and end <= self._begin + self._ahead.nbytes):
            # Only what goes on where the last read ended is likely to go on.
            ahead = min(self.length, begin + _AHEAD_BYTES) if begin and begin == self._next else end
            self._begin, self._ahead, at = begin, self._fetched(begin, max(end, ahead)), 0
        self._next = end
        return self._ahead[at : at + end - begin]

    def _fetched(self, begin: int, end: int) -> Buffer:
        data, length = self._read(begin, end)
        if data.nbytes != end - begin:
            what = f"{self._where!r} ends at byte {length}"
            raise StorageError(error_text(what, found=f"{data.nbytes} bytes", expected=f"bytes {begin} to {end}"))
        return data
