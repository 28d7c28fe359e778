"""Memory that bytes pass through: new pages for a load, a tensor's row-major bytes, copies to and from devices."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

from ..codec import byte_buffer, device_bits, row_major_bits
from ..lazy import LazyTensor
from ._storage import Buffer

# Copies between a device's memory and the host's, one of which is on its way while the host does something else.

Pair = tuple[torch.Tensor, torch.Tensor]
"""What a copy fills, and what it is made of: alike in dtype and shape."""


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """How a device's memory is copied from and to. Whoever starts a copy keeps its tensors until he has waited for it.

    Attributes:
        host_memory: returns so many bytes of the host's memory, uint8, that nobody else has.
        start: begins copies, once all is done that the calling thread has asked of the device, and returns a token.
        wait: waits until the copies of a token are done.
    """

    host_memory: Callable[[int], torch.Tensor]
    start: Callable[[Sequence[Pair]], Any]
    wait: Callable[[Any], None]


def plain_copies(device: torch.device) -> DeviceCopies:
    """Return copies that are done when they are asked for."""

    def start(pairs: Sequence[Pair]) -> None:
        for target, source in pairs:
            target.copy_(source)

    return DeviceCopies(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), start, lambda _: None)


def _cuda_copies(device: torch.device) -> DeviceCopies:
    stream = _side_stream(device.index)

    def start(pairs: Sequence[Pair]) -> torch.cuda.Event:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                # What is dropped early isn't given to somebody else before the copy.
                (target if target.is_cuda else source).record_stream(stream)
            done.record(stream)
        return done

    # Torch keeps what was pinned for the next time, since to pin memory takes long.
    pinned = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # noqa: E731
    return DeviceCopies(pinned, start, lambda done: done.synchronize())


@cache
def _side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


copies_by_device: dict[str, Callable[[torch.device], DeviceCopies]] = {"cuda": _cuda_copies}
"""By kind of device; memory of others is copied as a whole, where it isn't the CPU's."""


def copies_of(device: torch.device) -> DeviceCopies | None:
    """Return how a device's memory is staged, None where it isn't."""
    make = copies_by_device.get(device.type)
    return None if make is None else make(device)


def staged_buffers(parts: Iterable[torch.Tensor], copies: DeviceCopies) -> Iterator[Buffer]:
    r"""Yield the row-major bytes of parts, each in memory of its own; the next one is on its way meanwhile.

    Args:
        parts: in a device's memory.
        copies: of that device.

    Examples:
        >>> parts = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
        >>> [bytes(buffer) for buffer in staged_buffers(parts, plain_copies(parts.device))]
        [b'\x01\x02', b'\x03\x04']
    """
    started: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
    try:
        for part in parts:
            bits = device_bits(part)
            memory = copies.host_memory(bits.numel())
            started.append((memory, bits, copies.start([(memory, bits)])))
            if len(started) == 2:
                yield _arrived(started, copies)
        while started:
            yield _arrived(started, copies)
    finally:
        # Also after an exception: nothing may come to memory that is somebody else's by then.
        for _, _, token in started:
            copies.wait(token)


def _arrived(started: deque[tuple[torch.Tensor, torch.Tensor, Any]], copies: DeviceCopies) -> Buffer:
    copies.wait(started[0][2])
    return memoryview(started.popleft()[0].numpy())


# A tensor's row-major bytes as buffers, without a copy of the whole wherever its memory isn't already that.

STAGED_BYTES = 4 * 1024 * 1024
"""The most that is copied at once of a tensor whose memory can't be written as it is."""


def tensor_buffers(tensor: torch.Tensor | LazyTensor) -> Iterator[Buffer]:
    r"""Yield the bytes of a tensor, in row-major order.

    A contiguous tensor in the CPU's memory is yielded in place. Another (transposed, on an accelerator, lazy) is staged
    in parts of at most `STAGED_BYTES`; on CUDA, one part is on its way while the one before is used.

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
    """Yield a tensor in parts of at most `STAGED_BYTES`, or single elements, in row-major order."""
    if tensor.nbytes <= STAGED_BYTES or not tensor.ndim:
        yield tensor
        return
    rows = max(1, STAGED_BYTES * tensor.shape[0] // tensor.nbytes)
    for start in range(0, tensor.shape[0], rows):
        stop = min(start + rows, tensor.shape[0])
        # A single row may still be too much: it loses its axis and is taken apart along the next.
        yield from _parts(tensor[start] if rows == 1 else tensor[start:stop])


def is_in_place(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is its row-major bytes, where the CPU can read them.

    Examples:
        >>> is_in_place(torch.ones(2, 3)), is_in_place(torch.ones(2, 3).T)
        (True, False)
    """
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# New memory for a load, in huge pages where the system has them: first contact is what costs, and it is per page.

_LEAST_BYTES = 4 * 1024 * 1024


def empty_tensor(*shape: Any, **options: Any) -> torch.Tensor:
    """Return what ``torch.empty`` returns, its memory in huge pages if there is much of it in the CPU's memory.

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
        # A refusal changes nothing but speed.
        call(begin, address + length - begin, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[..., int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
