"""Copies between a device's memory and the host's, one of which is on its way while the host does something else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..codec import device_bits
from ._storage import Buffer

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
