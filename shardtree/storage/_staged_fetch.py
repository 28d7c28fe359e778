"""Runs a load plan of which something belongs on a device: one part is copied there while the next one is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ..codec import bit_view, device_bits
from ..geometry import Column, row_major_strides, volumes
from ..plans import LoadPlan, Runs, Strided, grouped
from ._blocks import BLOCK_BYTES, Flags, touched
from ._buffers import DeviceCopies, Pair, copies_of
from ._runs import clipped
from ._strided import cut, piece_in, row_major_piece_in

# A load plan in parts: what each part reads for a device lies together in the host's memory first.

PART_BYTES = 128 * BLOCK_BYTES
"""How much of a file a part reads. Parts end where blocks do, so that a block that is read whole is in one part."""

_ALIGNMENT = 64

Rows = TypeVar("Rows", Runs, Strided)


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """What is read at once.

    Attributes:
        plan: its first target is memory for all that goes to devices, the rest are `others`.
        others: the targets in the host's memory that are read into, int64, ascending.
        nbytes: that the first target has.
        runs: what goes from there to devices, with the targets that it belongs to.
        run_byte: where each run lies, int64 (runs,).
        strided: likewise, pieces that lie there as row-major boxes.
        strided_byte: where each piece lies, int64 (pieces,).
    """

    plan: LoadPlan
    others: Column
    nbytes: int
    runs: Runs
    run_byte: Column
    strided: Strided
    strided_byte: Column


def staged_parts(plan: LoadPlan, on_device: Flags) -> Iterator[StagedPart]:
    """Yield a plan in parts, of a file's runs and of its strided pieces.

    Args:
        plan: what to read.
        on_device: which targets are on a device, bool (shards,).
    """
    for number in np.unique(plan.runs.file).tolist():
        yield from _run_parts(plan, on_device, number)
    pieces = _bounded(plan.strided)
    order = np.lexsort((pieces.byte, pieces.file))
    for number in np.unique(pieces.file).tolist():
        rows = order[pieces.file[order] == number]
        sizes = _nbytes(rows_of(pieces, rows)).tolist()
        for group in grouped(list(zip(rows.tolist(), sizes, strict=True)), lambda item: item[1], PART_BYTES):
            yield _strided_part(plan, rows_of(pieces, np.array([row for row, _ in group])), on_device)


def _run_parts(plan: LoadPlan, on_device: Flags, number: int) -> Iterator[StagedPart]:
    runs = rows_of(plan.runs, slice(*np.searchsorted(plan.runs.file, [number, number + 1]).tolist()))
    end = runs.byte + runs.length
    # Runs may overlap in the file, where several targets want the same bytes, so their ends needn't ascend.
    ends = np.maximum.accumulate(end)
    none = rows_of(plan.strided, slice(0))
    for low in (np.flatnonzero(touched(runs.byte, end, int(ends[-1]), PART_BYTES)) * PART_BYTES).tolist():
        first, last = ends.searchsorted(low, "right"), runs.byte.searchsorted(low + PART_BYTES)
        part = clipped(runs, (int(first), int(last), low, low + PART_BYTES))
        staged = on_device[part.target]
        at, nbytes = _places(part.length, staged)
        target, others = _renumbered(part.target, staged)
        read = replace(part, target=target, target_byte=np.where(staged, at, part.target_byte))
        whole = replace(plan, runs=read, strided=none)
        yield StagedPart(whole, others, nbytes, rows_of(part, staged), at[staged], none, at[:0])


def _strided_part(plan: LoadPlan, pieces: Strided, on_device: Flags) -> StagedPart:
    staged = on_device[pieces.target]
    at, nbytes = _places(_nbytes(pieces), staged)
    target, others = _renumbered(pieces.target, staged)
    read = replace(
        pieces,
        target=target,
        target_byte=np.where(staged, at, pieces.target_byte),
        target_stride=np.where(staged[:, None], row_major_strides(pieces.shape), pieces.target_stride),
    )
    none = rows_of(plan.runs, slice(0))
    whole = replace(plan, runs=none, strided=read)
    return StagedPart(whole, others, nbytes, none, at[:0], rows_of(pieces, staged), at[staged])


def _renumbered(target: Column, staged: Flags) -> tuple[Column, Column]:
    """Return the targets in a part's plan, and which targets the second and the further ones are."""
    others, number = np.unique(target[~staged], return_inverse=True)
    numbered = np.zeros_like(target)
    numbered[~staged] = number + 1
    return numbered, others


def _places(sizes: Column, staged: Flags) -> tuple[Column, int]:
    """Return where each of the staged rows lies, and how much memory they take together."""
    room = np.where(staged, -(-sizes // _ALIGNMENT) * _ALIGNMENT, 0)
    return np.cumsum(room) - room, int(room.sum())


def _bounded(pieces: Strided) -> Strided:
    """Return pieces cut along their first axes until none has more than `PART_BYTES`, or it is a single element."""
    while (large := np.flatnonzero((_nbytes(pieces) > PART_BYTES) & (volumes(pieces.shape) > 1))).size:
        row = int(large[0])
        piece = rows_of(pieces, slice(row, row + 1))
        axis = int(np.argmax(piece.shape[0] > 1))
        inner = int(_nbytes(piece)[0]) // int(piece.shape[0, axis])
        cuts = [rows_of(pieces, slice(0, row)), cut(piece, axis, max(1, PART_BYTES // inner))]
        parts = [*cuts, rows_of(pieces, slice(row + 1, None))]
        pieces = Strided(*(np.concatenate([getattr(part, name) for part in parts]) for name in Strided.__slots__))
    return pieces


def _nbytes(pieces: Strided) -> Column:
    found: Column = volumes(pieces.shape) * pieces.item_size
    return found


def rows_of(columns: Rows, rows: Column | Flags | slice) -> Rows:
    """Return some rows of runs or pieces."""
    return type(columns)(*(getattr(columns, name)[rows] for name in type(columns).__slots__))


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
