"""Boxes as cells of regular grids, boxes narrowed along an axis, parts of an axis, and windows that tile a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, prod
from typing import Any

from ...errors import MetadataError, ShapeError
from ._boxes import integers, refuse

# Cells of regular grids: their index, its checks, and narrowing.

Shape = tuple[int, ...]

_IRREGULAR = "Pass axis_fragmentations=None for an irregular grid."


def grid_cell(subject: str, box: Shape, cuts: Iterable[Any]) -> tuple[Shape, Shape, Shape]:
    """Return the global shape of a regular grid, the offset of one cell, and the number of cells along each axis.

    Args:
        subject: Name of the tensor, for errors.
        box: Shape of the cell.
        cuts: ``(axis, index, count)`` for each axis with several cells: the cell's index along it, and their number.

    Raises:
        MetadataError: An axis is repeated or out of range, or an index isn't below its count.

    Examples:
        >>> grid_cell("ShardedTensor 'w'", (4, 2), [(0, 3, 8)])
        ((32, 2), (12, 0), (8, 1))
    """
    places: dict[int, tuple[int, int]] = {}
    for cut in cuts:
        axis, index, count = _checked_cut(subject, len(box), cut)
        if axis in places:
            fix = "Pass one (axis, index, count) for each axis."
            refuse(subject, "rank offset", (axis, index, count), f"axis {axis} only once", fix, error=MetadataError)
        places[axis] = index, count
    cell = [(size, *places.get(axis, (0, 1))) for axis, size in enumerate(box)]
    return (
        tuple(size * count for size, _, count in cell),
        tuple(size * index for size, index, _ in cell),
        tuple(count for _, _, count in cell),
    )


def _checked_cut(subject: str, rank: int, cut: Any) -> Shape:
    values = integers(subject, "rank offset", cut)
    if len(values) != 3 or not 0 <= values[1] < values[2]:
        expected, fix = "(axis, index, count) with 0 <= index < count", "Count pieces along the axis, from 0."
        refuse(subject, "rank offset", values, expected, fix, error=MetadataError)
    if not 0 <= values[0] < rank:
        expected, fix = f"an axis in [0, {rank})", "Count the prepended axes too."
        refuse(subject, "rank offset", values, expected, fix, error=MetadataError)
    return values


def check_ranks(subject: str, local_shape: Shape, global_shape: Shape, count: int) -> None:
    """Raise MetadataError unless a local shape and `count` prepended axes have as many axes as the global shape."""
    if count < 0:
        fix = "Count the leading axes that data lacks."
        refuse(subject, "prepend_axis_num", count, "0 or more", fix, error=MetadataError)
    if len(local_shape) + count != len(global_shape):
        expected = f"{len(global_shape) - count} axes, for global_shape {global_shape} less {count} prepended"
        fix = "Pass the number of leading axes that data lacks as prepend_axis_num."
        refuse(subject, "local_shape", local_shape, expected, fix, error=MetadataError)


def check_lengths(subject: str, global_shape: Shape, offset: Shape, counts: Shape | None) -> None:
    """Raise MetadataError unless `offset` and `counts`, if it isn't None, have one number for each global axis."""
    for field, value in (("global_offset", offset), ("axis_fragmentations", counts)):
        if value is not None and len(value) != len(global_shape):
            expected, fix = f"{len(global_shape)} numbers, for global_shape {global_shape}", "Pass one for each axis."
            refuse(subject, field, value, expected, fix, error=MetadataError)


def check_flat_range(subject: str, flat: slice, local_shape: Shape) -> None:
    """Raise MetadataError if a flat range ends beyond the last element of the flattened box."""
    if flat.stop > prod(local_shape):
        expected = f"a range of the {prod(local_shape)} elements of local_shape {local_shape}"
        fix = "Pass the shape before flattening as local_shape."
        refuse(subject, "flattened_range", flat, expected, fix, error=MetadataError)


def check_box(subject: str, box: Shape, offset: Shape, global_shape: Shape, *, may_leave: bool) -> None:
    """Raise MetadataError for negative numbers and, unless `may_leave` is set, for a box beyond the global shape."""
    for field, value in (("local_shape", box), ("global_offset", offset), ("global_shape", global_shape)):
        if any(number < 0 for number in value):
            fix = "Count elements from the global tensor's beginning."
            refuse(subject, field, value, "no negative number", fix, error=MetadataError)
    ends = tuple(first + size for first, size in zip(offset, box, strict=True))
    if not may_leave and any(end > size for end, size in zip(ends, global_shape, strict=True)):
        found, expected = f"{offset} for a box {box} that ends at {ends}", f"a box inside global_shape {global_shape}"
        fix = "Count offsets in elements, not ranks. Pass allow_shape_mismatch=True if the tensor is padded."
        refuse(subject, "global_offset", found, expected, fix, error=MetadataError)


def check_cell(subject: str, box: Shape, offset: Shape, counts: Shape) -> None:
    """Raise MetadataError unless a box can be a cell of a regular grid with `counts` cells along the axes."""
    if any(count < 1 for count in counts):
        refuse(subject, "axis_fragmentations", counts, "1 or more for each axis", _IRREGULAR, error=MetadataError)
    for axis, (size, first) in enumerate(zip(box, offset, strict=True)):
        if size and first % size:
            expected = f"a multiple of local_shape's {size}, as in a regular grid"
            refuse(subject, f"global_offset[{axis}]", first, expected, _IRREGULAR, error=MetadataError)


def cell_index(subject: str, box: Shape, offset: Shape, counts: Shape | None) -> Shape:
    """Return a cell's index along each axis of its grid; raises ShapeError if the offset doesn't determine it.

    Examples:
        >>> cell_index("ShardedTensor 'w'", (4, 2), (12, 0), (8, 1))
        (3, 0)
    """
    places = []
    for axis, (size, first) in enumerate(zip(box, offset, strict=True)):
        only_one = size == 0 and counts is not None and counts[axis] == 1
        if not only_one and (size == 0 or first % size):
            expected = f"a multiple of the box's size {size}" if size else "a box with elements"
            fix = "Use `global_slice`: only a cell of a regular grid has an index in it."
            refuse(subject, f"global_offset[{axis}]", first, expected, fix, error=ShapeError)
        places.append(0 if only_one else first // size)
    return tuple(places)


def cell_shape(subject: str, global_shape: Shape, counts: Shape, *, padded: bool) -> Shape:
    """Return the shape of the cells of a regular grid with `counts` cells along the axes.

    ShapeError is raised if a global size isn't a multiple of its count. If the tensor is `padded`, the size of the cell
    is rounded down instead.

    Examples:
        >>> cell_shape("ShardedTensor 'w'", (32, 2), (8, 1), padded=False)
        (4, 2)
    """
    for axis, (size, count) in enumerate(zip(global_shape, counts, strict=True)):
        if size % count and not padded:
            fix = "Pass allow_shape_mismatch=True if the tensor is padded."
            refuse(subject, f"global_shape[{axis}]", size, f"a multiple of {count}", fix, error=ShapeError)
    return tuple(size // count for size, count in zip(global_shape, counts, strict=True))


def narrow_place(subject: str, shape: Shape, dim: int, start: int, length: int) -> tuple[int, int, int]:
    """Return `dim`, `start` and `length` of a narrowing; a negative `dim` or `start` is made nonnegative.

    Raises:
        ShapeError: They exceed the shape.

    Examples:
        >>> narrow_place("narrow 'w'", (4, 2), -2, -3, 2)
        (0, 1, 2)
    """
    dim, start, length = integers(subject, "dim, start, length", (dim, start, length))
    if not -len(shape) <= dim < len(shape):
        refuse(subject, "dim", dim, f"an axis of {shape}", "Pass an axis of the local shape.", error=ShapeError)
    size = shape[dim]
    begin = start + size if start < 0 else start
    if begin < 0 or length < 0 or begin + length > size:
        found, expected = f"start {start}, length {length}", f"a range of the {size} indices along dim {dim}"
        refuse(subject, "range", found, expected, "Narrow to indices that each rank's box has.", error=ShapeError)
    return dim % len(shape), begin, length


def narrow_axis(subject: str, field: str, values: Shape, axis: int, size: int, length: int) -> Shape:
    """Return a global shape or offset, rescaled along an axis from grid cells of `size` to grid cells of `length`.

    Args:
        subject: Name of the operation and the tensor, for errors.
        field: Name of the field that has the values, for errors.
        values: Global shape or offset before the narrowing.
        axis: Axis that is narrowed.
        size: Size of a cell along the axis, before the narrowing.
        length: Size of a cell along the axis, after the narrowing.

    Examples:
        >>> narrow_axis("narrow 'w'", "global_shape", (32, 2), 0, 4, 1)
        (8, 2)
    """
    value = values[axis]
    if value % size if size else value:
        expected = f"a multiple of the box's size {size}, as in a regular grid"
        fix = "Narrow a shard that was made with a regular grid along this axis, or with the whole axis."
        refuse(subject, f"{field}[{axis}]", value, expected, fix, error=ShapeError)
    return (*values[:axis], value // size * length if size else 0, *values[axis + 1 :])


Run = tuple[slice, slice]


def narrow_flat_range(
    local_shape: tuple[int, ...], start: int, stop: int, dim: int, narrow_start: int, length: int
) -> tuple[Run, ...]:
    """Return the maximal runs of elements that a flat range and a narrowed box have in common.

    The 1-D data holds elements [start, stop) of the row-major flattened box. The narrowed box has the indices
    [narrow_start, narrow_start + length) along `dim`. A run is contiguous in the data and in the flattened narrowed
    box.

    Args:
        local_shape: Shape of the box, before narrowing.
        start: Index of the data's first element in the flattened box.
        stop: One past the index of its last element.
        dim: Axis to narrow, in [0, len(local_shape)).
        narrow_start: First index to keep along `dim`.
        length: Number of indices to keep.

    Returns:
        (slice of the data, slice of the flattened narrowed box) for each run, in the data's order; there may be none,
        since empty runs are left out.

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
    if length == local_shape[dim]:  # nothing is cut off: one run instead of one for each row
        return ((slice(0, stop - start), slice(start, stop)),)
    return tuple(_row_runs(prod(local_shape[dim + 1 :]), local_shape[dim], start, stop, narrow_start, length))


def _row_runs(inner: int, size: int, start: int, stop: int, narrow_start: int, length: int) -> Iterator[Run]:
    row, run, skip = size * inner, length * inner, narrow_start * inner
    for index in range(start // row, -(-stop // row)):
        first = max(start, index * row + skip)
        last = min(stop, index * row + skip + run)
        if first < last:
            shift = skip + index * (row - run)
            yield slice(first - start, last - start), slice(first - shift, last - shift)


# One axis cut into parts, and parts cut again.

Spans = tuple[tuple[int, int], ...]
"""Intervals of an axis, as (start, stop), in the order of the local tensor; no two are adjacent."""


def cut_spans(spans: Spans, parts: int, index: int, split_factor: int = 1) -> Spans:
    """Cut the indices in some intervals of an axis into parts as torch shards an axis, and return one part.

    The indices are divided into `split_factor` blocks and each block into `parts` pieces; the part consists of piece
    `index` of every block. Both divisions are those of `torch.chunk`: of n indices, each of m pieces has ceil(n / m)
    while there are enough; the next piece has the rest, and later pieces have none.

    Args:
        spans: Intervals to cut.
        parts: Number of parts.
        index: Index of the part, from 0.
        split_factor: Number of blocks; more than one interleaves the parts.

    Examples:
        >>> [cut_spans(((0, 10),), 4, index) for index in range(4)]
        [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
        >>> cut_spans(((0, 8),), 2, 1, split_factor=2)
        ((2, 4), (6, 8))

    References:
        torch.distributed.tensor's Shard and _StridedShard, torch 2.13.
    """
    length = sum(stop - start for start, stop in spans)
    if split_factor == 1:
        return _between(spans, *_piece(length, parts, index))
    part: list[tuple[int, int]] = []
    for block in range(split_factor):
        begin, end = _piece(length, split_factor, block)
        start, stop = _piece(end - begin, parts, index)
        part += _between(spans, begin + start, begin + stop)
    return _merge_adjacent(part)


def _piece(length: int, parts: int, index: int) -> tuple[int, int]:
    # `torch.chunk`, DTensor and FSDP cut like this; JAX refuses axes that aren't a multiple.
    size = ceil(length / parts)
    return min(index * size, length), min((index + 1) * size, length)


def _between(spans: Spans, start: int, stop: int) -> Spans:
    """Return items `start` to ``stop - 1`` of the concatenated intervals, as intervals."""
    part, position = [], 0
    for begin, end in spans:
        low, high = max(start - position, 0), min(stop - position, end - begin)
        if low < high:
            part.append((begin + low, begin + high))
        position += end - begin
    return tuple(part)


def _merge_adjacent(spans: list[tuple[int, int]]) -> Spans:
    runs: list[tuple[int, int]] = []
    for start, stop in spans:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return tuple(runs)


# Windows: boxes that tile a tensor, each small enough for a cache, or for the memory bound of a read.

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A box: its first index, and its shape."""


def box_shape(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the shape of the largest box of at most `most` elements that is contiguous in a row-major tensor.

    Args:
        shape: Shape of the tensor.
        most: Upper bound of the elements in a box; less than 1 counts as 1.

    Examples:
        >>> box_shape((10, 4, 6), 100), box_shape((10, 4, 6), 12), box_shape((10, 4, 6), 5)
        ((4, 4, 6), (1, 2, 6), (1, 1, 5))
    """
    for axis, size in enumerate(shape):
        row = prod(shape[axis + 1 :])
        if row <= most or axis == len(shape) - 1:
            return (1,) * axis + (min(size, max(1, most // max(row, 1))),) + shape[axis + 1 :]
    return ()


def tiles(shape: tuple[int, ...], cell: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of a grid over a tensor; the last along an axis may be smaller. An empty tensor has no boxes.

    Args:
        shape: Shape of the tensor.
        cell: Shape of a box, at least 1 along each axis that has elements.

    Examples:
        >>> list(tiles((3, 4), (2, 4))), next(tiles((2**60,), (2,)))
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], ((0,), (2,)))
    """
    if not prod(shape):
        return
    if not shape:
        yield (), ()
        return
    # The loops go axis by axis: itertools.product would hold all starts of a tensor that only claims to be large.
    for start in range(0, shape[0], cell[0]):
        size = min(cell[0], shape[0] - start)
        for offset, box in tiles(shape[1:], cell[1:]):
            yield (start, *offset), (size, *box)


def slabs(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes of at most `most` elements that tile a tensor, each a contiguous run, in row-major order.

    Args:
        shape: Shape of the tensor.
        most: Upper bound of the elements in a box, at least 1.

    Examples:
        >>> list(slabs((3, 4), 8)), list(slabs((2, 3), 2))[:2]
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], [((0, 0), (1, 2)), ((0, 2), (1, 1))])
    """
    return tiles(shape, box_shape(shape, most))


def slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that index a box in its tensor.

    Examples:
        >>> slices((2, 0), (1, 4))
        (slice(2, 3, None), slice(0, 4, None))
    """
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
