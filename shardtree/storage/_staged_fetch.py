"""Runs a load plan of which something belongs on a device: one part is copied there while the next one is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from ..codec import bit_view, device_bits
from ..plans import LoadPlan
from ._staged_plan import StagedPart, staged_parts
from ._staging import DeviceCopies, Pair, copies_of
from ._strided import piece_in, row_major_piece_in

Report = TypeVar("Report")

_Arriving = deque[tuple[torch.Tensor, list[tuple[DeviceCopies, Any]]]]
"""Host memory that copies are being made from, and what waits for them."""


def memory_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor's memory, uint8 (bytes,), on the CPU or where copies are staged.

    Examples:
        >>> memory_bytes(torch.tensor([1, 256], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    return bit_view(tensor) if tensor.is_cpu else device_bits(tensor)


def any_staged(memories: Iterable[torch.Tensor]) -> bool:
    """Return whether any memory is on a device whose copies are staged.

    Examples:
        >>> any_staged([torch.empty(2)])
        False
    """
    return any(map(copies_of, {memory.device for memory in memories}))


def fetch_to_devices(
    read: Callable[[LoadPlan, Sequence[torch.Tensor]], Report],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
) -> list[Report]:
    """Run a plan part by part, and return what each part's reading returned.

    Two parts are in the host's memory at most: one that is read, and one on its way. All have arrived at the end.

    Args:
        read: runs a plan whose targets are all in the host's memory.
        plan: what to read.
        memories: for each requested shard its bytes, uint8 (bytes,), some of them on devices.
    """
    devices = [memory.device for memory in memories]
    copies = {device: staged for device in set(devices) if (staged := copies_of(device)) is not None}
    host_memory = next(iter(copies.values())).host_memory
    reports: list[Report] = []
    arriving: _Arriving = deque()
    try:
        for part in staged_parts(plan, np.array([device in copies for device in devices], dtype=np.bool_)):
            _wait(arriving, most=1)
            memory = host_memory(part.nbytes)
            reports.append(read(part.plan, [memory, *(memories[number] for number in part.others.tolist())]))
            arriving.append((memory, _started(part, memory, memories, copies)))
    finally:
        # Also after an exception: a copy may not go on in memory that is somebody else's by then.
        _wait(arriving, most=0)
    return reports


def _wait(arriving: _Arriving, *, most: int) -> None:
    while len(arriving) > most:
        for copies, token in arriving[0][1]:
            copies.wait(token)
        arriving.popleft()


def _started(
    part: StagedPart,
    memory: torch.Tensor,
    memories: Sequence[torch.Tensor],
    copies: Mapping[torch.device, DeviceCopies],
) -> list[tuple[DeviceCopies, Any]]:
    """Begin to copy a part to where it belongs."""
    pairs: dict[torch.device, list[Pair]] = {}
    for target, source in _pairs(part, memory, memories):
        pairs.setdefault(target.device, []).append((target, source))
    return [(copies[device], copies[device].start(own)) for device, own in pairs.items()]


def _pairs(part: StagedPart, memory: torch.Tensor, memories: Sequence[torch.Tensor]) -> Iterator[Pair]:
    runs, pieces = part.runs, part.strided
    columns = (runs.target, runs.target_byte, part.run_byte, runs.length)
    for target, to, at, size in zip(*(column.tolist() for column in columns), strict=True):
        yield memories[target][to : to + size], memory[at : at + size]
    for row, (target, at) in enumerate(zip(pieces.target.tolist(), part.strided_byte.tolist(), strict=True)):
        yield piece_in(memories[target], pieces, row), row_major_piece_in(memory[at:], pieces, row)
