"""Execution of requests for byte ranges: from open files, from slow stores, and to devices through the host."""

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
    """A reader of the byte range that a request asks for."""

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, in order, with the file's bytes from offset `byte` on."""

    def view(self, begin: int, end: int) -> Buffer:
        """Return a byte range of the file; the memory is valid until the next call."""


Arrivals = Callable[[deque[Request]], Generator[tuple[Request, RequestSource], None, None]]


@dataclass(frozen=True, slots=True)
class RequestTransport:
    """A way to read the byte ranges that requests ask for, such as from open files or from an object store.

    Attributes:
        arrivals: Function that takes requests off a shared queue until it is empty. It yields pairs: a request, and a
            `RequestSource`, which reads the request's bytes.
        threads: Number of threads that call `arrivals`.
        where: Function from a file's name to the path or URL that errors show.
        tries: Number of reads of a block or byte range before it counts as damaged.
    """

    arrivals: Arrivals
    threads: int
    where: Callable[[str], str]
    tries: int = 1


def transport_of(storage: Storage, files: Mapping[int, StoredFile]) -> RequestTransport:
    """Return the transport for requests to a storage; `files` maps the file numbers in requests to files."""
    read_range = can(storage).read_range
    if read_range is None:
        # Copies out of the page cache are bound by memory bandwidth, so more threads would gain nothing.
        return RequestTransport(partial(_from_files, storage, files), usual_threads(), storage.where)
    # A few requests to a fast store keep the cores busy. More of them take turns and use more memory: on two cores, 32
    # in flight took 1.4 times as long as 8. Fewer leave the cores idle: 4 took 1.1 times as long, and 1.4 times where
    # an answer takes 5 ms.
    answers_at_once = (can(storage).latency or 1.0) < _SHORT_LATENCY
    gate = _Gate(min(4 * usual_threads(), _IN_FLIGHT) if answers_at_once else _IN_FLIGHT)
    # A failed check is repeated once: bytes from a network may differ from those in the store.
    arrivals = partial(_from_store, storage, read_range, files, gate)
    return RequestTransport(arrivals, _IN_FLIGHT, storage.where, tries=2)


def from_memory(contents: Mapping[int, Buffer]) -> RequestTransport:
    """Return the transport for requests to files in memory; `contents` has the files' bytes, by number in requests."""

    def arrivals(waiting: deque[Request]) -> Generator[tuple[Request, RequestSource], None, None]:
        for request in _remaining(waiting):
            data = contents[request.file]
            if request.end > data.nbytes:
                what = f"load: the content of file {request.file} of the plan is too short"
                raise StorageError(error_text(what, found=f"{data.nbytes} bytes", expected=f"at least {request.end}"))
            yield request, _Answer(0, data)

    return RequestTransport(arrivals, usual_threads(), str)


def _remaining(waiting: deque[T]) -> Iterator[T]:
    """Yield items of a queue that several threads share, until it is empty."""
    while True:
        try:
            yield waiting.popleft()
        except IndexError:
            return


# Open files.


class _OpenFile:
    """A file that one thread has opened, with scratch memory for reads that don't go directly to a target."""

    __slots__ = ("_reader", "_room", "read_into")

    def __init__(self, reader: Reader) -> None:
        self._reader, self.read_into, self._room = reader, reader.read_into, memoryview(b"")

    def view(self, begin: int, end: int) -> Buffer:
        if self._room.nbytes < end - begin:
            # Reused memory: the first access to new memory would take longer than the read.
            self._room = byte_buffer(host_memory.lend(end - begin))
        data = self._room[: end - begin]
        self._reader.read_into(begin, [data])
        return data


def _from_files(
    storage: Storage, files: Mapping[int, StoredFile], waiting: deque[Request]
) -> Generator[tuple[Request, RequestSource], None, None]:
    # Each thread opens the file itself, since the protocol doesn't promise that threads may share a reader.
    for number, requests in groupby(_remaining(waiting), lambda request: request.file):
        with storage.open(files[number].name) as reader:
            if reader.length != files[number].length:
                raise wrong_length(files[number], reader.length, storage.where(files[number].name))
            source = _OpenFile(reader)
            for request in requests:
                yield request, source


# Stores.

_IN_FLIGHT = 32
"""Maximum number of a load's requests in flight; all loads of a process hold at most `limits.IN_FLIGHT_BYTES`."""

_SHORT_LATENCY = 0.01  # seconds
_LONG_WAIT = 0.05  # seconds

_LITTLE = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Answer:
    """Bytes of a file, held in memory, that answer a request.

    Attributes:
        begin: Offset of the bytes in the file.
        data: The bytes.
    """

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
    # There may be more threads than cores, since they wait for the network nearly all the time.
    for request in _remaining(waiting):
        file = files[request.file]
        with gate.passing(), _on_the_way.taking(request.end - request.begin):
            data, length = read_range(file.name, request.begin, request.end)
            if length != file.length:
                raise wrong_length(file, length, storage.where(file.name))
            yield request, _Answer(request.begin, data)


class _Gate:
    """A limit on a load's requests in flight, which adapts to slow links, since these need many.

    It is doubled whenever no request has ended for a while.
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
    """A limit on the bytes in flight, shared by all loads of a process."""

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


_ALIGNMENT = 64  # bytes; torch requires aligned views, of items of up to 8 bytes


def cut_for_devices(cut: Cut) -> Cut:
    """Return the rule `cut` with windows of at most a quarter of a block of staging memory.

    Requests are then small enough for several threads to fill a block together.
    """
    return replace(cut, most_bytes=min(cut.most_bytes, limits.STAGED_BYTES // 4))


def read_to_devices(
    read: Callable[[Sequence[Request], Sequence[Buffer]], int],
    requests: Sequence[Request],
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
) -> int:
    """Execute requests whose targets are partly on devices, and return the number of bytes read.

    The host's memory holds at most two blocks of staging memory: one that is filled by reads, and one that is copied
    to devices. All copies have ended when the call returns.

    Args:
        read: Function that executes requests, given a byte view of each target in the host's memory.
        requests: Requests to execute.
        views: A byte view of each target; empty for those on devices.
        memories: The targets.
    """
    copies = {device: calls for device in {memory.device for memory in memories} if (calls := copies_of(device))}
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
            bytes_read += read([staged.request for staged in staged_requests], [*views, byte_buffer(memory)])
            in_flight.append((memory, _start_copies(staged_requests, memory, bits, copies)))
    finally:
        # After an exception too: a copy still in flight would read host memory that was freed and reused.
        _wait(in_flight, most=0)
    return bytes_read


def _nbytes(request: Request) -> int:
    return int(request.runs.length.sum() + _piece_bytes(request.pieces).sum())


def _piece_bytes(pieces: Strided) -> Column:
    nbytes: Column = volumes(pieces.shape) * pieces.item_size
    return nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StagedRequest:
    """A request whose bytes for devices are read into staging memory first, and copied from there.

    Bytes belong to runs (contiguous ranges) or to pieces (boxes of elements), as in `Request`.

    Attributes:
        request: The request, with the staging memory as an additional target.
        end: End of the staging memory that the request uses, in bytes.
        runs: Runs to copy from the staging memory to devices, with the devices' memory as targets.
        run_byte: Offset of each run in the staging memory, int64 (runs,).
        pieces: Pieces to copy from the staging memory to devices. There, the elements of a piece are contiguous, in
            row-major order.
        piece_byte: Offset of each piece in the staging memory, int64 (pieces,).
    """

    request: Request
    end: int
    runs: Runs
    run_byte: Column
    pieces: Strided
    piece_byte: Column


def stage(request: Request, on_device: Flags, begin: int) -> StagedRequest:
    """Return a request that reads into staging memory instead of devices.

    Args:
        request: The request with its final targets.
        on_device: Flags of the targets that are on a device, bool (targets,).
        begin: First free byte of the staging memory.
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
"""Copies in flight: the host memory, and the tokens to wait for."""


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
    """Start the copies from staging memory to devices, and return (functions, token to wait for) for each device.

    Args:
        requests: Requests whose bytes are in the staging memory.
        memory: Staging memory.
        memories: Memory of each target.
        copies: Functions that copy, by device.
    """
    pairs: dict[torch.device, list[Pair]] = {}
    for request in requests:
        for target, source in _pairs(request, memory, memories):
            pairs.setdefault(target.device, []).append((target, source))
    return [(copies[device], copies[device].start(batch)) for device, batch in pairs.items()]


def _pairs(request: StagedRequest, memory: torch.Tensor, memories: Sequence[torch.Tensor]) -> Iterator[Pair]:
    runs, pieces = request.runs, request.pieces
    columns = (runs.target, runs.target_byte, request.run_byte, runs.length)
    for target, to, at, size in zip(*(column.tolist() for column in columns), strict=True):
        yield memories[target][to : to + size], memory[at : at + size]
    for row, (target, at) in enumerate(zip(pieces.target.tolist(), request.piece_byte.tolist(), strict=True)):
        yield piece_in(memories[target], pieces, row), row_major_piece_in(memory[at:], pieces, row)
