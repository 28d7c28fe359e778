"""Flat ranges, slices of a row-major flattened box, divided into boxes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from ._boxes import Column, row_major_strides


def flat_boxes(shape: Column, start: Column, stop: Column) -> tuple[Column, Column, Column, Column]:
    """Return the boxes that flat ranges consist of: at most ``2 * axes - 1`` a range, each contiguous in its range.

    From the last axis to the first, each completes its current row, until whole rows of the axis before it fit;
    back from the first to the last, each takes the whole rows that fit before the end.

    Args:
        shape: the flattened boxes, int64 (ranges, axes).
        start: first element of each range in its flattened box, int64 (ranges,).
        stop: one past the last element, int64 (ranges,).

    Returns:
        ``(row, offset, shape, position)``: the range that a box belongs to, its offset within the flattened box,
        its shape, and the element of the range that it begins at. Ordered by row, then position.

    Examples:
        >>> row, offset, part, position = flat_boxes(*map(np.array, ([[3, 4]], [2], [9])))
        >>> for columns in zip(offset.tolist(), part.tolist(), position.tolist()): print(*columns)
        [0, 2] [1, 2] 0
        [1, 0] [1, 4] 2
        [2, 0] [1, 1] 6
    """
    axes = shape.shape[1]
    # Boxes without elements have strides of 0, by which nothing can be divided.
    strides = np.maximum(row_major_strides(shape), 1)
    cursor = np.array(start, dtype=np.int64)
    pieces: list[tuple[Column, Column, Column, Column]] = []
    climbing = [(axis, True) for axis in range(axes - 1, 0, -1)]
    for axis, climb in [*climbing, *((axis, False) for axis in range(axes))]:
        stride = strides[:, axis]
        until = stop // stride * stride
        if climb:
            above = strides[:, axis - 1]
            until = np.minimum(until, -(-cursor // above) * above)
        rows = np.flatnonzero(until > cursor)
        if rows.size:
            pieces.append(_axis_boxes(shape[rows], strides[rows], axis, rows, cursor[rows], until[rows], start[rows]))
            # All ranges advance together, axis by axis: the loop is over axes, and not over ranges.
            cursor = np.maximum(cursor, until)
    return _in_order(pieces, axes)


def _axis_boxes(
    shape: Column, strides: Column, axis: int, rows: Column, begin: Column, until: Column, start: Column
) -> tuple[Column, Column, Column, Column]:
    """Return boxes one row wide above `axis` and whole below it."""
    offset = begin[:, None] // strides % np.maximum(shape, 1)
    part = shape.copy()
    part[:, :axis] = 1
    part[:, axis] = (until - begin) // strides[:, axis]
    return rows, offset, part, begin - start


def _in_order(pieces: list[tuple[Column, Column, Column, Column]], axes: int) -> tuple[Column, Column, Column, Column]:
    if not pieces:
        empty = np.zeros(0, dtype=np.int64)
        return empty, np.zeros((0, axes), dtype=np.int64), np.zeros((0, axes), dtype=np.int64), empty
    row, offset, part, position = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.lexsort((position, row))
    return row[order], offset[order], part[order], position[order]


# Flat ranges of narrowed boxes.

Run = tuple[slice, slice]


def narrow_flat_range(
    local_shape: tuple[int, ...], start: int, stop: int, dim: int, narrow_start: int, length: int
) -> tuple[Run, ...]:
    """Return the maximal runs that a flat range and a narrowed box have in common.

    A run is contiguous twice: in the 1-D data that holds elements [start, stop) of the row-major flattened box, and
    in the row-major flattening of the box narrowed to [narrow_start, narrow_start + length) along `dim`.

    Args:
        local_shape: the box, before narrowing.
        start: the first element of the flattened box that the data holds.
        stop: one past the last element.
        dim: the axis to narrow, in [0, len(local_shape)).
        narrow_start: the first index to keep along `dim`.
        length: how many indices to keep.

    Returns:
        (slice of the data, slice of the flattened narrowed box) for each run, in the data's order; empty runs are
        left out, so there may be none.

    Examples:
        >>> narrow_flat_range((2, 4), 1, 8, 1, 2, 2)  # keep the last two columns of two rows
        ((slice(1, 3, None), slice(0, 2, None)), (slice(5, 7, None), slice(2, 4, None)))
        >>> narrow_flat_range((2, 4), 1, 8, 0, 1, 1)  # keep the last row
        ((slice(3, 7, None), slice(0, 4, None)),)
        >>> narrow_flat_range((2, 4), 0, 4, 0, 1, 1)
        ()
    """
    if start >= stop or length == 0:
        return ()
    if length == local_shape[dim]:  # nothing is cut: one run, where rows would each give one
        return ((slice(0, stop - start), slice(start, stop)),)
    return tuple(_row_runs(prod(local_shape[dim + 1 :]), local_shape[dim], start, stop, narrow_start, length))


def _row_runs(inner: int, size: int, start: int, stop: int, narrow_start: int, length: int) -> Iterator[Run]:
    row, kept, skipped = size * inner, length * inner, narrow_start * inner
    for index in range(start // row, -(-stop // row)):
        first = max(start, index * row + skipped)
        last = min(stop, index * row + skipped + kept)
        if first < last:
            shift = skipped + index * (row - kept)
            yield slice(first - start, last - start), slice(first - shift, last - shift)
