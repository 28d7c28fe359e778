"""Host memory that is kept between saves and loads: for snapshots, and for what is staged to and from devices."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, NamedTuple
from weakref import finalize

import torch

# New memory. Most of its cost is the first access to each page, so large tensors get huge pages.

_LEAST_BYTES = 4 * 1024 * 1024


def empty_tensor(*shape: Any, **options: Any) -> torch.Tensor:
    """Return what ``torch.empty`` returns; large tensors in the CPU's memory get huge pages.

    Examples:
        >>> empty_tensor((2, 3), dtype=torch.bfloat16).shape
        torch.Size([2, 3])
    """
    tensor = torch.empty(*shape, **options)
    if tensor.is_cpu and tensor.nbytes >= _LEAST_BYTES:
        _prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _prefer_huge_pages(address: int, length: int) -> None:
    call = _madvise()
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if call is not None:
        # The result is ignored: a system that refuses only makes this slower.
        call(begin, address + length - begin, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[..., int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


# Memory that is kept. Getting new memory takes many times longer than filling it, and pinning it longer still. A lent
# block comes back when the last tensor in it is collected, so nothing is overwritten while somebody may read it.

_UNIT = 2 * 1024 * 1024  # a huge page


class _Block(NamedTuple):
    """Memory, what kind it is of, and the process that took it."""

    kind: str
    memory: torch.Tensor
    process: int


def pageable(nbytes: int) -> torch.Tensor:
    """Return new memory of the kind "cpu"."""
    return empty_tensor(nbytes, dtype=torch.uint8)


class HostMemory:
    """Blocks of host memory; all together never more than was lent out at one time since `release`.

    Examples:
        >>> memory = HostMemory()
        >>> lent = memory.lend(3 * 2**20)
        >>> lent.shape, memory.nbytes
        (torch.Size([3145728]), 4194304)
        >>> place = lent.data_ptr()
        >>> del lent
        >>> memory.lend(2**22).data_ptr() == place
        True
    """

    def __init__(self) -> None:
        self._idle: list[_Block] = []
        # Filled by a finalizer, which may interrupt any code of any thread, also one that holds the lock: a deque needs
        # none.
        self._back: deque[_Block] = deque()
        self._of_parent: list[_Block] = []
        self._lent = 0
        self._most = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are lent out or kept for the next time."""
        with self._lock:
            self._take_back()
            return self._lent + self._idle_bytes()

    def lend(self, nbytes: int, kind: str = "cpu", new: Callable[[int], torch.Tensor] = pageable) -> torch.Tensor:
        """Return that many bytes of memory, uint8, uninitialised.

        Args:
            nbytes: how many.
            kind: of memory: the type of the device that copies to it. A block is lent again for that kind alone.
            new: makes memory of that kind.
        """
        with self._lock:
            self._take_back()
            block = self._fitting(nbytes, kind)
            if block is None:
                block = _Block(kind, self._new(-(-nbytes // _UNIT) * _UNIT, new), os.getpid())
            self._lent += block.memory.nbytes
            self._most = max(self._most, self._lent)
        # Tensors made from an array keep the array alive, not the block: its finalizer knows when the last one is gone.
        array = block.memory.numpy()
        finalize(array, self._back.append, block).atexit = False
        return torch.from_numpy(array)[:nbytes]

    def release(self) -> None:
        """Give back to the system what isn't lent out."""
        with self._lock:
            self._take_back()
            self._idle.clear()
            self._most = self._lent

    def after_fork(self) -> None:
        """Begin anew in a forked process, where memory pinned before belongs to a device that is out of reach."""
        self._lock = Lock()  # another thread of the parent may have held it
        self._take_back()
        self._set_aside(self._idle)
        self._idle = [block for block in self._idle if block.kind == "cpu"]

    def _take_back(self) -> None:
        while self._back:
            block = self._back.popleft()
            self._lent -= block.memory.nbytes
            if block.process == os.getpid() or block.kind == "cpu":
                self._idle.append(block)
            else:
                self._set_aside([block])

    def _set_aside(self, blocks: list[_Block]) -> None:
        # Not dropped: freeing pinned memory calls the device's driver, which a forked process mustn't.
        self._of_parent += [block for block in blocks if block.kind != "cpu"]

    def _idle_bytes(self) -> int:
        return sum(block.memory.nbytes for block in self._idle)

    def _fitting(self, nbytes: int, kind: str) -> _Block | None:
        """Return the smallest idle block that is large enough, None if there is none or it is much too large."""
        fitting = [
            (block.memory.nbytes, number)
            for number, block in enumerate(self._idle)
            if nbytes <= block.memory.nbytes <= 2 * nbytes + _UNIT and block.kind == kind
        ]
        return self._idle.pop(min(fitting)[1]) if fitting else None

    def _new(self, nbytes: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        most = max(self._most, self._lent + nbytes)
        while self._idle and self._lent + nbytes + self._idle_bytes() > most:
            del self._idle[0]
        return new(nbytes)


host_memory = HostMemory()
"""This process's."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=host_memory.after_fork)
