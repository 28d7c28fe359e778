"""The memory that snapshots lie in, kept between saves: to get new memory takes many times longer than to fill it.

What is lent out comes back when no tensor lies in it any more, so nothing can be overwritten that somebody still reads.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from weakref import finalize

import torch

from ...storage import empty_tensor

_UNIT = 2 * 1024 * 1024  # a huge page


class SnapshotMemory:
    """Blocks of host memory. They never take more than what was lent out at once, at the most, since `release`."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        # Filled by whichever thread drops the last tensor, in the midst of anything: it may not wait for a lock.
        self._back: deque[torch.Tensor] = deque()
        self._lent = 0
        self._most = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are lent out, and that wait for the next save."""
        with self._lock:
            self._take_back()
            return self._lent + sum(block.nbytes for block in self._idle)

    def lend(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return at least that many bytes of memory, uint8, with anything in them.

        Args:
            nbytes: how many.
            pinned: whether an accelerator shall copy to it without waiting.
        """
        with self._lock:
            self._take_back()
            block = self._fitting(nbytes, pinned)
            if block is None:
                block = self._new(-(-nbytes // _UNIT) * _UNIT, pinned)
            self._lent += block.nbytes
            self._most = max(self._most, self._lent)
        array = block.numpy()
        finalize(array, self._back.append, block).atexit = False
        return torch.from_numpy(array)

    def release(self) -> None:
        """Give back to the system what isn't lent out."""
        with self._lock:
            self._take_back()
            self._idle.clear()
            self._most = self._lent

    def _take_back(self) -> None:
        while self._back:
            block = self._back.popleft()
            self._lent -= block.nbytes
            self._idle.append(block)

    def _fitting(self, nbytes: int, pinned: bool) -> torch.Tensor | None:
        """Return the smallest idle block that is large enough, unless all of those are much too large."""
        fitting = [
            number
            for number, block in enumerate(self._idle)
            if nbytes <= block.nbytes <= 2 * nbytes + _UNIT and block.is_pinned() == pinned
        ]
        return self._idle.pop(min(fitting, key=lambda number: self._idle[number].nbytes)) if fitting else None

    def _new(self, nbytes: int, pinned: bool) -> torch.Tensor:
        most = max(self._most, self._lent + nbytes)
        while self._idle and self._lent + nbytes + sum(block.nbytes for block in self._idle) > most:
            del self._idle[0]
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return empty_tensor(nbytes, dtype=torch.uint8)


snapshot_memory = SnapshotMemory()
"""This process's."""
