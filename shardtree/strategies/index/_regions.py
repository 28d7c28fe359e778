"""What lies in a stretch of a file: which tensors and objects, and which of their elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...geometry import Column
from .._findings import Region
from ._columns import Index
from ._rows import item_sizes
from ._texts import text_at

_MOST_REGIONS = 10_000
"""Where more chunks than this lie in one stretch, as in a file that isn't there, keys alone are named."""


@dataclass(frozen=True, slots=True, eq=False)
class FileRows:
    """The rows of one group of an index that have bytes in one file, in the order of these.

    Attributes:
        row: numbers in the index, int64 (rows,).
        begin: first byte of each, int64 (rows,).
        end: one past its last byte, int64 (rows,).
        furthest: one past the last byte of it and of all before, int64 (rows,).
    """

    row: Column
    begin: Column
    end: Column
    furthest: Column

    def between(self, begin: int, end: int) -> Column:
        """Return the numbers of those that have bytes in a stretch, int64 (rows,)."""
        first = np.searchsorted(self.furthest, begin, side="right")
        last = np.searchsorted(self.begin, end, side="left")
        rows: Column = self.row[first:last][self.end[first:last] > begin]
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class FileContents:
    """What one file of an index holds.

    Attributes:
        chunks: of tensors.
        objects: likewise.
    """

    chunks: FileRows
    objects: FileRows

    @property
    def begin(self) -> int | None:
        """The first byte that is a tensor's or an object's, None where there is none."""
        return min((int(rows.begin[0]) for rows in (self.chunks, self.objects) if rows.row.size), default=None)

    @property
    def end(self) -> int:
        """One past the last such byte."""
        return max((int(rows.furthest[-1]) for rows in (self.chunks, self.objects) if rows.row.size), default=0)


def file_contents(index: Index, number: int) -> FileContents:
    """Return what lies where in one of an index's files."""
    return FileContents(_file_rows(index, "chunk", number), _file_rows(index, "object", number))


def _file_rows(index: Index, group: str, number: int) -> FileRows:
    file, byte, length = (getattr(index, f"{group}_{column}") for column in ("file", "byte", "length"))
    rows = np.flatnonzero((file == number) & (length > 0))
    rows = rows[np.argsort(byte[rows], kind="stable")]
    end = byte[rows] + length[rows]
    return FileRows(rows, byte[rows], end, np.maximum.accumulate(end))


def keys_between(index: Index, contents: FileContents, begin: int, end: int) -> tuple[str, ...]:
    """Return the keys of tensors, and unique keys of objects, that have bytes in a stretch of a file."""
    numbers = np.unique(index.chunk_key[contents.chunks.between(begin, end)]).tolist()
    objects = np.sort(contents.objects.between(begin, end)).tolist()
    keys = [text_at(index.key_text, index.key_start, number) for number in numbers]
    return (*keys, *(text_at(index.object_text, index.object_start, number) for number in objects))


def regions_between(index: Index, contents: FileContents, begin: int, end: int) -> tuple[Region, ...]:
    """Return the part of each chunk that lies in a stretch of a file; nothing where these are too many to name."""
    rows = contents.chunks.between(begin, end).tolist()
    return tuple(_region(index, row, begin, end) for row in rows) if len(rows) <= _MOST_REGIONS else ()


def _region(index: Index, row: int, begin: int, end: int) -> Region:
    number, byte = int(index.chunk_key[row]), int(index.chunk_byte[row])
    first_axis = index.chunk_shape.shape[1] - int(index.key_axes[number])
    offset, shape = (getattr(index, f"chunk_{name}")[row, first_axis:].tolist() for name in ("offset", "shape"))
    key = text_at(index.key_text, index.key_start, number)
    item = int(item_sizes(index)[index.key_dtype[number]])
    if item < 0:
        return Region(key, tuple(offset), _moved(offset, tuple(shape)))
    first = (max(begin, byte) - byte) // item
    last = -(-(min(end, byte + int(index.chunk_length[row])) - byte) // item) - 1
    start = int(index.chunk_start[row])
    if start >= 0:
        whole = tuple(at + size for at, size in zip(offset, shape, strict=True))
        return Region(key, tuple(offset), whole, flat=(start + first, start + last + 1))
    low, high = bounding_box(tuple(shape), first, last)
    return Region(key, _moved(offset, low), _moved(offset, high))


def _moved(offset: list[int], place: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(at + inner for at, inner in zip(offset, place, strict=True))


def bounding_box(shape: tuple[int, ...], first: int, last: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the smallest box that holds a range of a row-major flattened box: its first indices and one past its last.

    Up to the axis along which the two ends differ it is one element wide, and whole after that one: a range that goes
    on from one row to the next takes the end of the one and the beginning of the other.

    Args:
        shape: the flattened box's.
        first: the range's first element.
        last: its last one.

    Examples:
        >>> bounding_box((4, 6), 7, 9), bounding_box((4, 6), 7, 14)
        (((1, 1), (2, 4)), ((1, 0), (3, 6)))
    """
    low = tuple(int(at) for at in np.unravel_index(first, shape)) if shape else ()
    high = tuple(int(at) for at in np.unravel_index(last, shape)) if shape else ()
    differs = next((axis for axis in range(len(shape)) if low[axis] != high[axis]), len(shape))
    return (
        tuple(at if axis <= differs else 0 for axis, at in enumerate(low)),
        tuple(at + 1 if axis <= differs else shape[axis] for axis, at in enumerate(high)),
    )
