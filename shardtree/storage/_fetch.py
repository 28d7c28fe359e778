"""Runs a load plan: bytes go from files straight into the targets' memory, and their block hashes are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from ..errors import CorruptCheckpoint, explain
from ..geometry import Column
from ..plans import LoadPlan, Runs, Strided
from ._blocks import BLOCK_BYTES, BlockHasher, Hashes
from ._storage import Buffer, Reader, Storage

Verify = Literal["whole", "all"] | None
"""Which blocks are checked: those that are read whole, all that are touched, none."""

Rows = TypeVar("Rows", Runs, Strided)

_STEP_BYTES = 1024 * 1024
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True, eq=False)
class StoredFile:
    """A file of a checkpoint, as the index describes it.

    Attributes:
        name: in the checkpoint's storage.
        length: in bytes.
        hashes: of its blocks, uint64 (blocks,); None where the format has none.
    """

    name: str
    length: int
    hashes: Hashes | None = None


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a load read.

    Attributes:
        bytes_read: of tensors and objects.
        blocks_checked: blocks whose hash was compared.
        blocks_unchecked: blocks that were read in part, or not to be checked.
        files: files opened.
    """

    bytes_read: int = 0
    blocks_checked: int = 0
    blocks_unchecked: int = 0
    files: int = 0

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
        memories: for each requested shard its bytes, uint8 (bytes,), written in place.
        verify: which blocks are checked against their hashes.
        progress: is told, now and then, how many bytes were read since the last time.

    Raises:
        CorruptCheckpoint: a file's length or a block's hash isn't what the index says.
        StorageError: a file can't be read.
    """
    report = ReadReport()
    views = [memoryview(memory.numpy()) for memory in memories]
    for number in np.union1d(plan.runs.file, plan.strided.file).tolist():
        file = files[number]
        runs, strided = _of_file(plan.runs, number), _of_file(plan.strided, number)
        with storage.open(file.name) as reader:
            if reader.length != file.length:
                raise CorruptCheckpoint(
                    explain(
                        f"load: {storage.where(file.name)!r} has the wrong length",
                        found=f"{reader.length} bytes",
                        expected=f"{file.length} bytes",
                        fix="The file was cut or replaced after it was saved; load another checkpoint.",
                    )
                )
            report += _fetch_file(reader, storage.where(file.name), file, runs, strided, views, memories, verify, progress)
    return report


def _fetch_file(
    reader: Reader,
    path: str,
    file: StoredFile,
    runs: Runs,
    strided: Strided,
    views: Sequence[Buffer],
    memories: Sequence[torch.Tensor],
    verify: Verify,
    progress: Callable[[int], None],
) -> ReadReport:
    hashes = file.hashes if verify is not None else None
    hasher = BlockHasher(file.length) if hashes is not None else None
    touched = np.zeros(-(-file.length // BLOCK_BYTES), dtype=np.bool_)
    done = _read_runs(reader, runs, views, hasher, progress)
    _touch(touched, runs.byte, runs.byte + runs.length)
    if strided.file.size:
        done += _copy_strided(reader.mapped(), strided, memories, hasher, progress)
        _touch(touched, strided.byte, _last_byte(strided))
    if hasher is not None and verify == "all":
        _read_rest(reader, file.length, touched, hasher)
    if hasher is not None and hashes is not None:
        _compare(path, hasher.hashes, hashes, file.length)
    checked = len(hasher.hashes) if hasher is not None else 0
    return ReadReport(done, checked, int(touched.sum()) - checked, 1)


def _read_runs(
    reader: Reader, runs: Runs, views: Sequence[Buffer], hasher: BlockHasher | None, progress: Callable[[int], None]
) -> int:
    total = 0
    for byte, buffers in _steps(runs, views):
        reader.read_into(byte, buffers)
        size = 0
        for buffer in buffers:
            if hasher is not None:
                hasher.update(buffer, byte + size)
            size += buffer.nbytes
        total += size
        progress(size)
    return total


def _steps(runs: Runs, views: Sequence[Buffer]) -> Iterator[tuple[int, list[Buffer]]]:
    """Yield (byte, buffers): stretches of a file of about `_STEP_BYTES`, whose parts go to the buffers one after the other."""
    begin, end, buffers = 0, 0, list[Buffer]()
    rows = zip(runs.byte.tolist(), runs.target.tolist(), runs.target_byte.tolist(), runs.length.tolist(), strict=True)
    for byte, target, target_byte, length in rows:
        if buffers and (byte != end or end - begin >= _STEP_BYTES):
            yield begin, buffers
            buffers = []
        if not buffers:
            begin = end = byte
        view = views[target]
        while length:
            # Steps end at block boundaries of the file, so that a block is hashed while it is in the cache.
            part = min(length, _STEP_BYTES - end % BLOCK_BYTES)
            buffers.append(view[target_byte : target_byte + part])
            target_byte, end, length = target_byte + part, end + part, length - part
            if length:
                yield begin, buffers
                begin, buffers = end, []
    if buffers:
        yield begin, buffers


def _copy_strided(
    mapped: Buffer,
    strided: Strided,
    memories: Sequence[torch.Tensor],
    hasher: BlockHasher | None,
    progress: Callable[[int], None],
) -> int:
    total = 0
    last = _last_byte(strided)
    for row in np.argsort(strided.byte, kind="stable").tolist():
        shape, size = strided.shape[row].tolist(), int(strided.item_size[row])
        byte, end, target_byte = int(strided.byte[row]), int(last[row]), int(strided.target_byte[row])
        carrier = _CARRIERS[size]
        stored = torch.frombuffer(mapped, dtype=carrier, count=(end - byte) // size, offset=byte)
        memory = memories[int(strided.target[row])][target_byte:]
        target = memory[: memory.numel() // size * size].view(carrier)
        piece = stored.as_strided(shape, strided.stride[row].tolist())
        if hasher is not None and piece.is_contiguous():
            hasher.update(mapped[byte:end], byte)
        target.as_strided(shape, strided.target_stride[row].tolist()).copy_(piece)
        total += piece.numel() * size
        progress(piece.numel() * size)
    return total


def _read_rest(reader: Reader, length: int, touched: np.ndarray[tuple[int], np.dtype[np.bool_]], hasher: BlockHasher) -> None:
    """Read the blocks that were read in part once more, whole, for their hashes."""
    scratch = memoryview(bytearray(BLOCK_BYTES))
    for number in np.flatnonzero(touched).tolist():
        if number not in hasher.hashes:
            begin = number * BLOCK_BYTES
            block = scratch[: min(BLOCK_BYTES, length - begin)]
            reader.read_into(begin, [block])
            hasher.update(block, begin)


def _compare(path: str, found: dict[int, int], expected: Hashes, length: int) -> None:
    wrong = [number for number in sorted(found) if found[number] != int(expected[number])]
    if wrong:
        spans = (f"bytes {number * BLOCK_BYTES} to {min(length, (number + 1) * BLOCK_BYTES)}" for number in wrong)
        raise CorruptCheckpoint(
            explain(
                f"load: {path!r} isn't what was saved: the hash of {len(wrong)} of its blocks differs",
                offenders=spans,
                fix="The medium or a later program damaged it; load another checkpoint.",
            )
        )


def _last_byte(strided: Strided) -> Column:
    """Return one past the last byte of each piece in its file."""
    last = ((strided.shape - 1) * strided.stride).sum(axis=1) + 1
    return strided.byte + last * strided.item_size


def _touch(touched: np.ndarray[tuple[int], np.dtype[np.bool_]], begin: Column, end: Column) -> None:
    for first, last in zip((begin // BLOCK_BYTES).tolist(), (-(-end // BLOCK_BYTES)).tolist(), strict=True):
        touched[first:last] = True


def _of_file(rows: Rows, number: int) -> Rows:
    chosen = rows.file == number
    return type(rows)(*(getattr(rows, name)[chosen] for name in type(rows).__slots__))
