"""Runs a load plan: reads bytes from files straight into the targets' memory, and checks their block hashes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch

from ..codec import bit_view, byte_buffer
from ..errors import CorruptCheckpoint, error_text
from ..geometry import Column
from ..plans import LoadPlan, Runs, Strided
from ._blocks import BLOCK_BYTES, BlockHasher, Flags, Hashes, incomplete_reads, missing, reread_blocks, touched
from ._runs import read_runs
from ._staged_fetch import any_staged, fetch_to_devices, memory_bytes
from ._storage import Buffer, Reader, Storage
from ._stretches import Stretches, StretchHasher, read_crc32, stretch_crc32, unread
from ._strided import copy_hashed, copy_strided, is_contiguous, last_byte
from ._threads import collector_paused

Verify = Literal["whole", "all"] | None
"""Which blocks are checked: "whole": those that are read nearly whole, and in small files all that are touched; "all":
all that are touched; None: none."""

# Checking only the blocks that happen to be read whole would check nothing in a file that is smaller than a block: a
# flipped bit there was loaded in silence, and so were files of one length that had changed places. In large files it
# left out the first block, which begins with a header that no load reads, and the ends of tensors. These blocks are
# few.
_SMALL_FILE_BYTES = 4 * 1024 * 1024
_NEARLY_WHOLE_BYTES = 64 * 1024
"""A block of which no more than this is missing is read again, whole, and delivered from there."""

Rows = TypeVar("Rows", Runs, Strided)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class StoredFile:
    """A file of a checkpoint, as the index describes it.

    Attributes:
        name: in the checkpoint's storage.
        length: in bytes.
        hashes: of its blocks, uint64 (blocks,); None where the format has none.
        stretches: of which the format has CRC32s, in place of block hashes; each run and piece lies within one.
    """

    name: str
    length: int
    hashes: Hashes | None = None
    stretches: Stretches | None = None


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a load has read.

    Attributes:
        bytes_read: of tensors and objects.
        blocks_checked: blocks whose hash was compared, or stretches whose checksum was.
        blocks_unchecked: those that were read only in part, weren't to be checked, or have no hash.
        files: files opened.
        left_out: paths of stored plain values that couldn't be put into the tree, since the target omits shards beside
            them.
    """

    bytes_read: int = 0
    blocks_checked: int = 0
    blocks_unchecked: int = 0
    files: int = 0
    left_out: tuple[str, ...] = ()

    def __add__(self, other: ReadReport) -> ReadReport:
        return ReadReport(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


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
        bits = _target_views(strided.target, memories, bit_view, torch.empty(0, dtype=torch.uint8))
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
    if file.stretches is not None:
        read = partial(_fetch_stretches, storage, file, file.stretches, runs, strided, views=views, memories=memories)
        return read(verify=verify, progress=progress)
    known = file.hashes if verify is not None else None
    hashes: dict[int, int] | None = None if known is None else {}
    with storage.open(file.name) as reader:
        _check_length(reader, file, storage.where(file.name))
        done = read_runs(storage, file.name, runs, views, hashes=hashes, length=file.length, progress=progress)
        blocks = touched_blocks(file, runs, strided)
        hasher = BlockHasher(file.length, hashes)
        for pieces, whole_blocks in read_modes(file, strided, verify):
            if whole_blocks is None:
                done += copy_strided(reader, pieces, memories, progress=progress)
            else:
                done += copy_hashed(reader, pieces, memories, hasher, whole_blocks=whole_blocks, progress=progress)
        if hashes is not None:
            incomplete = incomplete_reads(runs, file.length, blocks_to_check(file, blocks, runs, verify))
            reread_blocks(reader, incomplete, views, hasher)
    if known is not None and hashes is not None:
        _check_block_hashes(storage.where(file.name), hashes, known, file.length)
    checked = len(hashes or ())
    return ReadReport(done, checked, int(blocks.sum()) - checked, 1)


def _fetch_stretches(
    storage: Storage,
    file: StoredFile,
    stretches: Stretches,
    runs: Runs,
    strided: Strided,
    *,
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    """Read a file that has CRC32s of stretches, and check those of the stretches that are read from."""
    parts: dict[int, tuple[int, int]] | None = None if verify is None else {}
    hasher = partial(_stretch_hasher, stretches)
    with storage.open(file.name) as reader:
        _check_length(reader, file, storage.where(file.name))
        done = read_runs(
            storage, file.name, runs, views, hashes=parts, length=file.length, progress=progress, hasher=hasher
        )
        if strided.file.size:
            done += copy_strided(reader, strided, memories, progress=progress)
        checked = 0
        if parts is not None:
            chosen = stretches_to_check(stretches, runs, everything=verify == "all")
            checked = _check_crc32(reader, storage.where(file.name), stretches, chosen, parts)
    return ReadReport(done, checked, stretches.begin.size - checked, 1)


def _stretch_hasher(stretches: Stretches, _: int) -> StretchHasher:
    return StretchHasher(stretches)


def stretches_to_check(stretches: Stretches, runs: Runs, *, everything: bool) -> list[int]:
    """Return those stretches with a CRC32 that are read nearly whole or are small; with `everything`, all of them."""
    enough = stretches.end - stretches.begin <= BLOCK_BYTES
    if runs.byte.size:
        enough = enough | (unread(stretches, runs.byte, runs.byte + runs.length) <= _NEARLY_WHOLE_BYTES)
    chosen: list[int] = np.flatnonzero((stretches.crc32 != 0) & (everything | enough)).tolist()
    return chosen


def _check_crc32(
    reader: Reader, path: str, stretches: Stretches, chosen: Sequence[int], parts: dict[int, tuple[int, int]]
) -> int:
    """Raise unless the chosen stretches have their CRC32s, and return how many were compared."""
    wrong = []
    for number in chosen:
        begin, end = int(stretches.begin[number]), int(stretches.end[number])
        found = stretch_crc32(parts, begin, end)
        if (read_crc32(reader, begin, end) if found is None else found) != stretches.crc32[number]:
            wrong.append(f"bytes {begin} to {end}")
    if wrong:
        raise _damaged(path, f"the checksum of {len(wrong)} of its tensors differs", wrong)
    return len(chosen)


def _check_length(reader: Reader, file: StoredFile, path: str) -> None:
    if reader.length != file.length:
        raise CorruptCheckpoint(
            error_text(
                f"load: {path!r} has the wrong length",
                found=f"{reader.length} bytes",
                expected=f"{file.length} bytes",
                fix="The file was cut or replaced after it was saved; load another checkpoint.",
            )
        )


def touched_blocks(file: StoredFile, runs: Runs, strided: Strided) -> Flags:
    """Return which blocks of a file a plan's rows of it touch, bool (blocks,)."""
    by_runs = touched(runs.byte, runs.byte + runs.length, file.length, BLOCK_BYTES)
    return by_runs | touched(strided.byte, last_byte(strided), file.length, BLOCK_BYTES)


def blocks_to_check(file: StoredFile, blocks: Flags, runs: Runs, verify: Verify) -> Flags:
    """Return which of the touched blocks of a file are to be checked, bool (blocks,)."""
    if _checks_all(file, verify):
        return blocks
    flags: Flags = missing(runs.byte, runs.byte + runs.length, file.length) <= _NEARLY_WHOLE_BYTES
    return blocks & flags


def _checks_all(file: StoredFile, verify: Verify) -> bool:
    return verify == "all" or file.length <= _SMALL_FILE_BYTES


def read_modes(file: StoredFile, strided: Strided, verify: Verify) -> Iterator[tuple[Strided, bool | None]]:
    """Yield a file's strided pieces by how they are read: mapped (None), hashed (False), hashed in whole blocks (True).

    Pieces that are to be hashed aren't mapped: another program could change a mapped file between hash and copy.
    """
    if verify is None or file.hashes is None:
        parts: list[tuple[Flags, bool | None]] = [(np.ones(strided.file.size, dtype=np.bool_), None)]
    elif _checks_all(file, verify):
        parts = [(np.ones(strided.file.size, dtype=np.bool_), True)]
    else:
        parts = [(is_contiguous(strided), False), (~is_contiguous(strided), None)]
    for flags, whole_blocks in parts:
        if flags.any():
            yield Strided(*(getattr(strided, name)[flags] for name in Strided.__slots__)), whole_blocks


def _check_block_hashes(path: str, found: dict[int, int], expected: Hashes, length: int) -> None:
    wrong = [number for number in sorted(found) if found[number] != int(expected[number])]
    if wrong:
        spans = (f"bytes {number * BLOCK_BYTES} to {min(length, (number + 1) * BLOCK_BYTES)}" for number in wrong)
        raise _damaged(path, f"the hash of {len(wrong)} of its blocks differs", spans)


def _damaged(path: str, what: str, spans: Iterable[str]) -> CorruptCheckpoint:
    fix = "The medium or a later program damaged it; load another checkpoint."
    return CorruptCheckpoint(error_text(f"load: {path!r} isn't what was saved: {what}", offenders=spans, fix=fix))


def in_file_order(strided: Strided) -> Strided:
    """Return pieces sorted by file."""
    order = np.argsort(strided.file, kind="stable")
    return Strided(*(getattr(strided, name)[order] for name in Strided.__slots__))


def of_file(rows: Rows, number: int) -> Rows:
    """Return the rows of one file, of rows that are sorted by file."""
    first, last = np.searchsorted(rows.file, [number, number + 1]).tolist()
    return type(rows)(*(getattr(rows, name)[first:last] for name in type(rows).__slots__))
