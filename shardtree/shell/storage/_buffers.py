"""Host memory for tensors, tensors' row-major bytes as buffers, and copies to and from devices."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, cast
from weakref import finalize

import torch

from ...core import limits
from ...core.codec import byte_buffer, device_bits, row_major_bits
from ...core.lazy import LazyTensor
from ...errors import StorageError, error_text
from ._storage import Buffer

# New memory. Most of its cost is the first access to each page, so large tensors get huge pages.

_HUGE_PAGE_BYTES = 4 * 1024 * 1024


def empty_tensor(*shape: Any, **options: Any) -> torch.Tensor:
    """Return an uninitialised tensor, as ``torch.empty`` does, by default on the CPU; large CPU tensors get huge pages.

    Examples:
        >>> empty_tensor((2, 3), dtype=torch.bfloat16).shape
        torch.Size([2, 3])
    """
    tensor = torch.empty(*shape, **{"device": "cpu"} | options)
    if tensor.nbytes >= _HUGE_PAGE_BYTES and tensor.is_cpu and (call := _madvise()) is not None:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        # The result is ignored: without huge pages the first access is only slower.
        call(begin, tensor.data_ptr() + tensor.nbytes - begin, mmap.MADV_HUGEPAGE)
    return tensor


@cache
def _madvise() -> Callable[..., int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


# A pool of memory: allocating takes many times longer than filling, and pinning longer still. A lent block comes back
# when the last tensor in it is collected, so that nothing is overwritten while somebody may read it.

_UNIT = 2 * 1024 * 1024  # a huge page


class _Block(NamedTuple):
    """A block of host memory, its kind, and the id of the process that allocated it."""

    kind: str
    memory: torch.Tensor
    process: int


def pageable(nbytes: int) -> torch.Tensor:
    """Return new pageable memory as a uint8 tensor; `HostMemory.lend` uses it for the kind "cpu"."""
    return empty_tensor(nbytes, dtype=torch.uint8)


class HostMemory:
    """A pool of reusable host memory; its size never exceeds the peak of lent memory since the last `release`.

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
        # A finalizer fills this. It may interrupt any code of any thread, even code that holds the lock, so it must not
        # take the lock; a deque's append needs none.
        self._back: deque[_Block] = deque()
        self._of_parent: list[_Block] = []
        self._lent = 0
        self._most = 0
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are lent out or idle in the pool."""
        with self._lock:
            self._take_back()
            return self._lent + self._idle_bytes()

    def lend(self, nbytes: int, kind: str = "cpu", new: Callable[[int], torch.Tensor] = pageable) -> torch.Tensor:
        """Return uninitialised memory of `nbytes` bytes, as a uint8 tensor.

        Args:
            nbytes: Number of bytes.
            kind: Kind of memory: "cpu" for pageable memory, otherwise the type of the device that copies to it, such as
                "cuda". A block is only reused for its own kind.
            new: Function that allocates memory of that kind.
        """
        with self._lock:
            self._take_back()
            block = self._fitting(nbytes, kind)
            if block is None:
                block = _Block(kind, self._new(-(-nbytes // _UNIT) * _UNIT, new), os.getpid())
            self._lent += block.memory.nbytes
            self._most = max(self._most, self._lent)
        # Tensors made from an array keep the array alive, not the block: its finalizer runs when the last one is gone.
        array = block.memory.numpy()
        finalize(array, self._back.append, block).atexit = False
        return torch.from_numpy(array)[:nbytes]

    def release(self) -> None:
        """Return all idle memory to the system."""
        with self._lock:
            self._take_back()
            self._idle.clear()
            self._most = self._lent

    def after_fork(self) -> None:
        """Reset the pool in a forked process, whose inherited pinned memory belongs to an unreachable device driver."""
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
        # They are kept: freeing pinned memory calls the device's driver, which a forked process must not do.
        self._of_parent += [block for block in blocks if block.kind != "cpu"]

    def _idle_bytes(self) -> int:
        return sum(block.memory.nbytes for block in self._idle)

    def _fitting(self, nbytes: int, kind: str) -> _Block | None:
        """Take the smallest idle block of a kind with `nbytes` to about twice as many bytes; None if there is none."""
        fitting = [
            (block.memory.nbytes, -number)
            for number, block in enumerate(self._idle)
            if nbytes <= block.memory.nbytes <= 2 * nbytes + _UNIT and block.kind == kind
        ]
        return self._idle.pop(-min(fitting)[1]) if fitting else None

    def _new(self, nbytes: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        most = max(self._most, self._lent + nbytes)
        while self._idle and self._lent + nbytes + self._idle_bytes() > most:
            del self._idle[0]
        return new(nbytes)


host_memory = HostMemory()
"""The process's pool."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=host_memory.after_fork)


# Asynchronous copies between a device's memory and the host's.

Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source of a copy, of the same dtype and shape."""


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Functions that copy between a device's memory and the host's. Keep a copy's tensors until `wait` has returned.

    Attributes:
        host_memory: Function that returns unused host memory of a given number of bytes, as a uint8 tensor.
        start: Function that takes (destination, source) pairs and starts their copies, after all work that the calling
            thread has queued on the device; returns a token.
        wait: Function that takes a token and waits until its copies are done.
    """

    host_memory: Callable[[int], torch.Tensor]
    start: Callable[[Sequence[Pair]], Any]
    wait: Callable[[Any], None]


def plain_copies(device: torch.device) -> DeviceCopies:
    """Return functions that copy synchronously."""

    def start(pairs: Sequence[Pair]) -> None:
        for target, source in pairs:
            target.copy_(source)

    return DeviceCopies(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu"), start, lambda _: None)


def _stream_copies(device: torch.device) -> DeviceCopies:
    """Return functions that copy on a side stream, so that copies overlap with the program's kernels."""
    module, stream = getattr(torch, device.type), _side_stream(device.type, device.index)

    def start(pairs: Sequence[Pair]) -> Any:
        event = module.Event()
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            try:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    # This keeps torch's allocator from reusing the memory before the copy, even if it is freed early.
                    (source if target.is_cpu else target).record_stream(stream)
            except BaseException:
                stream.synchronize()  # the caller gets no token with which to wait for copies that have begun
                raise
            event.record(stream)
        return event

    def memory(nbytes: int) -> torch.Tensor:
        return host_memory.lend(nbytes, device.type, _pin) if nbytes >= _LEAST_LENT else _pin(nbytes)

    return DeviceCopies(memory, start, lambda event: event.synchronize())


_LEAST_LENT = 1024 * 1024
"""Smaller blocks come from torch, whose cache of pinned memory keeps many sizes but returns nothing to the system."""


_first_process: list[int] = []  # the first process that pinned memory, among this one and its ancestors by fork


def _pin(nbytes: int) -> torch.Tensor:
    # A device's driver doesn't survive a fork: a call in the child fails without a reason, or hangs.
    if not _first_process:
        _first_process.append(os.getpid())
    elif _first_process[0] != os.getpid():
        fix = "Start processes by 'spawn' or 'forkserver', or use no device before they are forked."
        raise StorageError(error_text("cannot pin memory in a process forked from one that pinned memory", fix=fix))
    # A copy from pageable memory would block.
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


@cache
def _side_stream(kind: str, index: int) -> Any:
    return getattr(torch, kind).Stream(index)


# torch.xpu has the streams and events of torch.cuda under the same names. Other devices have none, or (mps) share the
# host's memory: torch copies their tensors whole.
copies_by_device: dict[str, Callable[[torch.device], DeviceCopies]] = {"cuda": _stream_copies, "xpu": _stream_copies}
"""Functions that return asynchronous copies for a device, by type of device."""


def copies_of(device: torch.device) -> DeviceCopies | None:
    """Return the functions that copy to and from a device, or None if it has no asynchronous copies."""
    make = copies_by_device.get(device.type)
    return None if make is None else make(device)


def is_staged(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's device has asynchronous copies; this is faster than calling `copies_of`.

    Examples:
        >>> is_staged(torch.empty(2))
        False
    """
    return ("cpu" if tensor.is_cpu else tensor.device.type) in copies_by_device


def staged_buffers(parts: Iterable[torch.Tensor], copies: DeviceCopies) -> Iterator[Buffer]:
    r"""Yield the row-major bytes of tensors on a device, copying the next tensor while the current one is used.

    Args:
        parts: Tensors in the device's memory.
        copies: Functions that copy from that device.

    Examples:
        >>> parts = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
        >>> [bytes(buffer) for buffer in staged_buffers(parts, plain_copies(parts.device))]
        [b'\x01\x02', b'\x03\x04']
    """
    in_flight: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
    try:
        for part in parts:
            bits = device_bits(part)
            memory = copies.host_memory(bits.numel())
            in_flight.append((memory, bits, copies.start([(memory, bits)])))
            if len(in_flight) == 2:
                yield _wait_for_first(in_flight, copies)
        while in_flight:
            yield _wait_for_first(in_flight, copies)
    finally:
        # After an exception too: a copy still in flight would write to host memory that was freed and reused.
        for _, _, token in in_flight:
            copies.wait(token)


def _wait_for_first(in_flight: deque[tuple[torch.Tensor, torch.Tensor, Any]], copies: DeviceCopies) -> Buffer:
    copies.wait(in_flight[0][2])
    return memoryview(in_flight.popleft()[0].numpy())


# A tensor's row-major bytes as buffers.

_BLOCK_ROWS = 128  # rows of an FP8 block: a part that ends inside a block costs twice the work


def tensor_buffers(tensor: torch.Tensor | LazyTensor) -> Iterator[Buffer]:
    r"""Yield the bytes of a tensor, in row-major order.

    A contiguous tensor in the CPU's memory is yielded in place. Other tensors (transposed, on an accelerator) are
    staged in parts and lazy tensors are read in parts, since a copy of the whole would double the memory of a save. On
    a device with streams, the next part is copied while the current one is used.

    Examples:
        >>> b"".join(tensor_buffers(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T))
        b'\x01\x03\x02\x04'
    """
    if not tensor.numel():
        return
    copies = copies_of(tensor.device) if isinstance(tensor, torch.Tensor) else None
    if copies is not None:
        yield from staged_buffers(cast(Iterator[torch.Tensor], _parts(tensor)), copies)
    elif isinstance(tensor, torch.Tensor) and is_in_place(tensor):
        yield byte_buffer(tensor)
    else:
        for part in _parts(tensor):
            yield memoryview(row_major_bits(part.read() if isinstance(part, LazyTensor) else part).numpy())


def _parts(tensor: torch.Tensor | LazyTensor) -> Iterator[torch.Tensor | LazyTensor]:
    """Yield parts of a tensor in row-major order, each of a limited size or a single element."""
    most = limits.LAZY_BYTES if isinstance(tensor, LazyTensor) else limits.COPIED_BYTES
    if tensor.nbytes <= most or not tensor.ndim:
        yield tensor
        return
    rows = max(1, most * tensor.shape[0] // tensor.nbytes)
    if isinstance(tensor, LazyTensor) and rows > _BLOCK_ROWS:
        rows -= rows % _BLOCK_ROWS
    for start in range(0, tensor.shape[0], rows):
        stop = min(start + rows, tensor.shape[0])
        # A single row may still be too large: it loses its first axis and is split along the next.
        yield from _parts(tensor[start] if rows == 1 else tensor[start:stop])


def is_in_place(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is its row-major bytes, readable by the CPU.

    Examples:
        >>> is_in_place(torch.ones(2, 3)), is_in_place(torch.ones(2, 3).T)
        (True, False)
    """
    # torch conjugates and negates lazily: if one of these bits is set, the memory holds other values than the tensor.
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
