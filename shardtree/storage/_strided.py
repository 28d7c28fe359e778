"""Copies boxes that lie in small pieces out of mapped stretches of a file: faster than a read for each piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..geometry import Column
from ..plans import Strided
from ._blocks import BlockHasher
from ._storage import Buffer, Reader

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PAIR = 16
"""Items of this size are copied as two: files may have them at any byte, and torch reads complex128 at aligned ones."""


def copy_strided(
    reader: Reader,
    strided: Strided,
    memories: Sequence[torch.Tensor],
    *,
    hashes: dict[int, int] | None,
    progress: Callable[[int], None],
) -> int:
    """Copy a file's strided pieces, and return how many bytes these were.

    Args:
        reader: of the file; only the stretches that the pieces lie in are mapped.
        strided: all of that file.
        memories: for each requested shard its bytes, uint8 (bytes,).
        hashes: gets the hash of each block that a contiguous piece holds whole, by number; None to hash nothing.
        progress: is told how many bytes were copied since the last time.
    """
    total = 0
    hasher = None if hashes is None else BlockHasher(reader.length)
    for rows, begin, end in strided_stretches(strided):
        mapped = reader.mapped(begin, end)
        for row in rows.tolist():
            size = _copy_piece(mapped, begin, strided, row, memories, hasher)
            total += size
            progress(size)
    if hashes is not None and hasher is not None:
        hashes.update(hasher.hashes)
    return total


def strided_stretches(strided: Strided) -> Iterator[tuple[Column, int, int]]:
    """Yield (rows, begin, end): pieces that overlap in the file, and the bytes that they lie in."""
    order = np.argsort(strided.byte, kind="stable")
    begin, end = strided.byte[order], np.maximum.accumulate(last_byte(strided)[order])
    for rows in np.split(np.arange(order.size), np.flatnonzero(begin[1:] >= end[:-1]) + 1):
        yield order[rows], int(begin[rows[0]]), int(end[rows[-1]])


def _copy_piece(
    mapped: Buffer,
    begin: int,
    strided: Strided,
    row: int,
    memories: Sequence[torch.Tensor],
    hasher: BlockHasher | None,
) -> int:
    """Copy one piece out of the stretch that begins at `begin`, and return how many bytes it has."""
    shape, stride, target_stride, size = _items_of(strided, row)
    byte, target_byte = int(strided.byte[row]), int(strided.target_byte[row])
    carrier = _CARRIERS[size]
    stored = torch.frombuffer(mapped, dtype=carrier, count=_items(shape, stride), offset=byte - begin)
    memory = memories[int(strided.target[row])][target_byte:]
    target = memory[: memory.numel() // size * size].view(carrier)
    piece = stored.as_strided(shape, stride)
    if hasher is not None and piece.is_contiguous():
        hasher.update(mapped[byte - begin : byte - begin + piece.numel() * size], byte)
    target.as_strided(shape, target_stride).copy_(piece)
    return piece.numel() * size


def _items_of(strided: Strided, row: int) -> tuple[list[int], list[int], list[int], int]:
    """Return a piece's shape, its strides in the file and in the target, and the size of what these count."""
    shape, stride, target_stride = (
        column[row].tolist() for column in (strided.shape, strided.stride, strided.target_stride)
    )
    size = int(strided.item_size[row])
    if size != _PAIR:
        return shape, stride, target_stride, size
    doubled, target_doubled = ([2 * step for step in steps] for steps in (stride, target_stride))
    return [*shape, 2], [*doubled, 1], [*target_doubled, 1], size // 2


def _items(shape: list[int], stride: list[int]) -> int:
    """Return how many elements lie from a piece's first to its last one."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def last_byte(strided: Strided) -> Column:
    """Return one past the last byte of each piece in its file."""
    items: Column = ((strided.shape - 1) * strided.stride).sum(axis=1) + 1
    return strided.byte + items * strided.item_size
