"""Runs a load plan: reads bytes from files straight into the targets' memory, and checks their block hashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch

from .._collector import collector_paused
from ..codec import bit_view, byte_buffer
from ..errors import StorageError
from ..geometry import Column
from ..plans import LoadPlan, Runs, Strided
from ._blocks import BLOCK_BYTES, BlockHasher, Hashes, block_hash, incomplete_reads, reread_blocks
from ._buffers import any_staged, is_staged
from ._byte_ranges import ByteRanges, RangeHasher, range_crc32, read_crc32
from ._capabilities import can
from ._checked import (
    ReadReport,
    StoredFile,
    Verify,
    blocks_to_check,
    damaged,
    in_file_order,
    of_file,
    ranges_to_check,
    read_modes,
    run_blocks,
    touched_blocks,
    wrong_length,
)
from ._ranged_fetch import fetch_ranged
from ._runs import read_runs
from ._staged_fetch import fetch_to_devices, memory_bytes
from ._storage import Buffer, Reader, Storage
from ._strided import copy_hashed, copy_strided

T = TypeVar("T")


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
    read = partial(_fetch_to_host, storage, files, verify=verify, progress=progress)
    if not any_staged(memories):
        return read(plan, memories)
    report = sum(fetch_to_devices(read, plan, [memory_bytes(memory) for memory in memories]), ReadReport())
    return replace(report, files=np.union1d(plan.runs.file, plan.strided.file).size)


def fetch_run(
    storage: Storage, file: StoredFile, byte: int, memory: torch.Tensor, *, verify: Verify
) -> ReadReport | None:
    """Fill memory with consecutive bytes of a file by one read; the blocks that `fetch` would check are.

    Returns:
        How much was read; None where that takes more, or anything is wrong: `fetch` then does it, or says why not.
    """
    if can(storage).read_range is not None or file.ranges is not None or is_staged(memory):
        return None
    buffer = byte_buffer(memory)
    end = byte + buffer.nbytes
    checked = run_blocks(file, byte, end, verify)
    if checked and (byte > checked.start * BLOCK_BYTES or end < min(checked.stop * BLOCK_BYTES, file.length)):
        return None  # a block is to be read whole, of which the run is a part
    try:
        with storage.open(file.name) as reader:
            if reader.length != file.length:
                return None
            reader.read_into(byte, [buffer])
    except StorageError:
        return None
    for block in checked:
        low = block * BLOCK_BYTES - byte
        if file.hashes is None or block_hash(buffer[low : low + BLOCK_BYTES]) != int(file.hashes[block]):
            return None
    touched = -(-end // BLOCK_BYTES) - byte // BLOCK_BYTES
    return _report(buffer.nbytes, len(checked), touched - len(checked))


@lru_cache(maxsize=64)
def _report(bytes_read: int, checked: int, unchecked: int) -> ReadReport:
    return ReadReport(bytes_read, checked, unchecked, 1)


def _fetch_to_host(
    storage: Storage,
    files: Mapping[int, StoredFile],
    plan: LoadPlan,
    memories: Sequence[torch.Tensor],
    *,
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    runs, strided = plan.runs, in_file_order(plan.strided)
    # Only targets that are read into get a view: most have either runs or strided pieces, and the plan may be a small
    # part of a larger one.
    with collector_paused():
        views = _target_views(runs.target, memories, byte_buffer, memoryview(b""))
        bits = _target_views(strided.target, memories, bit_view, torch.empty(0, dtype=torch.uint8, device="cpu"))
    if (read_range := can(storage).read_range) is not None:
        return fetch_ranged(storage, read_range, files, plan, views, bits, verify=verify, progress=progress)
    read = partial(_fetch_file, storage, views=views, memories=bits, verify=verify, progress=progress)
    numbers = np.union1d(runs.file, strided.file).tolist()
    reports = (read(files[number], of_file(runs, number), of_file(strided, number)) for number in numbers)
    return sum(reports, ReadReport())


def _target_views(
    target: Column, memories: Sequence[torch.Tensor], view: Callable[[torch.Tensor], T], none: T
) -> list[T]:
    """Return a view of each memory that is a target, and `none` for the others."""
    wanted = np.zeros(len(memories), dtype=np.bool_)
    wanted[target] = True
    return [view(memory) if named else none for memory, named in zip(memories, wanted.tolist(), strict=True)]


def _fetch_file(
    storage: Storage,
    file: StoredFile,
    runs: Runs,
    strided: Strided,
    *,
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    if file.ranges is not None:
        read = partial(_fetch_byte_ranges, storage, file, file.ranges, runs, strided, views=views, memories=memories)
        return read(verify=verify, progress=progress)
    known = file.hashes if verify is not None else None
    hashes: dict[int, int] | None = None if known is None else {}
    with storage.open(file.name) as reader:
        if reader.length != file.length:
            raise wrong_length(file, reader.length, storage.where(file.name))
        done = read_runs(storage, file.name, runs, views, hashes=hashes, length=file.length, progress=progress)
        blocks = touched_blocks(file, runs, strided)
        hasher = BlockHasher(file.length, hashes)
        for pieces, whole_blocks in read_modes(file, strided, verify):
            if whole_blocks is None:
                done += copy_strided(storage, file.name, pieces, memories, length=file.length, progress=progress)
            else:
                done += copy_hashed(reader, pieces, memories, hasher, whole_blocks=whole_blocks, progress=progress)
        if hashes is not None:
            incomplete = incomplete_reads(runs, file.length, blocks_to_check(file, blocks, runs, verify))
            reread_blocks(reader, incomplete, views, hasher)
    if known is not None and hashes is not None:
        _check_block_hashes(storage.where(file.name), hashes, known, file.length)
    checked = len(hashes or ())
    return ReadReport(done, checked, int(blocks.sum()) - checked, 1)


def _fetch_byte_ranges(
    storage: Storage,
    file: StoredFile,
    ranges: ByteRanges,
    runs: Runs,
    strided: Strided,
    *,
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    """Read a file that has CRC32s of byte ranges, and check those of the ranges that are read from."""
    parts: dict[int, tuple[int, int]] | None = None if verify is None else {}
    hasher = partial(_range_hasher, ranges)
    with storage.open(file.name) as reader:
        if reader.length != file.length:
            raise wrong_length(file, reader.length, storage.where(file.name))
        done = read_runs(
            storage, file.name, runs, views, hashes=parts, length=file.length, progress=progress, hasher=hasher
        )
        if strided.file.size:
            done += copy_strided(storage, file.name, strided, memories, length=file.length, progress=progress)
        checked = 0
        if parts is not None:
            chosen = ranges_to_check(ranges, runs, everything=verify == "all")
            checked = _check_crc32(reader, storage.where(file.name), ranges, chosen, parts)
    return ReadReport(done, checked, ranges.begin.size - checked, 1)


def _range_hasher(ranges: ByteRanges, _: int) -> RangeHasher:
    return RangeHasher(ranges)


def _check_crc32(
    reader: Reader, path: str, ranges: ByteRanges, chosen: Sequence[int], parts: dict[int, tuple[int, int]]
) -> int:
    """Raise unless the chosen byte ranges have their CRC32s, and return how many were compared."""
    wrong = []
    for number in chosen:
        begin, end = int(ranges.begin[number]), int(ranges.end[number])
        found = range_crc32(parts, begin, end)
        if (read_crc32(reader, begin, end) if found is None else found) != ranges.crc32[number]:
            wrong.append(f"bytes {begin} to {end}")
    if wrong:
        raise damaged(path, f"the checksum of {len(wrong)} of its tensors differs", wrong)
    return len(chosen)


def _check_block_hashes(path: str, found: dict[int, int], expected: Hashes, length: int) -> None:
    wrong = [number for number in sorted(found) if found[number] != int(expected[number])]
    if wrong:
        spans = (f"bytes {number * BLOCK_BYTES} to {min(length, (number + 1) * BLOCK_BYTES)}" for number in wrong)
        raise damaged(path, f"the hash of {len(wrong)} of its blocks differs", spans)
