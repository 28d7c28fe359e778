"""Readers of remote files that prefetch bytes, in few or concurrent requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import BoundedSemaphore

from ..errors import StorageError, error_text
from ..shell.storage import Buffer, Reader, Storage, can, in_threads


def opened(storage: Storage, name: str, length: int) -> AbstractContextManager[Reader]:
    """Open a file of known length; this saves the request for its length that `Storage.open` may need."""
    if (read_range := can(storage).read_range) is not None:
        return nullcontext(RequestReader(partial(read_range, name), storage.where(name), length))
    return storage.open(name)


_NEAR_BYTES = 16 * 1024
"""Spans with shorter gaps between them are fetched by one request."""

_AT_ONCE = 32
_requests = BoundedSemaphore(_AT_ONCE)
"""Limit on the concurrent requests with which a process fetches ahead, for all files together."""


def fetch_ahead(reader: Reader, spans: Iterable[tuple[int, int]]) -> None:
    """Fetch spans of an open file concurrently before they are read, if the reader is a `RequestReader`.

    Args:
        reader: Reader of the file. A `RequestReader` keeps the bytes until the next call.
        spans: (first byte, one past the last byte) of each span, all within the file.

    Raises:
        StorageError: The spans can't be read.
    """
    if isinstance(reader, RequestReader):
        reader.fetch(_merge_near(spans))


def _merge_near(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, with neighbours that are near each other merged.

    Examples:
        >>> _merge_near([(40_000, 40_001), (10, 20), (0, 5)])
        [(0, 20), (40000, 40001)]
    """
    runs: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if runs and begin <= runs[-1][1] + _NEAR_BYTES:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((begin, end))
    return runs


_AHEAD_BYTES = 8 * 1024 * 1024


class RequestReader:
    """A reader that sends a request for each read, except that sequential reads share large requests."""

    def __init__(self, read: Callable[[int, int], tuple[Buffer, int]], where: str, length: int) -> None:
        self.length, self._read, self._where = length, read, where
        self._begin, self._ahead, self._next = 0, memoryview(b""), 0
        self._begins: list[int] = []
        self._parts: list[Buffer] = []

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch ascending, disjoint spans concurrently; later reads within them make no request."""
        self._begins = [begin for begin, _ in spans]
        self._parts = in_threads(self._fetch_in_turn, spans, _AT_ONCE)

    def _fetch_in_turn(self, span: tuple[int, int]) -> Buffer:
        with _requests:
            return self._fetch_span(*span)

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        data = self._bytes(byte, byte + sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        return memoryview(bytearray(self._bytes(begin, self.length if end is None else end)))

    def _bytes(self, begin: int, end: int) -> Buffer:
        number = bisect_right(self._begins, begin) - 1
        if number >= 0 and end <= self._begins[number] + self._parts[number].nbytes:
            return self._parts[number][begin - self._begins[number] : end - self._begins[number]]
        at = begin - self._begin
        if not (at >= 0 and end <= self._begin + self._ahead.nbytes):
            # Only a read that continues the last one is likely to be followed by another.
            ahead = min(self.length, begin + _AHEAD_BYTES) if begin and begin == self._next else end
            self._begin, self._ahead, at = begin, self._fetch_span(begin, max(end, ahead)), 0
        self._next = end
        return self._ahead[at : at + end - begin]

    def _fetch_span(self, begin: int, end: int) -> Buffer:
        data, length = self._read(begin, end)
        if data.nbytes != end - begin:
            heading = f"cannot read bytes {begin} to {end}: {self._where!r} ends at byte {length}"
            raise StorageError(error_text(heading))
        return data
