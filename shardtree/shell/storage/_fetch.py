"""Execution of load plans: several threads read bytes into the targets' memory, and hash and check them."""

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
"""Checksums computed for a file. Blocks that were read whole: number → hash, -1 if two reads differed. Parts of byte
ranges: first byte → (one past the last byte, CRC32)."""


def fetch(
    storage: Storage,
    files: Mapping[int, StoredFile],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
    *,
    verify: Verify = "whole",
    progress: Callable[[int], None] = lambda _: None,
) -> ReadReport:
    """Execute a load plan, and return a report of the bytes read and checked.

    Args:
        storage: Storage of the files.
        files: Files by their number in the plan.
        plan: Reads to execute.
        memories: Contiguous tensors of any dtype, one for each requested shard, filled in place. Those on an
            accelerator are filled through host memory.
        verify: Choice of the blocks to check: "whole", "all" or None, as `Verify` explains.
        progress: Function that is called with the number of bytes read since its last call, by one thread at a time.

    Raises:
        CorruptCheckpoint: a file's length or a block's hash differs from the index.
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
    """Execute a load plan on files whose content is in memory, and return a report of the bytes copied.

    Args:
        contents: Bytes of each file, by its number in the plan.
        plan: Reads to execute, as copies.
        memories: Contiguous tensors, one for each requested shard, filled in place; see `fetch`.
        progress: Function that is called with the number of bytes copied since its last call.

    Raises:
        StorageError: a file has fewer bytes than the plan reads.

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
            item for item in requests if any(begin < item.end and item.begin < end for begin, end in wrong[item.file])
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
    """Fill memory with consecutive bytes of a file by a single read, and check the blocks that `fetch` would check.

    Returns:
        A report; None if a single read isn't enough or anything is wrong. Then `fetch` must read, or raise the error.
    """
    if can(storage).read_range is not None or file.ranges is not None or is_staged(memory):
        return None
    buffer = byte_buffer(memory)
    end = byte + buffer.nbytes
    blocks = range(0) if file.hashes is None else run_blocks(byte, end, file.length, verify)
    # If the run begins or ends inside a block that is checked, the block's other bytes are read too, into `beside`.
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
    """Return a byte view of each target; it is empty if the target is on a device or the plan doesn't fill it."""
    # The plan may be a small part of a larger one, so that it fills few of the memories.
    is_target = np.zeros(len(memories), dtype=np.bool_)
    is_target[plan.runs.target] = is_target[plan.strided.target] = True
    is_target &= ~is_on_device
    return [
        byte_buffer(memory) if is_filled else memoryview(b"")
        for memory, is_filled in zip(memories, is_target.tolist(), strict=True)
    ]


def _read(
    transport: RequestTransport,
    checks: Mapping[int, Checks],
    sums: Mapping[int, Sums],
    progress: Callable[[int], None],
    requests: Sequence[Request],
    views: Sequence[Buffer],
) -> int:
    """Execute requests, add the checksums of their bytes to `sums`, and return the number of bytes put into targets.

    Keys of `checks` and `sums` are the numbers of the files in the plan.
    """
    waiting, lock = deque(requests), Lock()

    def work() -> int:
        total = 0
        with closing(transport.arrivals(waiting)) as arrivals:
            for request, source in arrivals:
                size, new_sums = _deliver(request, source, checks[request.file], views)
                with lock:
                    file_sums = sums[request.file]
                    for number, value in new_sums.items():
                        # Either of two reads of a block may have filled a target: if they differ, the check must fail.
                        file_sums[number] = value if file_sums.get(number, value) == value else -1
                    progress(size)
                total += size
        return total

    threads = min(transport.threads, len(requests))
    return sum(run_workers(work, threads, stop=waiting.clear)) if threads > 1 else work()


def _deliver(request: Request, source: RequestSource, check: Checks, views: Sequence[Buffer]) -> tuple[int, Sums]:
    """Deliver a request's bytes to their targets, and return their number and their checksums."""
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
    """Yield (offset, buffers) for each read that the runs need; reads end at multiples of `size` in the file."""
    begin, end, buffers = 0, 0, list[Buffer]()
    # Scratch memory for bytes that are only hashed; their offset within a step keeps them from overlapping.
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


# Results of the checks.


def _wrong(check: Checks, sums: Sums) -> list[tuple[int, int]]:
    """Return (first byte, one past the last) of each block or byte range whose checksum differs from the stored one."""
    hashes, ranges = check.file.hashes, check.file.ranges
    if ranges is not None:
        places = [(int(ranges.begin[row]), int(ranges.end[row]), int(ranges.crc32[row])) for row in check.ranges]
        return [(begin, end) for begin, end, crc32 in places if range_crc32(sums, begin, end) != crc32]
    return [
        (number * BLOCK_BYTES, min(check.file.length, (number + 1) * BLOCK_BYTES))
        for number, value in sorted(sums.items())
        if hashes is not None and value != int(hashes[number])
    ]


def _without(sums: Sums, check: Checks, spans: Sequence[tuple[int, int]]) -> Sums:
    """Return a file's checksums without those for the given spans of the file.

    `Sums` has a checksum for each block, or for each part of a byte range. It is dropped if that block or part begins
    in one of the spans.
    """
    unit = BLOCK_BYTES if check.file.ranges is None else 1
    return {at: value for at, value in sums.items() if not any(begin <= at * unit < end for begin, end in spans)}
