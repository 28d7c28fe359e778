"""What is left of a flat range when the box that it flattens is narrowed along one axis."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

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
    if length == local_shape[dim]:  # nothing is cut, so the rows join into one run
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
