"""How the bytes of requests arrive: from open files, from a store where each takes long, or on devices, by the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ...core import limits
from ...core.codec import bit_view, byte_buffer, device_bits
from ...core.geometry import Column, row_major_strides, rows_of, volumes
from ...core.plans import Runs, Strided, grouped
from ...errors import StorageError, error_text
from ._blocks import Flags
from ._buffers import DeviceCopies, Pair, copies_of, host_memory
from ._capabilities import ReadRange, can
from ._checked import StoredFile, wrong_length
from ._requests import Cut, Request
from ._storage import Buffer, Reader, Storage, copy_bytes
from ._strided import piece_in, row_major_piece_in
from ._threads import usual_threads

T = TypeVar("T")


class RequestSource(Protocol):
    """What the bytes of a request are read from."""

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, one after the other, from consecutive bytes of the file."""

    def view(self, begin: int, end: int) -> Buffer:
        """Return bytes of the file, valid until more are asked for."""


Arrivals = Callable[[deque[Request]], Generator[tuple[Request, RequestSource], None, None]]


@dataclass(frozen=True, slots=True)
class RequestTransport:
    """How requests are read.

    Attributes:
        arrivals: takes requests off a list, until it is empty, and yields them with their sources.
        threads: how many call it.
        where: Function from a file's name to its name in error messages.
        tries: how often a block or byte range is read before it counts as damaged.
    """

    arrivals: Arrivals
    threads: int
    where: Callable[[str], str]
    tries: int = 1


def transport_of(storage: Storage, files: Mapping[int, StoredFile]) -> RequestTransport:
    """Return how requests for files, by their number, are read from a storage."""
    read_range = can(storage).read_range
    if read_range is None:
        # Few threads: copies out of the page cache are bound by memory, so that more would gain nothing.
        return RequestTransport(partial(_from_files, storage, files), usual_threads(), storage.where)
    # A store that answers at once keeps the cores busy with a few requests. More only take turns there, each with other
    # memory: on two cores, 32 in flight took 1.3 times as long as 4.
    answers_at_once = (can(storage).latency or 1.0) < _SHORT_LATENCY
    gate = _Gate(min(2 * usual_threads(), _IN_FLIGHT) if answers_at_once else _IN_FLIGHT)
    # Once more before it is called damage: what came over a network may differ from what the store holds.
    arrivals = partial(_from_store, storage, read_range, files, gate)
    return RequestTransport(arrivals, _IN_FLIGHT, storage.where, tries=2)


def from_memory(contents: Mapping[int, Buffer]) -> RequestTransport:
    """Return the transport of requests for files whose content is in memory, by their number."""

    def arrivals(waiting: deque[Request]) -> Generator[tuple[Request, RequestSource], None, None]:
        for request in _remaining(waiting):
            data = contents[request.file]
            if request.end > data.nbytes:
                what = f"load: the content of file {request.file} of the plan is too short"
                raise StorageError(error_text(what, found=f"{data.nbytes} bytes", expected=f"at least {request.end}"))
            yield request, _Answer(0, data)

    return RequestTransport(arrivals, usual_threads(), str)


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
) -> Generator[tuple[Request, RequestSource], None, None]:
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
"""Requests of a load at a time; those of a process have at most `limits.IN_FLIGHT_BYTES` together."""

_SHORT_LATENCY = 0.01  # seconds
_LONG_WAIT = 0.05  # seconds

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
) -> Generator[tuple[Request, RequestSource], None, None]:
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
        self._most, self._inside, self._last_end, self._condition = most, 0, monotonic(), threading.Condition()

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._condition:
            while self._inside >= self._most:
                if not self._condition.wait(_LONG_WAIT) and monotonic() - self._last_end >= _LONG_WAIT:
                    self._most, self._last_end = 2 * self._most, monotonic()
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside, self._last_end = self._inside - 1, monotonic()
                self._condition.notify()


class _Budget:
    """Bytes that may be in flight at a time, in all loads of a process."""

    def __init__(self, most: int) -> None:
        self._left, self._most, self._condition = most, most, threading.Condition()

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        nbytes = min(nbytes, self._most)
        with self._condition:
            self._condition.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        try:
            yield
        finally:
            with self._condition:
                self._left += nbytes
                self._condition.notify_all()


_on_the_way = _Budget(limits.IN_FLIGHT_BYTES)


_ALIGNMENT = 64  # bytes; what is copied is viewed as items of up to 8 bytes, which torch wants aligned


def cut_for_devices(cut: Cut) -> Cut:
    """Return how a plan is cut where it is staged: a part is a few requests, for as many threads."""
    return replace(cut, most_bytes=min(cut.most_bytes, limits.STAGED_BYTES // 4))


def read_to_devices(
    read: Callable[[Sequence[Request], Sequence[Buffer]], int],
    requests: Sequence[Request],
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
) -> int:
    """Carry out requests for memory some of which is on devices, and return how many bytes were read.

    At most two parts are in the host's memory: one being read, and one being copied. All copies are done at the end.

    Args:
        read: carries out requests, given each target's bytes in the host's memory.
        requests: what to read.
        views: for each target its bytes; of those on devices none.
        memories: the targets.
    """
    copies = {device: own for device in {each.device for each in memories} if (own := copies_of(device))}
    on_device = np.array([memory.device in copies for memory in memories], dtype=np.bool_)
    bits = [bit_view(memory) if memory.is_cpu else device_bits(memory) for memory in memories]
    host_memory = next(iter(copies.values())).host_memory
    in_flight: _Transfers = deque()
    bytes_read = 0
    try:
        for part in grouped(requests, _nbytes, limits.STAGED_BYTES):
            _wait(in_flight, most=1)
            staged_requests, size = list[StagedRequest](), 0
            for request in part:
                staged_requests.append(stage(request, on_device, size))
                size = staged_requests[-1].end
            memory = host_memory(size)
            bytes_read += read([each.request for each in staged_requests], [*views, byte_buffer(memory)])
            in_flight.append((memory, _start_copies(staged_requests, memory, bits, copies)))
    finally:
        # Also after an exception: a copy still in progress would read host memory that was freed and reused.
        _wait(in_flight, most=0)
    return bytes_read


def _nbytes(request: Request) -> int:
    return int(request.runs.length.sum() + _piece_bytes(request.pieces).sum())


def _piece_bytes(pieces: Strided) -> Column:
    nbytes: Column = volumes(pieces.shape) * pieces.item_size
    return nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StagedRequest:
    """A request that reads into staging memory what goes to devices.

    Attributes:
        request: with one target more, the staging memory.
        end: of what it takes there.
        runs: what is copied from there, with the final targets.
        run_byte: where each run lies in the staging memory, int64 (runs,).
        pieces: likewise pieces, which lie there as row-major boxes.
        piece_byte: where each piece lies in the staging memory, int64 (pieces,).
    """

    request: Request
    end: int
    runs: Runs
    run_byte: Column
    pieces: Strided
    piece_byte: Column


def stage(request: Request, on_device: Flags, begin: int) -> StagedRequest:
    """Return a request with staging memory in the place of devices.

    Args:
        request: with the final targets.
        on_device: which targets are on a device, bool (targets,).
        begin: first byte of the staging memory that is free.
    """
    runs, pieces, number = request.runs, request.pieces, on_device.size
    run, piece = on_device[runs.target] & (runs.target >= 0), on_device[pieces.target]
    sizes = np.concatenate((runs.length * run, _piece_bytes(pieces) * piece))
    ends = begin + np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
    run_byte, piece_byte = np.split(np.append(begin, ends[:-1])[: sizes.size], [run.size])
    read_runs = replace(
        runs, target=np.where(run, number, runs.target), target_byte=np.where(run, run_byte, runs.target_byte)
    )
    read_pieces = replace(
        pieces,
        target=np.where(piece, number, pieces.target),
        target_byte=np.where(piece, piece_byte, pieces.target_byte),
        target_stride=np.where(piece[:, None], row_major_strides(pieces.shape), pieces.target_stride),
    )
    return StagedRequest(
        replace(request, runs=read_runs, pieces=read_pieces),
        int(ends[-1]) if ends.size else begin,
        rows_of(runs, run),
        run_byte[run],
        rows_of(pieces, piece),
        piece_byte[piece],
    )


_Transfers = deque[tuple[torch.Tensor, list[tuple[DeviceCopies, Any]]]]
"""Copies in progress: their host memory, and what to wait for."""


def _wait(in_flight: _Transfers, *, most: int) -> None:
    while len(in_flight) > most:
        for copies, token in in_flight[0][1]:
            copies.wait(token)
        in_flight.popleft()


def _start_copies(
    requests: Sequence[StagedRequest],
    memory: torch.Tensor,
    memories: Sequence[torch.Tensor],
    copies: Mapping[torch.device, DeviceCopies],
) -> list[tuple[DeviceCopies, Any]]:
    """Start copying a part to its devices, with one call for each device."""
    pairs: dict[torch.device, list[Pair]] = {}
    for each in requests:
        for target, source in _pairs(each, memory, memories):
            pairs.setdefault(target.device, []).append((target, source))
    return [(copies[device], copies[device].start(own)) for device, own in pairs.items()]


def _pairs(request: StagedRequest, memory: torch.Tensor, memories: Sequence[torch.Tensor]) -> Iterator[Pair]:
    runs, pieces = request.runs, request.pieces
    columns = (runs.target, runs.target_byte, request.run_byte, runs.length)
    for target, to, at, size in zip(*(column.tolist() for column in columns), strict=True):
        yield memories[target][to : to + size], memory[at : at + size]
    for row, (target, at) in enumerate(zip(pieces.target.tolist(), request.piece_byte.tolist(), strict=True)):
        yield piece_in(memories[target], pieces, row), row_major_piece_in(memory[at:], pieces, row)
