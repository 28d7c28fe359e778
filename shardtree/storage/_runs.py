"""Reads runs straight into the targets' memory, window by window of a file, by a few threads, hashing what has just come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import numpy as np
import torch

from ..geometry import Column
from ..plans import Runs
from ._blocks import BLOCK_BYTES, BlockHasher
from ._storage import Buffer, Reader, Storage

# Both multiples of BLOCK_BYTES, so that no block lies in two steps unless it is read in parts anyway.
_WINDOW_BYTES = 16 * 1024 * 1024
_STEP_BYTES = 4 * BLOCK_BYTES
_MOST_THREADS = 4

Hashed = dict[int, int]
"""Hashes of the blocks that were read whole, by number."""


def read_runs(
    storage: Storage,
    name: str,
    runs: Runs,
    views: Sequence[Buffer],
    *,
    length: int | None,
    progress: Callable[[int], None],
) -> tuple[int, Hashed]:
    """Read a file's runs, and return how many bytes these were and the hashes of whole blocks.

    As many threads read as torch uses for its own work, up to a few: more don't make copies out of the page cache
    faster.

    Args:
        storage: where the file is.
        name: of the file.
        runs: all in that file, in its order.
        views: for each requested shard its bytes.
        length: of the file, in bytes; None to hash nothing.
        progress: is told how many bytes were read since the last time, by one thread at a time.
    """
    windows = deque(_windows(runs))
    work = partial(_drain, windows, storage, name, runs, views, length, _one_at_a_time(progress))
    threads = min(torch.get_num_threads(), _MOST_THREADS, len(windows))
    if threads < 2:
        return work() if windows else (0, {})
    with ThreadPoolExecutor(threads) as pool:
        try:
            parts = [part.result() for part in [pool.submit(work) for _ in range(threads)]]
        finally:
            windows.clear()  # whoever fails or is interrupted stops the others
    return sum(total for total, _ in parts), {number: one for _, hashes in parts for number, one in hashes.items()}


def _drain(
    windows: deque[tuple[int, int, int]],
    storage: Storage,
    name: str,
    runs: Runs,
    views: Sequence[Buffer],
    length: int | None,
    progress: Callable[[int], None],
) -> tuple[int, Hashed]:
    """Read windows that no other thread has taken, until none is left."""
    total = 0
    hasher = None if length is None else BlockHasher(length)
    try:
        with storage.open(name) as reader:
            while windows:
                size = _read_window(reader, _clipped(runs, *windows.popleft()), views, hasher)
                progress(size)
                total += size
    except IndexError:
        if windows:
            raise
    except BaseException:
        windows.clear()
        raise
    return total, {} if hasher is None else hasher.hashes
