"""Copies boxes that lie in small pieces out of stretches of a file: faster than a read for each piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import torch

from ..geometry import Column
from ..plans import Strided
from ._blocks import BLOCK_BYTES, BlockHasher, Flags
from ._storage import Buffer, Reader

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PAIR = 16
"""Items of this size are copied as two: files may have them at any byte, and torch reads complex128 at aligned ones."""

_STRETCH_BYTES = 16 * BLOCK_BYTES
"""As much is read at once of what is hashed: it stays in the processor's cache until it is copied."""


def copy_strided(
    reader: Reader, strided: Strided, memories: Sequence[torch.Tensor], *, progress: Callable[[int], None]
) -> int:
    """Copy a file's strided pieces out of mapped memory, and return how many bytes these were.

    Args:
        reader: of the file; only the stretches that the pieces lie in are mapped.
        strided: all of that file.
        memories: for each requested shard its bytes, uint8 (bytes,).
        progress: is told how many bytes were copied since the last time.
    """
    total = 0
    for rows, begin, end in strided_stretches(strided):
        mapped = reader.mapped(begin, end)
        for row in rows.tolist():
            size = _copy_piece(mapped, begin, strided, row, memories)
            total += size
            progress(size)
    return total


def copy_hashed(
    reader: Reader,
    strided: Strided,
    memories: Sequence[torch.Tensor],
    hasher: BlockHasher,
    *,
    whole_blocks: bool,
    progress: Callable[[int], None],
) -> int:
    """Copy strided pieces out of memory that nobody else can change, once it was hashed; return how many bytes.

    Args:
        reader: of the file.
        strided: all of that file.
        memories: for each requested shard its bytes, uint8 (bytes,).
        hasher: of the file; is given all that is read.
        whole_blocks: whether every block that is touched is read whole.
        progress: is told how many bytes were copied since the last time.
    """
    total = 0
    pieces = parted(strided)
    scratch = memoryview(bytearray(_STRETCH_BYTES + 2 * BLOCK_BYTES))
    for rows, begin, end in hashed_stretches(pieces, reader.length, whole_blocks=whole_blocks):
        stretch = scratch[: end - begin]
        reader.read_into(begin, [stretch])
        hasher.update(stretch, begin)
        for row in rows.tolist():
            size = _copy_piece(stretch, begin, pieces, row, memories)
            total += size
            progress(size)
    return total


def strided_stretches(strided: Strided) -> Iterator[tuple[Column, int, int]]:
    """Yield (rows, begin, end): pieces that overlap in the file, and the bytes that they lie in."""
    order = np.argsort(strided.byte, kind="stable")
    begin, end = strided.byte[order], np.maximum.accumulate(last_byte(strided)[order])
    for rows in np.split(np.arange(order.size), np.flatnonzero(begin[1:] >= end[:-1]) + 1):
        yield order[rows], int(begin[rows[0]]), int(end[rows[-1]])


def hashed_stretches(pieces: Strided, length: int, *, whole_blocks: bool) -> Iterator[tuple[Column, int, int]]:
    """Yield (rows, begin, end): pieces that are copied from the same bytes, and these.

    Args:
        pieces: none of which reaches further than `_STRETCH_BYTES`.
        length: of the file, in bytes.
        whole_blocks: whether the bytes are all blocks that the pieces touch.
    """
    unit = BLOCK_BYTES if whole_blocks else 1
    order = np.argsort(pieces.byte, kind="stable")
    begin = pieces.byte[order] // unit * unit
    end = np.minimum(-(-last_byte(pieces)[order] // unit) * unit, length)
    first, reached = 0, 0
    for number, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        if number and (low > reached or max(high, reached) - begin[first] > _STRETCH_BYTES + (unit > 1) * 2 * unit):
            yield order[first:number], int(begin[first]), reached
            first, reached = number, 0
        reached = max(high, reached)
    if order.size:
        yield order[first:], int(begin[first]), reached


def parted(strided: Strided) -> Strided:
    """Return pieces cut along their first axes, so that none reaches further than `_STRETCH_BYTES` in the file."""
    if not (last_byte(strided) - strided.byte > _STRETCH_BYTES).any():
        return strided
    parts = [_parted(strided, row) for row in range(strided.file.size)]
    return Strided(*(np.concatenate([getattr(part, name) for part in parts]) for name in Strided.__slots__))


def _parted(strided: Strided, row: int) -> Strided:
    """Return the parts of one piece."""
    piece = Strided(*(getattr(strided, name)[row : row + 1] for name in Strided.__slots__))
    for axis in range(piece.shape.shape[1]):
        if piece.shape[0, axis] == 1:
            continue
        step = int(piece.stride[0, axis] * piece.item_size[0])
        inner = int((last_byte(piece) - piece.byte)[0]) - (int(piece.shape[0, axis]) - 1) * step
        most = 1 if inner > _STRETCH_BYTES else (_STRETCH_BYTES - inner) // step + 1
        piece = cut(piece, axis, most)
        if inner <= _STRETCH_BYTES:
            break
    return piece


def cut(pieces: Strided, axis: int, most: int) -> Strided:
    """Return pieces of the same shape cut into parts of at most so many along an axis."""
    size, count = int(pieces.shape[0, axis]), pieces.file.size
    start = np.arange(0, size, most)
    each = {name: np.repeat(getattr(pieces, name), start.size, axis=0) for name in Strided.__slots__}
    start = np.tile(start, count)
    each["shape"][:, axis] = np.minimum(most, size - start)
    each["byte"] = each["byte"] + start * each["stride"][:, axis] * each["item_size"]
    each["target_byte"] = each["target_byte"] + start * each["target_stride"][:, axis] * each["item_size"]
    return Strided(**each)


def is_contiguous(strided: Strided) -> Flags:
    """Return which pieces have all bytes of the file from their first to their last, bool (pieces,)."""
    flags: Flags = strided.shape.prod(axis=1) * strided.item_size == last_byte(strided) - strided.byte
    return flags


def _copy_piece(stored: Buffer, begin: int, strided: Strided, row: int, memories: Sequence[torch.Tensor]) -> int:
    """Copy one piece out of the stretch that begins at `begin`, and return how many bytes it has."""
    shape, stride, target_stride, size = _items_of(strided, row)
    byte, target_byte = int(strided.byte[row]), int(strided.target_byte[row])
    items = torch.frombuffer(stored, dtype=_CARRIERS[size], count=_items(shape, stride), offset=byte - begin)
    piece = items.as_strided(shape, stride)
    _box(memories[int(strided.target[row])][target_byte:], size, shape, target_stride).copy_(piece)
    return piece.numel() * size


def piece_in(memory: torch.Tensor, strided: Strided, row: int) -> torch.Tensor:
    """Return a piece in the memory of its target, as integers."""
    shape, _, target_stride, size = _items_of(strided, row)
    return _box(memory[int(strided.target_byte[row]) :], size, shape, target_stride)


def row_major_piece_in(memory: torch.Tensor, strided: Strided, row: int) -> torch.Tensor:
    """Return a piece in memory that begins with it as a row-major box, as integers."""
    shape, _, _, size = _items_of(strided, row)
    return memory[: prod(shape) * size].view(_CARRIERS[size]).view(shape)


def _box(memory: torch.Tensor, size: int, shape: list[int], stride: list[int]) -> torch.Tensor:
    return memory[: memory.numel() // size * size].view(_CARRIERS[size]).as_strided(shape, stride)


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
