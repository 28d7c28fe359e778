"""Copies boxes that consist of many small pieces of a file: faster than a read call for each piece."""

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
"""Items of this size are copied as two of half the size: torch has no integer of 16 bytes, and reads complex128 only
at aligned addresses, while files may have it at any byte."""

_READ_BYTES = 16 * BLOCK_BYTES
"""How much is read at once if it is hashed; little enough to stay in the processor's cache until it is copied."""


def copy_strided(
    reader: Reader, strided: Strided, memories: Sequence[torch.Tensor], *, progress: Callable[[int], None]
) -> int:
    """Copy a file's strided pieces out of a mapping, and return how many bytes were copied.

    Args:
        reader: of the file; only the byte ranges that the pieces lie in are mapped.
        strided: all of that file.
        memories: for each requested shard its bytes, uint8 (bytes,).
        progress: called with the bytes copied since the last call.
    """
    # Mapped, since reads are slower here: for rows of 4 and 8 KiB of which half is wanted, a preadv with a part for
    # each row took about 1.5 times as long, and wide reads into a buffer about twice.
    total = 0
    for rows, begin, end in strided_ranges(strided):
        mapped = reader.mapped(begin, end)
        for row in rows.tolist():
            size = copy_piece(mapped, begin, strided, row, memories[int(strided.target[row])])
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
    """Read and hash strided pieces, and copy them; return how many bytes were copied.

    Args:
        reader: of the file.
        strided: all of that file.
        memories: for each requested shard its bytes, uint8 (bytes,).
        hasher: of the file; sees all bytes that are read.
        whole_blocks: whether every block that is touched is read whole.
        progress: called with the bytes copied since the last call.
    """
    # Private memory, not a mapping: what is copied must be what was hashed, even if another program writes to the file.
    total = 0
    pieces = split_pieces(strided)
    scratch = memoryview(bytearray(_READ_BYTES + 2 * BLOCK_BYTES))
    for rows, begin, end in hashed_ranges(pieces, reader.length, whole_blocks=whole_blocks):
        data = scratch[: end - begin]
        reader.read_into(begin, [data])
        hasher.update(data, begin)
        for row in rows.tolist():
            size = copy_piece(data, begin, pieces, row, memories[int(pieces.target[row])])
            total += size
            progress(size)
    return total


def strided_ranges(strided: Strided) -> Iterator[tuple[Column, int, int]]:
    """Yield (rows, begin, end): pieces that overlap in the file, and the bytes that contain them."""
    order = np.argsort(strided.byte, kind="stable")
    begin, end = strided.byte[order], np.maximum.accumulate(last_byte(strided)[order])
    for rows in np.split(np.arange(order.size), np.flatnonzero(begin[1:] >= end[:-1]) + 1):
        yield order[rows], int(begin[rows[0]]), int(end[rows[-1]])


def hashed_ranges(pieces: Strided, length: int, *, whole_blocks: bool) -> Iterator[tuple[Column, int, int]]:
    """Yield (rows, begin, end): pieces that are copied from the same bytes, and these bytes.

    Args:
        pieces: each of which spans at most `_READ_BYTES`.
        length: of the file, in bytes.
        whole_blocks: whether the bytes are extended to whole blocks.
    """
    unit = BLOCK_BYTES if whole_blocks else 1
    order = np.argsort(pieces.byte, kind="stable")
    begin = pieces.byte[order] // unit * unit
    end = np.minimum(-(-last_byte(pieces)[order] // unit) * unit, length)
    first, reached = 0, 0
    for number, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        if number and (low > reached or max(high, reached) - begin[first] > _READ_BYTES + (unit > 1) * 2 * unit):
            yield order[first:number], int(begin[first]), reached
            first, reached = number, 0
        reached = max(high, reached)
    if order.size:
        yield order[first:], int(begin[first]), reached


def split_pieces(strided: Strided) -> Strided:
    """Return pieces, cut along their first axes so that each spans at most `_READ_BYTES` of the file."""
    if not (last_byte(strided) - strided.byte > _READ_BYTES).any():
        return strided
    parts = [_split_piece(strided, row) for row in range(strided.file.size)]
    return Strided(*(np.concatenate([getattr(part, name) for part in parts]) for name in Strided.__slots__))


def _split_piece(strided: Strided, row: int) -> Strided:
    """Cut one piece."""
    piece = Strided(*(getattr(strided, name)[row : row + 1] for name in Strided.__slots__))
    for axis in range(piece.shape.shape[1]):
        if piece.shape[0, axis] == 1:
            continue
        step = int(piece.stride[0, axis] * piece.item_size[0])
        inner = int((last_byte(piece) - piece.byte)[0]) - (int(piece.shape[0, axis]) - 1) * step
        most = 1 if inner > _READ_BYTES else (_READ_BYTES - inner) // step + 1
        piece = cut(piece, axis, most)
        if inner <= _READ_BYTES:
            break
    return piece


def cut(pieces: Strided, axis: int, most: int) -> Strided:
    """Cut pieces, all of the same shape, into parts with at most `most` items along an axis."""
    size, count = int(pieces.shape[0, axis]), pieces.file.size
    start = np.arange(0, size, most)
    each = {name: np.repeat(getattr(pieces, name), start.size, axis=0) for name in Strided.__slots__}
    start = np.tile(start, count)
    each["shape"][:, axis] = np.minimum(most, size - start)
    each["byte"] = each["byte"] + start * each["stride"][:, axis] * each["item_size"]
    each["target_byte"] = each["target_byte"] + start * each["target_stride"][:, axis] * each["item_size"]
    return Strided(**each)


def is_contiguous(strided: Strided) -> Flags:
    """Return which pieces are one contiguous range of the file, bool (pieces,)."""
    flags: Flags = strided.shape.prod(axis=1) * strided.item_size == last_byte(strided) - strided.byte
    return flags


def copy_piece(stored: Buffer, begin: int, strided: Strided, row: int, memory: torch.Tensor) -> int:
    """Copy one piece out of the byte range that begins at `begin`, and return how many bytes it has.

    Args:
        stored: the range, writable though it isn't written to: torch minds other memory.
        begin: where it begins in the file, in bytes.
        strided: pieces.
        row: which of them.
        memory: its target's, uint8 (bytes,).
    """
    # Copied as integers: a plan knows the size of items, not their dtype, and only their bits matter.
    shape, stride, target_stride, size = _items_of(strided, row)
    byte, target_byte = int(strided.byte[row]), int(strided.target_byte[row])
    items = torch.frombuffer(stored, dtype=_CARRIERS[size], count=_items(shape, stride), offset=byte - begin)
    piece = items.as_strided(shape, stride)
    _box(memory[target_byte:], size, shape, target_stride).copy_(piece)
    return piece.numel() * size


def piece_in(memory: torch.Tensor, strided: Strided, row: int) -> torch.Tensor:
    """Return a piece in the memory of its target, as integers."""
    shape, _, target_stride, size = _items_of(strided, row)
    return _box(memory[int(strided.target_byte[row]) :], size, shape, target_stride)


def row_major_piece_in(memory: torch.Tensor, strided: Strided, row: int) -> torch.Tensor:
    """Return a piece that lies as a row-major box at the beginning of some memory, as integers."""
    shape, _, _, size = _items_of(strided, row)
    return memory[: prod(shape) * size].view(_CARRIERS[size]).view(shape)


def _box(memory: torch.Tensor, size: int, shape: list[int], stride: list[int]) -> torch.Tensor:
    return memory[: memory.numel() // size * size].view(_CARRIERS[size]).as_strided(shape, stride)


def _items_of(strided: Strided, row: int) -> tuple[list[int], list[int], list[int], int]:
    """Return a piece's shape, its strides in the file and in the target, both in items, and an item's size."""
    shape, stride, target_stride = (
        column[row].tolist() for column in (strided.shape, strided.stride, strided.target_stride)
    )
    size = int(strided.item_size[row])
    if size != _PAIR:
        return shape, stride, target_stride, size
    doubled, target_doubled = ([2 * step for step in steps] for steps in (stride, target_stride))
    return [*shape, 2], [*doubled, 1], [*target_doubled, 1], size // 2


def _items(shape: list[int], stride: list[int]) -> int:
    """Return how many elements a piece spans, gaps included."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def last_byte(strided: Strided) -> Column:
    """Return one past the last byte of each piece in its file."""
    items: Column = ((strided.shape - 1) * strided.stride).sum(axis=1) + 1
    return strided.byte + items * strided.item_size
