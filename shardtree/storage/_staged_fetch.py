"""Runs a load plan with targets on a device: one part is copied there while the next one is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from ..codec import bit_view, device_bits
from ..geometry import Column, joined_rows, row_major_strides, rows_of, volumes
from ..plans import LoadPlan, Runs, Strided, grouped
from ._blocks import BLOCK_BYTES, Flags, touched
from ._buffers import DeviceCopies, Pair, copies_of
from ._runs import clipped
from ._strided import cut, piece_in, row_major_piece_in

# Splitting a load plan into parts, whose bytes are staged in the host's memory.

# Parts of the plan rather than whole shards: one large tensor then takes no more host memory than many small ones.
PART_BYTES = 128 * BLOCK_BYTES
"""How much of a file a part reads. Parts end where blocks do, so that the same blocks are checked as on the CPU."""

_ALIGNMENT = 64  # bytes; what is copied is viewed as items of up to 8 bytes, which torch wants aligned


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """A part of a load plan, read as one.

    Attributes:
        plan: its first target is the staging memory for all that goes to devices, the others are `others`.
        others: the targets in the host's memory, int64, ascending.
        nbytes: of the staging memory.
        runs: what is copied from there to devices, with the final targets.
        run_byte: where each run lies in the staging memory, int64 (runs,).
        strided: likewise pieces, which lie there as row-major boxes.
        strided_byte: where each piece lies in the staging memory, int64 (pieces,).
    """

    plan: LoadPlan
    others: Column
    nbytes: int
    runs: Runs
    run_byte: Column
    strided: Strided
    strided_byte: Column


def staged_parts(plan: LoadPlan, on_device: Flags) -> Iterator[StagedPart]:
    """Yield a plan in parts: first each file's runs, then each file's strided pieces.

    Args:
        plan: what to read.
        on_device: which targets are on a device, bool (shards,).
    """
    for number in np.unique(plan.runs.file).tolist():
        yield from _run_parts(plan, on_device, number)
    pieces = _split_large(plan.strided)
    order = np.lexsort((pieces.byte, pieces.file))
    for number in np.unique(pieces.file).tolist():
        rows = order[pieces.file[order] == number]
        sizes = _nbytes(rows_of(pieces, rows)).tolist()
        for group in grouped(list(zip(rows.tolist(), sizes, strict=True)), lambda item: item[1], PART_BYTES):
            yield _strided_part(plan, rows_of(pieces, np.array([row for row, _ in group])), on_device)


def _run_parts(plan: LoadPlan, on_device: Flags, number: int) -> Iterator[StagedPart]:
    runs = rows_of(plan.runs, slice(*np.searchsorted(plan.runs.file, [number, number + 1]).tolist()))
    end = runs.byte + runs.length
    # Runs overlap in the file where several targets read the same bytes, so their ends may not ascend.
    ends = np.maximum.accumulate(end)
    none = rows_of(plan.strided, slice(0))
    for low in (np.flatnonzero(touched(runs.byte, end, int(ends[-1]), PART_BYTES)) * PART_BYTES).tolist():
        first, last = ends.searchsorted(low, "right"), runs.byte.searchsorted(low + PART_BYTES)
        part = clipped(runs, (int(first), int(last), low, low + PART_BYTES))
        staged = on_device[part.target]
        at, nbytes = _staging_offsets(part.length, staged)
        target, others = _renumbered(part.target, staged)
        read = replace(part, target=target, target_byte=np.where(staged, at, part.target_byte))
        whole = replace(plan, runs=read, strided=none)
        yield StagedPart(whole, others, nbytes, rows_of(part, staged), at[staged], none, at[:0])


def _strided_part(plan: LoadPlan, pieces: Strided, on_device: Flags) -> StagedPart:
    staged = on_device[pieces.target]
    at, nbytes = _staging_offsets(_nbytes(pieces), staged)
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
    """Return target numbers for a part's plan (0: staged), and the original targets of numbers 1 and up."""
    others, number = np.unique(target[~staged], return_inverse=True)
    numbered = np.zeros_like(target)
    numbered[~staged] = number + 1
    return numbered, others


def _staging_offsets(sizes: Column, staged: Flags) -> tuple[Column, int]:
    """Return where each staged row lies in the staging memory, and the length of that memory."""
    room = np.where(staged, -(-sizes // _ALIGNMENT) * _ALIGNMENT, 0)
    return np.cumsum(room) - room, int(room.sum())


def _split_large(pieces: Strided) -> Strided:
    """Return pieces, cut along their first axes until each has at most `PART_BYTES` or is a single element."""
    while (large := np.flatnonzero((_nbytes(pieces) > PART_BYTES) & (volumes(pieces.shape) > 1))).size:
        row = int(large[0])
        piece = rows_of(pieces, slice(row, row + 1))
        axis = int(np.argmax(piece.shape[0] > 1))
        inner = int(_nbytes(piece)[0]) // int(piece.shape[0, axis])
        cuts = [rows_of(pieces, slice(0, row)), cut(piece, axis, max(1, PART_BYTES // inner))]
        parts = [*cuts, rows_of(pieces, slice(row + 1, None))]
        pieces = joined_rows(parts)
    return pieces


def _nbytes(pieces: Strided) -> Column:
    found: Column = volumes(pieces.shape) * pieces.item_size
    return found


Report = TypeVar("Report")

_Transfers = deque[tuple[torch.Tensor, list[tuple[DeviceCopies, Any]]]]
"""Copies in progress: their host memory, and what to wait for."""


def memory_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor's memory, uint8 (bytes,), on the CPU or on a device with staging.

    Examples:
        >>> memory_bytes(torch.tensor([1, 256], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    return bit_view(tensor) if tensor.is_cpu else device_bits(tensor)


def fetch_to_devices(
    read: Callable[[LoadPlan, Sequence[torch.Tensor]], Report],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
) -> list[Report]:
    """Run a plan part by part, and return what `read` returned for each.

    At most two parts are in the host's memory: one being read, and one being copied. All copies are done at the end.

    Args:
        read: runs a plan whose targets are all in the host's memory.
        plan: what to read.
        memories: for each requested shard its bytes, uint8 (bytes,), some of them on devices.
    """
    devices = [memory.device for memory in memories]
    copies = {device: staged for device in set(devices) if (staged := copies_of(device)) is not None}
    host_memory = next(iter(copies.values())).host_memory
    reports: list[Report] = []
    in_flight: _Transfers = deque()
    try:
        for part in staged_parts(plan, np.array([device in copies for device in devices], dtype=np.bool_)):
            _wait(in_flight, most=1)
            memory = host_memory(part.nbytes)
            reports.append(read(part.plan, [memory, *(memories[number] for number in part.others.tolist())]))
            in_flight.append((memory, _start_copies(part, memory, memories, copies)))
    finally:
        # Also after an exception: a copy still in progress would read host memory that was freed and reused.
        _wait(in_flight, most=0)
    return reports


def _wait(in_flight: _Transfers, *, most: int) -> None:
    while len(in_flight) > most:
        for copies, token in in_flight[0][1]:
            copies.wait(token)
        in_flight.popleft()


def _start_copies(
    part: StagedPart,
    memory: torch.Tensor,
    memories: Sequence[torch.Tensor],
    copies: Mapping[torch.device, DeviceCopies],
) -> list[tuple[DeviceCopies, Any]]:
    """Start copying a part to its devices, with one call for each device."""
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
