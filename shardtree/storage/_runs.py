"""Reads runs of a file straight into the targets' memory, in windows shared among a few threads, and hashes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from ..plans import Runs
from ._blocks import BLOCK_BYTES, BlockHasher, touched
from ._storage import Buffer, Reader, Storage
from ._threads import in_turn, run_workers, usual_threads

_STEP_BYTES = 4 * BLOCK_BYTES
"""What is hashed is read in steps of this size, each hashed at once, while it is in the processor's cache. Steps end
where blocks end."""

_WINDOW_BYTES = 16 * _STEP_BYTES

T = TypeVar("T")

Window = tuple[int, int, int, int]
"""Of the runs that touch it, the first row and one past the last; its first byte and one past its last."""


class Hasher(Protocol):
    """Hashes the bytes that one thread reads.

    Attributes:
        hashes: the hashes found, by a number that no other window uses.
    """

    hashes: dict[int, Any]

    def update(self, buffer: Buffer, byte: int) -> None:
        """Hash the file's bytes that begin at `byte`."""


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
    """Read a file's runs, and return how many bytes were read.

    Args:
        storage: where the file is.
        name: of the file.
        runs: all of that file, in file order.
        views: for each requested shard its bytes.
        hashes: filled with what the hashers found: the hash of each block that is read whole; None to hash nothing.
        length: of the file, in bytes.
        progress: called with the bytes read since the last call, never by two threads at once.
        hasher: returns a hasher for a file of that length.
    """
    # Few threads: copies out of the page cache are bound by memory, so that more would gain nothing.
    windows = deque(windows_of(runs, length))
    new_hasher = None if hashes is None else partial(hasher, length)
    work = partial(_drain, windows, storage, name, runs, views, hashes, new_hasher, in_turn(progress))
    threads = min(usual_threads(), len(windows))
    if threads < 2:
        return work() if windows else 0
    return sum(run_workers(work, threads, stop=windows.clear))


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
    """Take windows from the shared queue and read them, until none is left."""
    # Each thread opens the file itself: the protocol doesn't promise that threads may share a reader.
    total = 0
    with storage.open(name) as reader:
        for window in remaining_windows(windows):
            hasher = None if new_hasher is None else new_hasher()
            size = _read_window(reader, clipped(runs, window), views, hasher)
            if hashes is not None and hasher is not None:
                hashes.update(hasher.hashes)
            progress(size)
            total += size
    return total


def remaining_windows(windows: deque[T]) -> Iterator[T]:
    """Take from a queue that several threads share until it is empty."""
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
    # Runs overlap in the file where several targets read the same bytes, so their ends may not ascend.
    first = np.searchsorted(np.maximum.accumulate(end), begin, side="right")
    last = np.searchsorted(runs.byte, begin + size, side="left")
    return list(zip(first.tolist(), last.tolist(), begin.tolist(), (begin + size).tolist(), strict=True))


def _window_bytes(total: int) -> int:
    """Return the size of a window: smaller than usual if there is little to read, so that each thread gets a share."""
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
    """Yield (byte, buffers): byte ranges of a file that end at multiples of a size, and the buffers to fill."""
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
