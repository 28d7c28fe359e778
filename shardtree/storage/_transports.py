"""How the bytes of requests arrive: from open files, or from a store where each request takes long.

A transport is called by each thread that reads. It takes requests off a list that the threads share, and yields each
with what its bytes are read from; they are used until the next one is asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Protocol, TypeVar

from ..codec import byte_buffer
from ._buffers import host_memory
from ._capabilities import ReadRange, can
from ._checked import StoredFile, wrong_length
from ._object_streams import copy_bytes
from ._requests import Request
from ._storage import Buffer, Reader, Storage
from ._threads import usual_threads

T = TypeVar("T")


class Source(Protocol):
    """What the bytes of a request are read from."""

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, one after the other, from consecutive bytes of the file."""

    def view(self, begin: int, end: int) -> Buffer:
        """Return bytes of the file, valid until more are asked for."""


Arrivals = Callable[[deque[Request]], Generator[tuple[Request, Source], None, None]]


@dataclass(frozen=True, slots=True)
class Transport:
    """How requests are read.

    Attributes:
        arrivals: takes requests off a list, until it is empty, and yields them with their sources.
        threads: how many call it.
        tries: how often a block or byte range is read before it counts as damaged.
    """

    arrivals: Arrivals
    threads: int
    tries: int = 1


def transport_of(storage: Storage, files: Mapping[int, StoredFile]) -> Transport:
    """Return how requests for files, by their number, are read from a storage."""
    read_range = can(storage).read_range
    if read_range is None:
        # Few threads: copies out of the page cache are bound by memory, so that more would gain nothing.
        return Transport(partial(_from_files, storage, files), usual_threads())
    # A store that answers at once keeps the cores busy with a few requests. More only take turns there, each with other
    # memory: on two cores, 32 in flight took 1.3 times as long as 4.
    answers_at_once = (can(storage).latency or 1.0) < _SHORT_LATENCY
    gate = _Gate(min(2 * usual_threads(), _IN_FLIGHT) if answers_at_once else _IN_FLIGHT)
    # Once more before it is called damage: what came over a network may differ from what the store holds.
    return Transport(partial(_from_store, storage, read_range, files, gate), _IN_FLIGHT, tries=2)


def _remaining(waiting: deque[T]) -> Iterator[T]:
    """Take from a list that several threads share until it is empty."""
    while True:
        try:
            yield waiting.popleft()
        except IndexError:
            return


# Open files


class _OpenFile:
    """A file that one thread has opened, and memory for what isn't read where it belongs."""

    __slots__ = ("_reader", "_room", "read_into")

    def __init__(self, reader: Reader) -> None:
        self._reader, self.read_into, self._room = reader, reader.read_into, memoryview(b"")

    def view(self, begin: int, end: int) -> Buffer:
        if self._room.nbytes < end - begin:
            # Memory that was used before: filling new memory takes longer than all else here.
            self._room = byte_buffer(host_memory.lend(end - begin))
        data = self._room[: end - begin]
        self._reader.read_into(begin, [data])
        return data


def _from_files(
    storage: Storage, files: Mapping[int, StoredFile], waiting: deque[Request]
) -> Generator[tuple[Request, Source], None, None]:
    # Each thread opens the file itself: the protocol doesn't promise that threads may share a reader.
    for number, requests in groupby(_remaining(waiting), lambda request: request.file):
        with storage.open(files[number].name) as reader:
            if reader.length != files[number].length:
                raise wrong_length(files[number], reader.length, storage.where(files[number].name))
            source = _OpenFile(reader)
            for request in requests:
                yield request, source


# A store

_IN_FLIGHT = 32
"""Requests of a load at a time; those of a process have at most `_MOST_BYTES` together."""

_SHORT_LATENCY = 0.01  # seconds
_LONG_WAIT = 0.05  # seconds

_MOST_BYTES = 256 * 1024 * 1024

_LITTLE = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Answer:
    """The bytes of a request, all in memory."""

    begin: int
    data: Buffer

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            part = self.view(byte, byte + buffer.nbytes)
            if buffer.nbytes < _LITTLE:
                buffer[:] = part
            else:
                copy_bytes(buffer, 0, part)
            byte += buffer.nbytes

    def view(self, begin: int, end: int) -> Buffer:
        return self.data[begin - self.begin : end - self.begin]


def _from_store(
    storage: Storage, read_range: ReadRange, files: Mapping[int, StoredFile], gate: _Gate, waiting: deque[Request]
) -> Generator[tuple[Request, Source], None, None]:
    # Threads rather than cores: they wait for the network nearly all the time.
    for request in _remaining(waiting):
        file = files[request.file]
        with gate.passing(), _on_the_way.taking(request.end - request.begin):
            data, length = read_range(file.name, request.begin, request.end)
            if length != file.length:
                raise wrong_length(file, length, storage.where(file.name))
            yield request, _Answer(request.begin, data)


class _Gate:
    """Lets so many requests of a load be in flight, and twice as many whenever none of them has ended for a while.

    Slow connections need many.
    """

    def __init__(self, most: int) -> None:
        self._most, self._inside, self._ended, self._changed = most, 0, monotonic(), threading.Condition()

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._changed:
            while self._inside >= self._most:
                if not self._changed.wait(_LONG_WAIT) and monotonic() - self._ended >= _LONG_WAIT:
                    self._most, self._ended = 2 * self._most, monotonic()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside, self._ended = self._inside - 1, monotonic()
                self._changed.notify()


class _Budget:
    """Bytes that may be in flight at a time, in all loads of a process."""

    def __init__(self, most: int) -> None:
        self._left, self._most, self._changed = most, most, threading.Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        nbytes = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._left += nbytes
                self._changed.notify_all()


_on_the_way = _Budget(_MOST_BYTES)
