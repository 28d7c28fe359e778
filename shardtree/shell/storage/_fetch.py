"""Runs a load plan: several threads put what arrives into the targets' memory, hash it, and check it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np
import torch

from ...core import limits
from ...core.ambient import collector_paused
from ...core.codec import byte_buffer
from ...core.plans import LoadPlan, Runs
from ...errors import StorageError
from ._blocks import BLOCK_BYTES, BlockHasher, Flags, Verify, run_blocks
from ._buffers import host_memory, is_staged
from ._capabilities import can
from ._checked import ReadReport, StoredFile, damage_error, range_crc32
from ._requests import Checks, Cut, Request, cut_of, requests_of
from ._storage import Buffer, Storage
from ._strided import copy_piece, wide_reads
from ._threads import run_workers
from ._transports import (
    RequestSource,
    RequestTransport,
    cut_for_devices,
    from_memory,
    read_to_devices,
    transport_of,
)

Sums = dict[int, Any]
"""Checksums found in a file. Of blocks that came whole: number → hash, -1 if it came twice with different bytes. Of
parts of byte ranges: first byte → (one past the last byte, CRC32)."""


def fetch(
    storage: Storage,
    files: Mapping[int, StoredFile],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
    *,
    verify: Verify = "whole",
    progress: Callable[[int], None] = lambda _: None,
) -> ReadReport:
    """Read what a plan says, and return how much that was.

    Args:
        storage: where the files are.
        files: by their number in the plan.
        plan: what to read.
        memories: for each requested shard a contiguous tensor of its bytes in any dtype, written in place; some on
            devices that are staged.
        verify: which blocks are checked against their hashes.
        progress: called with the bytes read since the last call, by one thread at a time.

    Raises:
        CorruptCheckpoint: a file's length or a block's hash isn't what the index says.
        StorageError: a file can't be read.
    """
    return _carry_out(transport_of(storage, files), cut_of(storage, plan), files, plan, memories, verify, progress)


def fetch_from_memory(
    contents: Mapping[int, Buffer],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> ReadReport:
    """Copy the bytes that a plan reads from files whose content is in memory, such as decoded ones; return how many.

    Args:
        contents: The bytes of each file, by its number in the plan.
        plan: The runs and boxes to copy.
        memories: Destinations, in the form of `fetch`.
        progress: Callback that gets the number of bytes copied since its last call.

    Raises:
        StorageError: A file has fewer bytes than the plan reads.

    Examples:
        >>> from shardtree.core.plans import runs_plan
        >>> file, byte, target, target_byte, length = (np.array([number]) for number in (0, 1, 0, 0, 2))
        >>> plan = runs_plan(Runs(file, byte, target, target_byte, length))
        >>> memory = torch.zeros(2, dtype=torch.uint8)
        >>> fetch_from_memory({0: memoryview(bytes([5, 6, 7]))}, plan, [memory]).bytes_read, memory.tolist()
        (2, [6, 7])
    """
    files = {number: StoredFile("", data.nbytes) for number, data in contents.items()}
    return _carry_out(from_memory(contents), cut_of(None, plan), files, plan, memories, None, progress)


def _carry_out(
    transport: RequestTransport,
    cut: Cut,
    files: Mapping[int, StoredFile],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    is_on_device = np.array([is_staged(memory) for memory in memories], dtype=np.bool_)
    if is_on_device.any():
        cut = cut_for_devices(cut)
    requests, checks = requests_of(files, plan, verify, cut)
    with collector_paused():
        views = _views(plan, memories, is_on_device)
    sums = {number: Sums() for number in checks}

    def carry_out(requests: Sequence[Request], progress: Callable[[int], None]) -> int:
        read = partial(_read, transport, checks, sums, progress)
        return read_to_devices(read, requests, views, memories) if is_on_device.any() else read(requests, views)

    bytes_read = carry_out(requests, progress)
    for _ in range(transport.tries - 1):
        wrong = {number: _wrong(check, sums[number]) for number, check in checks.items()}
        again = [
            each for each in requests if any(begin < each.end and each.begin < end for begin, end in wrong[each.file])
        ]
        sums |= {number: _without(sums[number], checks[number], spans) for number, spans in wrong.items()}
        carry_out(again, lambda _: None)
    for number, check in checks.items():
        if spans := _wrong(check, sums[number]):
            what = f"the hash of {len(spans)} of its blocks"
            if check.file.ranges is not None:
                what = f"the checksum of {len(spans)} of its tensors"
            offenders = (f"bytes {begin} to {end}" for begin, end in spans)
            raise damage_error(transport.where(check.file.name), f"{what} differs", offenders)
    count = sum(len(sums[number] if check.file.ranges is None else check.ranges) for number, check in checks.items())
    return ReadReport(bytes_read, count, sum(check.units for check in checks.values()) - count, len(checks))


def fetch_run(
    storage: Storage, file: StoredFile, byte: int, memory: torch.Tensor, *, verify: Verify
) -> ReadReport | None:
    """Fill memory with consecutive bytes of a file by one read, which has all of the blocks that `fetch` would check.

    Returns:
        How much was read; None where that takes more, or anything is wrong: `fetch` then does it, or says why not.
    """
    if can(storage).read_range is not None or file.ranges is not None or is_staged(memory):
        return None
    buffer = byte_buffer(memory)
    end = byte + buffer.nbytes
    blocks = range(0) if file.hashes is None else run_blocks(byte, end, file.length, verify)
    # Of blocks that are to be checked and that the run begins or ends in, the rest comes along, into memory of its own.
    before = max(byte - blocks.start * BLOCK_BYTES, 0) if blocks else 0
    after = max(min(blocks.stop * BLOCK_BYTES, file.length) - end, 0) if blocks else 0
    beside = memoryview(np.empty(before + after, dtype=np.uint8))
    buffers = [part for part in (beside[:before], buffer, beside[before:]) if part.nbytes]
    try:
        with storage.open(file.name) as reader:
            if reader.length != file.length:
                return None
            reader.read_into(byte - before, buffers)
    except StorageError:
        return None
    if blocks:
        hasher, at = BlockHasher(file.length), byte - before
        for part in buffers:
            hasher.update(part, at)
            at += part.nbytes
        if file.hashes is None or any(hasher.hashes[block] != int(file.hashes[block]) for block in blocks):
            return None
    units = -(-end // BLOCK_BYTES) - byte // BLOCK_BYTES
    return _report(buffer.nbytes, len(blocks), units - len(blocks))


@lru_cache(maxsize=64)
def _report(bytes_read: int, blocks_checked: int, blocks_unchecked: int) -> ReadReport:
    return ReadReport(bytes_read, blocks_checked, blocks_unchecked, 1)


def _views(plan: LoadPlan, memories: Sequence[torch.Tensor], is_on_device: Flags) -> list[Buffer]:
    """Return the bytes of each memory of the host that is a target, none for the others."""
    # Most targets of a plan may be none of its: it may be a small part of a larger one.
    is_target = np.zeros(len(memories), dtype=np.bool_)
    is_target[plan.runs.target] = is_target[plan.strided.target] = True
    is_target &= ~is_on_device
    return [
        byte_buffer(memory) if each else memoryview(b"")
        for memory, each in zip(memories, is_target.tolist(), strict=True)
    ]


def _read(
    transport: RequestTransport,
    checks: Mapping[int, Checks],
    sums: Mapping[int, Sums],
    progress: Callable[[int], None],
    requests: Sequence[Request],
    views: Sequence[Buffer],
) -> int:
    """Carry out requests, add their checksums to the files', and return how many bytes were delivered."""
    waiting, lock = deque(requests), Lock()

    def work() -> int:
        total = 0
        with closing(transport.arrivals(waiting)) as arrivals:
            for request, source in arrivals:
                size, own_sums = _deliver(request, source, checks[request.file], views)
                with lock:
                    file_sums = sums[request.file]
                    for number, each in own_sums.items():
                        # Of a block that came twice, bytes of either may have been delivered: if they differ, fail.
                        file_sums[number] = each if file_sums.get(number, each) == each else -1
                    progress(size)
                total += size
        return total

    threads = min(transport.threads, len(requests))
    return sum(run_workers(work, threads, stop=waiting.clear)) if threads > 1 else work()


def _deliver(request: Request, source: RequestSource, check: Checks, views: Sequence[Buffer]) -> tuple[int, Sums]:
    """Put a request's bytes where they belong, and return how many these are, and the checksums found."""
    hasher, runs, pieces = check.hasher(), request.runs, request.pieces
    for byte, buffers in _steps(runs, views, limits.WINDOW_BYTES if hasher is None else limits.STEP_BYTES):
        source.read_into(byte, buffers)
        if hasher is not None:
            for buffer in buffers:
                hasher.update(buffer, byte)
                byte += buffer.nbytes
    total = int(runs.length[runs.target >= 0].sum())
    for rows, begin, end in wide_reads(request.low, request.high):
        data = source.view(begin, end)
        if hasher is not None and check.looks_at(begin, end):
            hasher.update(data, begin)
        for row in rows:
            total += copy_piece(data, begin, pieces, row, views[int(pieces.target[row])])
    return total, {} if hasher is None else hasher.hashes


def _steps(runs: Runs, views: Sequence[Buffer], size: int) -> Iterator[tuple[int, list[Buffer]]]:
    """Yield (byte, buffers): byte ranges of a file that end at multiples of a size, and the buffers to fill."""
    begin, end, buffers = 0, 0, list[Buffer]()
    # Of what is only hashed: where it lies in a step tells it apart from what else does.
    room = byte_buffer(host_memory.lend(size)) if (runs.target < 0).any() else memoryview(b"")
    rows = zip(runs.byte.tolist(), runs.target.tolist(), runs.target_byte.tolist(), runs.length.tolist(), strict=True)
    for byte, target, at, length in rows:
        if byte != end:
            if buffers:
                yield begin, buffers
            begin, end, buffers = byte, byte, []
        view = room if target < 0 else views[target]
        while length:
            part = min(length, size - end % size)
            at = end % size if target < 0 else at
            buffers.append(view[at : at + part])
            at, end, length = at + part, end + part, length - part
            if end % size == 0:
                yield begin, buffers
                begin, buffers = end, []
    if buffers:
        yield begin, buffers


# What was found


def _wrong(check: Checks, sums: Sums) -> list[tuple[int, int]]:
    """Return begin and end of the blocks or byte ranges of a file whose checksum differs."""
    hashes, ranges = check.file.hashes, check.file.ranges
    if ranges is not None:
        places = [(int(ranges.begin[each]), int(ranges.end[each]), int(ranges.crc32[each])) for each in check.ranges]
        return [(begin, end) for begin, end, crc32 in places if range_crc32(sums, begin, end) != crc32]
    return [
        (number * BLOCK_BYTES, min(check.file.length, (number + 1) * BLOCK_BYTES))
        for number, each in sorted(sums.items())
        if hashes is not None and each != int(hashes[number])
    ]


def _without(sums: Sums, check: Checks, spans: Sequence[tuple[int, int]]) -> Sums:
    """Return checksums without those of some spans."""
    unit = BLOCK_BYTES if check.file.ranges is None else 1
    return {at: each for at, each in sums.items() if not any(begin <= at * unit < end for begin, end in spans)}
