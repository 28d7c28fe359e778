"""Reads of strided pieces: a wide read is followed by copies, which is faster than a read for each short row."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import torch

from ...core.geometry import Column, joined_rows, rows_of
from ...core.lazy import INTEGERS
from ...core.plans import Strided
from ._blocks import BLOCK_BYTES, Flags
from ._storage import Buffer

_PAIR = 16
"""Items of this size are staged as two halves: torch has no integer of 16 bytes."""

_ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Dtype of the copies of items, by item size; only their bits matter."""

_READ_BYTES = 16 * BLOCK_BYTES
"""Size of a read; small enough that its bytes stay in the processor's cache until they are copied."""

GAP_BYTES = 128 * 1024
"""Longer gaps between wanted bytes are skipped: reading them would take longer than another call."""


def wide_reads(low: Column, high: Column) -> Iterator[tuple[range, int, int]]:
    """Yield (rows, begin, end) for each read: the indices of the pieces that share it, and its byte range.

    Args:
        low: First byte that is read for each piece, ascending, int64 (pieces,).
        high: One past the last byte that is read for each piece, int64 (pieces,); at most
            `_READ_BYTES` + 2 * `BLOCK_BYTES` after `low`.
    """
    first, begin, reach = 0, 0, 0
    for row, (byte, end) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        if row and (byte > reach or max(end, reach) - begin > _READ_BYTES + 2 * BLOCK_BYTES):
            yield range(first, row), begin, reach
            first = row
        if row == first:
            begin, reach = byte, end
        reach = max(end, reach)
    if low.size:
        yield range(first, low.size), begin, reach


def split_pieces(pieces: Strided, most_gap: int) -> Strided:
    """Return strided pieces cut along their leading axes, so that each spans at most `_READ_BYTES` of the file.

    Args:
        pieces: Strided pieces, in any order.
        most_gap: Longest gap of unused bytes within a piece; pieces are cut at longer gaps.
    """
    long = last_byte(pieces) - pieces.byte > min(most_gap, _READ_BYTES)
    if not long.any():
        return pieces
    parts = [_split_piece(pieces, row, most_gap) for row in np.flatnonzero(long).tolist()]
    whole = rows_of(pieces, ~long)
    return joined_rows([whole, *parts])


def _split_piece(pieces: Strided, row: int, most_gap: int) -> Strided:
    """Return the parts of one piece, cut along leading axes so that each spans at most `_READ_BYTES` of the file.

    Args:
        pieces: Columns of strided pieces.
        row: Index of the piece.
        most_gap: Longest gap of unused bytes within a part.
    """
    piece = rows_of(pieces, slice(row, row + 1))
    for axis in range(piece.shape.shape[1]):
        if piece.shape[0, axis] == 1:
            continue
        step = int(piece.stride[0, axis] * piece.item_size[0])
        inner = int((last_byte(piece) - piece.byte)[0]) - (int(piece.shape[0, axis]) - 1) * step
        # Gaps along an inner axis are never larger than those along an outer axis.
        alone = inner > _READ_BYTES or step - inner > most_gap
        piece = cut(piece, axis, 1 if alone else max(0, _READ_BYTES - inner) // step + 1)
        if not alone:
            break
    return piece


def cut(pieces: Strided, axis: int, most: int) -> Strided:
    """Cut pieces of one common shape into parts with at most `most` elements along an axis."""
    size, count = int(pieces.shape[0, axis]), pieces.file.size
    start = np.arange(0, size, most)
    parts = {name: np.repeat(getattr(pieces, name), start.size, axis=0) for name in Strided.__slots__}
    start = np.tile(start, count)
    parts["shape"][:, axis] = np.minimum(most, size - start)
    parts["byte"] = parts["byte"] + start * parts["stride"][:, axis] * parts["item_size"]
    parts["target_byte"] = parts["target_byte"] + start * parts["target_stride"][:, axis] * parts["item_size"]
    return Strided(**parts)


def is_contiguous(pieces: Strided) -> Flags:
    """Return flags of the pieces that are one contiguous range of the file, bool (pieces,)."""
    flags: Flags = pieces.shape.prod(axis=1) * pieces.item_size == last_byte(pieces) - pieces.byte
    return flags


def copy_piece(content: Buffer, begin: int, pieces: Strided, row: int, memory: Buffer) -> int:
    """Copy a piece to its target from a byte range that was read, and return the piece's size in bytes.

    Args:
        content: Bytes of the range.
        begin: Offset of the range in the file, in bytes.
        pieces: Columns of strided pieces.
        row: Row of the piece in these columns.
        memory: Bytes of the piece's target.
    """
    # NumPy is used since torch would divide each small copy among its own threads, which wait for each other.
    kind, size = _ITEMS[int(pieces.item_size[row])], int(pieces.item_size[row])
    shape, stride, target_stride = (
        column[row].tolist() for column in (pieces.shape, pieces.stride, pieces.target_stride)
    )
    piece = np.ndarray(shape, kind, content, int(pieces.byte[row]) - begin, [step * size for step in stride])
    place = int(pieces.target_byte[row])
    np.ndarray(shape, kind, memory, place, [step * size for step in target_stride])[...] = piece
    return piece.nbytes


def piece_in(memory: torch.Tensor, pieces: Strided, row: int) -> torch.Tensor:
    """Return a strided view of the elements in a target's memory that a piece fills, as integers of the same size.

    Args:
        memory: Memory of the piece's target, uint8 (bytes,).
        pieces: Columns of strided pieces.
        row: Index of the piece.
    """
    shape, target_stride, size = _items_of(pieces, row)
    memory = memory[int(pieces.target_byte[row]) :]
    return memory[: memory.numel() // size * size].view(INTEGERS[size]).as_strided(shape, target_stride)


def row_major_piece_in(memory: torch.Tensor, pieces: Strided, row: int) -> torch.Tensor:
    """Return a view, in the piece's shape, of memory that begins with a piece's elements in row-major order.

    Elements appear as integers of the same size; an element of 16 bytes appears as two along a last axis.

    Args:
        memory: Memory that begins with the piece, uint8 (bytes,).
        pieces: Columns of strided pieces.
        row: Index of the piece.
    """
    shape, _, size = _items_of(pieces, row)
    return memory[: prod(shape) * size].view(INTEGERS[size]).view(shape)


def _items_of(pieces: Strided, row: int) -> tuple[list[int], list[int], int]:
    """Return a piece's shape, strides in the target, and element size; an element of 16 bytes becomes two of 8."""
    shape, target_stride, size = (
        pieces.shape[row].tolist(),
        pieces.target_stride[row].tolist(),
        int(pieces.item_size[row]),
    )
    if size != _PAIR:
        return shape, target_stride, size
    return [*shape, 2], [*(2 * step for step in target_stride), 1], size // 2


def last_byte(pieces: Strided) -> Column:
    """Return the end of each piece in its file: one past its last byte."""
    items: Column = ((pieces.shape - 1) * pieces.stride).sum(axis=1) + 1
    return pieces.byte + items * pieces.item_size
