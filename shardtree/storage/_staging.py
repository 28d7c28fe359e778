"""Memory of the host between files and devices: what some requests read is copied on while the next are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..codec import bit_view, byte_buffer, device_bits
from ..geometry import Column, row_major_strides, rows_of, volumes
from ..plans import Runs, Strided, grouped
from ._blocks import BLOCK_BYTES, Flags
from ._buffers import DeviceCopies, Pair, copies_of
from ._requests import Cut, Request
from ._storage import Buffer
from ._strided import piece_in, row_major_piece_in

# Parts of a plan rather than whole shards: one large tensor then takes no more host memory than many small ones.
PART_BYTES = 128 * BLOCK_BYTES
"""How much is staged at a time."""

_ALIGNMENT = 64  # bytes; what is copied is viewed as items of up to 8 bytes, which torch wants aligned


def cut_for_devices(cut: Cut) -> Cut:
    """Return how a plan is cut where it is staged: a part is a few requests, for as many threads."""
    return replace(cut, most_bytes=min(cut.most_bytes, PART_BYTES // 4))


def read_to_devices(
    read: Callable[[Sequence[Request], Sequence[Buffer]], int],
    requests: Sequence[Request],
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
) -> int:
    """Carry out requests for memory some of which is on devices, and return how many bytes were read.

    At most two parts are in the host's memory: one being read, and one being copied. All copies are done at the end.

    Args:
        read: carries out requests, given each target's bytes in the host's memory.
        requests: what to read.
        views: for each target its bytes; of those on devices none.
        memories: the targets.
    """
    copies = {device: found for device in {each.device for each in memories} if (found := copies_of(device))}
    on_device = np.array([memory.device in copies for memory in memories], dtype=np.bool_)
    bits = [bit_view(memory) if memory.is_cpu else device_bits(memory) for memory in memories]
    host_memory = next(iter(copies.values())).host_memory
    in_flight: _Transfers = deque()
    done = 0
    try:
        for part in grouped(requests, _nbytes, PART_BYTES):
            _wait(in_flight, most=1)
            staged, size = list[Staged](), 0
            for request in part:
                staged.append(stage(request, on_device, size))
                size = staged[-1].end
            memory = host_memory(size)
            done += read([each.request for each in staged], [*views, byte_buffer(memory)])
            in_flight.append((memory, _start_copies(staged, memory, bits, copies)))
    finally:
        # Also after an exception: a copy still in progress would read host memory that was freed and reused.
        _wait(in_flight, most=0)
    return done


def _nbytes(request: Request) -> int:
    return int(request.runs.length.sum() + _piece_bytes(request.pieces).sum())


def _piece_bytes(pieces: Strided) -> Column:
    found: Column = volumes(pieces.shape) * pieces.item_size
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A request that reads into staging memory what goes to devices.

    Attributes:
        request: with one target more, the staging memory.
        end: of what it takes there.
        runs: what is copied from there, with the final targets.
        run_byte: where each run lies in the staging memory, int64 (runs,).
        pieces: likewise pieces, which lie there as row-major boxes.
        piece_byte: where each piece lies in the staging memory, int64 (pieces,).
    """

    request: Request
    end: int
    runs: Runs
    run_byte: Column
    pieces: Strided
    piece_byte: Column


def stage(request: Request, on_device: Flags, begin: int) -> Staged:
    """Return a request with staging memory in the place of devices.

    Args:
        request: with the final targets.
        on_device: which targets are on a device, bool (targets,).
        begin: first byte of the staging memory that is free.
    """
    runs, pieces, number = request.runs, request.pieces, on_device.size
    run, piece = on_device[runs.target] & (runs.target >= 0), on_device[pieces.target]
    sizes = np.concatenate((runs.length * run, _piece_bytes(pieces) * piece))
    ends = begin + np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
    run_byte, piece_byte = np.split(np.append(begin, ends[:-1])[: sizes.size], [run.size])
    read_runs = replace(
        runs, target=np.where(run, number, runs.target), target_byte=np.where(run, run_byte, runs.target_byte)
    )
    read_pieces = replace(
        pieces,
        target=np.where(piece, number, pieces.target),
        target_byte=np.where(piece, piece_byte, pieces.target_byte),
        target_stride=np.where(piece[:, None], row_major_strides(pieces.shape), pieces.target_stride),
    )
    return Staged(
        replace(request, runs=read_runs, pieces=read_pieces),
        int(ends[-1]) if ends.size else begin,
        rows_of(runs, run),
        run_byte[run],
        rows_of(pieces, piece),
        piece_byte[piece],
    )


_Transfers = deque[tuple[torch.Tensor, list[tuple[DeviceCopies, Any]]]]
"""Copies in progress: their host memory, and what to wait for."""


def _wait(in_flight: _Transfers, *, most: int) -> None:
    while len(in_flight) > most:
        for copies, token in in_flight[0][1]:
            copies.wait(token)
        in_flight.popleft()


def _start_copies(
    staged: Sequence[Staged],
    memory: torch.Tensor,
    memories: Sequence[torch.Tensor],
    copies: Mapping[torch.device, DeviceCopies],
) -> list[tuple[DeviceCopies, Any]]:
    """Start copying a part to its devices, with one call for each device."""
    pairs: dict[torch.device, list[Pair]] = {}
    for each in staged:
        for target, source in _pairs(each, memory, memories):
            pairs.setdefault(target.device, []).append((target, source))
    return [(copies[device], copies[device].start(own)) for device, own in pairs.items()]


def _pairs(staged: Staged, memory: torch.Tensor, memories: Sequence[torch.Tensor]) -> Iterator[Pair]:
    runs, pieces = staged.runs, staged.pieces
    columns = (runs.target, runs.target_byte, staged.run_byte, runs.length)
    for target, to, at, size in zip(*(column.tolist() for column in columns), strict=True):
        yield memories[target][to : to + size], memory[at : at + size]
    for row, (target, at) in enumerate(zip(pieces.target.tolist(), staged.piece_byte.tolist(), strict=True)):
        yield piece_in(memories[target], pieces, row), row_major_piece_in(memory[at:], pieces, row)
