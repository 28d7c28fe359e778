"""Reads runs straight into the targets' memory, window by window of a file, by a few threads, hashing what has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..plans import Runs
from ._blocks import BLOCK_BYTES, BlockHasher, touched
from ._storage import Buffer, Reader, Storage
from ._threads import in_company, in_turn, usual_threads

_STEP_BYTES = 4 * BLOCK_BYTES
"""What is hashed is read in such steps, each hashed right after it was read. No block lies in two of them."""

_WINDOW_BYTES = 16 * _STEP_BYTES

Window = tuple[int, int, int, int]
"""First row and one past the last one of the runs that touch it; its first byte and one past its last one."""


class Hasher(Protocol):
    """What the bytes of one thread go through.

    Attributes:
        hashes: what it has found, by a number that no other window's bytes have.
    """

    hashes: dict[int, Any]

    def update(self, buffer: Buffer, byte: int) -> None:
        """Take the file's bytes that begin at `byte`."""


def read_runs(
    storage: Storage,
    name: str,
    runs: Runs,
    views: Sequence[Buffer],
    *,
    hashes: dict[int, Any] | None,
    length: int,
    progress: Callable[[int], None],
    hasher: Callable[[int], Hasher] = BlockHasher,
) -> int:
    """Read a file's runs, and return how many bytes these were.

    As many threads read as torch has for its own work, up to a few: copying out of the page cache is bound by memory.

    Args:
        storage: where the file is.
        name: of the file.
        runs: all of that file, in its order.
        views: for each requested shard its bytes.
        hashes: gets what the hashers found: of blocks, the hash of each that is read whole; None to hash nothing.
        length: of the file, in bytes.
        progress: is told how many bytes were read since the last time, never by two threads at once.
        hasher: makes one for a file of that length.
    """
    windows = deque(windows_of(runs, length))
    new_hasher = None if hashes is None else partial(hasher, length)
    work = partial(_drain, windows, storage, name, runs, views, hashes, new_hasher, in_turn(progress))
    threads = min(usual_threads(), len(windows))
    if threads < 2:
        return work() if windows else 0
    return sum(in_company(work, threads, stop=windows.clear))


def _drain(
    windows: deque[Window],
    storage: Storage,
    name: str,
    runs: Runs,
    views: Sequence[Buffer],
    hashes: dict[int, Any] | None,
    new_hasher: Callable[[], Hasher] | None,
    progress: Callable[[int], None],
) -> int:
    """Read the windows that no other thread has taken, until none is left."""
    total = 0
    with storage.open(name) as reader:
        for window in _taken(windows):
            hasher = None if new_hasher is None else new_hasher()
            size = _read_window(reader, clipped(runs, window), views, hasher)
            if hashes is not None and hasher is not None:
                hashes.update(hasher.hashes)
            progress(size)
            total += size
    return total


def _taken(windows: deque[Window]) -> Iterator[Window]:
    while True:
        try:
            window = windows.popleft()
        except IndexError:
            return
        yield window


def windows_of(runs: Runs, length: int) -> list[Window]:
    """Return the windows that a file's runs touch."""
    end, size = runs.byte + runs.length, _window_bytes(int(runs.length.sum()))
    begin = np.flatnonzero(touched(runs.byte, end, length, size)) * size
    # Runs may overlap in the file, where several targets want the same bytes, so their ends needn't ascend.
    first = np.searchsorted(np.maximum.accumulate(end), begin, side="right")
    last = np.searchsorted(runs.byte, begin + size, side="left")
    return list(zip(first.tolist(), last.tolist(), begin.tolist(), (begin + size).tolist(), strict=True))


def _window_bytes(total: int) -> int:
    """Return how much a thread takes at a time: less than usual of what is little, so that each has its part."""
    share = -(-total // (usual_threads() * _STEP_BYTES)) * _STEP_BYTES
    return min(_WINDOW_BYTES, max(_WINDOW_BYTES // 4, share))


def clipped(runs: Runs, window: Window) -> Runs:
    first, last, low, high = window
    byte, length = runs.byte[first:last], runs.length[first:last]
    begin, end = np.maximum(byte, low), np.minimum(byte + length, high)
    rows = np.flatnonzero(begin < end)
    return Runs(
        file=runs.file[first:last][rows],
        byte=begin[rows],
        target=runs.target[first:last][rows],
        target_byte=(runs.target_byte[first:last] + begin - byte)[rows],
        length=(end - begin)[rows],
    )


def _read_window(reader: Reader, runs: Runs, views: Sequence[Buffer], hasher: Hasher | None) -> int:
    total = 0
    for byte, buffers in _steps(runs, views, _WINDOW_BYTES if hasher is None else _STEP_BYTES):
        reader.read_into(byte, buffers)
        for buffer in buffers:
            if hasher is not None:
                hasher.update(buffer, byte)
            byte += buffer.nbytes
            total += buffer.nbytes
    return total


def _steps(runs: Runs, views: Sequence[Buffer], size: int) -> Iterator[tuple[int, list[Buffer]]]:
    """Yield (byte, buffers): stretches of a file between multiples of a size, and what they fill."""
    begin, end, buffers = 0, 0, list[Buffer]()
    rows = zip(runs.byte.tolist(), runs.target.tolist(), runs.target_byte.tolist(), runs.length.tolist(), strict=True)
    for byte, target, at, length in rows:
        if byte != end:
            if buffers:
                yield begin, buffers
            begin, end, buffers = byte, byte, []
        view = views[target]
        while length:
            part = min(length, size - end % size)
            buffers.append(view[at : at + part])
            at, end, length = at + part, end + part, length - part
            if end % size == 0:
                yield begin, buffers
                begin, buffers = end, []
    if buffers:
        yield begin, buffers
