"""Arguments converted to ints, and boxes as int64 columns: the offsets and shapes of many boxes, one box a row.

A box of fewer axes than its column is padded on the left with offset 0 and shape 1, so that tensors with any number of
axes share one column. The padding doesn't change row-major order. There is always at least one axis: a scalar is the
box ``[0], [1]``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CheckpointingException, MetadataError, error_text

# Numbers in arguments, which become ints and tuples of ints, or are refused under the argument's name.


def refuse(
    subject: str, field: str, found: object, expected: str, fix: str, *, error: type[CheckpointingException]
) -> NoReturn:
    """Raise `error` with the heading "subject: invalid value of field", found and expected values, and the fix."""
    raise error(error_text(f"{subject}: invalid value of {field}", found=found, expected=expected, fix=fix))


def check_type(subject: str, field: str, value: object, kind: type, fix: str) -> None:
    """Raise MetadataError unless the value of a subject's field is an instance of `kind`.

    Examples:
        >>> check_type("ShardedTensor 'w'", "allow_shape_mismatch", True, bool, "Pass a bool.")
    """
    if not isinstance(value, kind):
        refuse(subject, field, type(value).__name__, f"a {kind.__name__}", fix, error=MetadataError)


def integer(subject: str, field: str, value: Any) -> int:
    """Return an int-like value as an int; a bool, a float or a string raises MetadataError.

    Examples:
        >>> import numpy
        >>> integer("ShardedTensor 'w'", "local_shape[0]", numpy.int64(4))
        4
    """
    if (number := as_int(value)) is None:
        fix = "Convert it with int() where that loses nothing."
        refuse(subject, field, type(value).__name__, "an int", fix, error=MetadataError)
    return number


def as_int(value: Any) -> int | None:
    """Return an int-like value as an int, or None; bools, floats and strings aren't int-like.

    Examples:
        >>> import numpy
        >>> as_int(numpy.int64(4)), as_int(4.0), as_int(True)
        (4, None, None)
    """
    try:
        # A bool is an int to Python; as a size or index it is most likely a misplaced argument. `__index__` exists for
        # NumPy's integers, but not for floats and strings.
        return None if isinstance(value, bool) else int(operator.index(value))
    except TypeError:
        return None


def integer64(subject: str, field: str, value: Any) -> int:
    """Return an int-like value as an int that fits an int64 column, or raise MetadataError.

    Examples:
        >>> integer64("ShardedTensor 'w'", "replica_id", 1)
        1
    """
    number = integer(subject, field, value)
    if not -(2**63) <= number < 2**63:
        fix = "No size or offset is so large: check where the number comes from."
        refuse(subject, field, number, "an int of 64 bits", fix, error=MetadataError)
    return number


def integers(subject: str, field: str, values: Any) -> tuple[int, ...]:
    """Return a sequence of int-like values as a tuple of ints that fit int64 columns, or raise MetadataError.

    Examples:
        >>> integers("ShardedTensor 'w'", "local_shape", [4, 2])
        (4, 2)
    """
    try:
        items = tuple(values)
    except TypeError:
        fix = "Pass one int for each axis."
        refuse(subject, field, type(values).__name__, "a tuple of ints", fix, error=MetadataError)
    return tuple(integer64(subject, f"{field}[{axis}]", item) for axis, item in enumerate(items))


def flat_range(subject: str, value: Any) -> slice | None:
    """Return a flat range as slice(start, stop) of ints, and None unchanged; other values raise MetadataError.

    Examples:
        >>> flat_range("ShardedTensor 'w'", slice(2, 5, 1))
        slice(2, 5, None)
    """
    if value is None:
        return None
    fix = "Pass slice(start, stop) with 0 <= start <= stop."
    if not isinstance(value, slice) or value.step not in (None, 1):
        refuse(subject, "flattened_range", value, "a slice with step 1", fix, error=MetadataError)
    start = integer64(subject, "flattened_range.start", value.start)
    stop = integer64(subject, "flattened_range.stop", value.stop)
    if not 0 <= start <= stop:
        refuse(subject, "flattened_range", value, "0 <= start <= stop", fix, error=MetadataError)
    return slice(start, stop)


# Boxes in columns.

Column = NDArray[np.int64]
"""An int64 column of numbers: one row for each shard, with one number or several."""
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Record = TypeVar("Record")


def box_column(rows: Sequence[Sequence[int]], fill: int, axes: int = 0) -> Column:
    """Return shapes or offsets of different lengths as one int64 column, padded on the left.

    Args:
        rows: Shapes or offsets, each with any number of axes.
        fill: Value of the padding: 0 for offsets, 1 for shapes.
        axes: Minimum number of axes of the result.

    Returns:
        The column, int64 (rows, axes).

    Examples:
        >>> box_column([(4, 2), (), (7,)], fill=1).tolist()
        [[4, 2], [1, 1], [1, 7]]
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = max(1, axes, int(lengths.max(initial=0)))
    # One pass over all numbers replaces an array for each row.
    numbers = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
    if numbers.size == len(rows) * width:
        return numbers.reshape(-1, width)
    column = np.full((len(rows), width), fill, dtype=np.int64)
    column[np.arange(width) >= width - lengths[:, None]] = numbers
    return column


def widen(column: Column, axes: int, fill: int) -> Column:
    """Return a column of shapes or offsets with at least `axes` axes, padded on the left with `fill`.

    Examples:
        >>> widen(np.array([[3, 4]]), 3, fill=1).tolist()
        [[1, 3, 4]]
    """
    missing = axes - column.shape[1]
    return column if missing <= 0 else np.pad(column, ((0, 0), (missing, 0)), constant_values=fill)


def narrowed(column: NDArray[Any]) -> NDArray[Any]:
    """Return an int64 column in the narrowest dtype that holds its values, to pickle it compactly; others unchanged.

    Examples:
        >>> [narrowed(np.array(values)).dtype.name for values in ([-1, 300], [0, 255], [2**32], [True])]
        ['int16', 'uint8', 'int64', 'bool']
    """
    if column.dtype != np.int64:
        return column
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    kinds = (np.int8, np.int16, np.int32) if low < 0 else (np.uint8, np.uint16, np.uint32)
    dtype = next((kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max), np.int64)
    return column.astype(dtype, copy=False)


def as_int64(column: NDArray[Any]) -> NDArray[Any]:
    """Undo `narrowed`: return a column of integers as int64, and a column of bools unchanged.

    Examples:
        >>> as_int64(narrowed(np.array([1, 2]))).dtype, as_int64(np.array([True])).dtype
        (dtype('int64'), dtype('bool'))
    """
    return column if column.dtype == np.bool_ else column.astype(np.int64)


def box_slices(offset: Column, shape: Column, axes: int) -> tuple[slice, ...]:
    """Return a padded box as slices, without the padding.

    Args:
        offset: Offset of the box, padded on the left, int64 (axes or more,).
        shape: Shape of the box, padded on the left, int64 (axes or more,).
        axes: Number of the box's own axes, without padding.

    Examples:
        >>> box_slices(np.array([0, 3, 4]), np.array([1, 2, 2]), 2)
        (slice(3, 5, None), slice(4, 6, None))
    """
    spans = zip(offset.tolist(), shape.tolist(), strict=True)
    return tuple(slice(low, low + size) for low, size in spans)[offset.size - axes :]


def volumes(shape: Column) -> Column:
    """Return the number of elements of each box.

    Examples:
        >>> volumes(np.array([[4, 2], [3, 0]])).tolist()
        [8, 0]
    """
    product = np.ones(shape.shape[0], dtype=np.int64)
    for axis in range(shape.shape[1]):  # NumPy's `prod` takes ten times as long for rows of two or three
        product *= shape[:, axis]
    return product


def row_major_strides(shape: Column) -> Column:
    """Return the row-major strides of each box, in elements.

    Examples:
        >>> row_major_strides(np.array([[4, 2, 3]])).tolist()
        [[6, 3, 1]]
    """
    strides = np.ones_like(shape)
    np.cumprod(shape[:, :0:-1], axis=1, out=strides[:, -2::-1])
    return strides


def intersect(
    left_offset: Column, left_shape: Column, right_offset: Column, right_shape: Column
) -> tuple[Column, Column]:
    """Return the intersection of each left box with the right box in the same row, as offsets and shapes.

    If the two boxes have no element in common, the shape contains a zero.

    Examples:
        >>> offset, shape = intersect(*(np.array([row]) for row in ([0, 0], [4, 4], [2, 1], [4, 2])))
        >>> offset.tolist(), shape.tolist()
        ([[2, 1]], [[2, 2]])
    """
    offset = np.maximum(left_offset, right_offset)
    shape = np.minimum(left_offset + left_shape, right_offset + right_shape) - offset
    return offset, np.maximum(shape, 0)


# Distinct values and rows are found by sorting: since 2.4 NumPy's `unique` hashes, which is a hundred times slower for
# a million integers: https://github.com/numpy/numpy/issues/31969

_ROOM = 2**62


def distinct(values: Column) -> Column:
    """Return the distinct values, ascending.

    Examples:
        >>> distinct(np.array([3, 1, 3])).tolist()
        [1, 3]
    """
    values = np.sort(values)
    return values[begins(values)]


def begins(*columns: Column) -> Mask:
    """Return whether each row of sorted columns is the first or differs from the row before, bool (rows,).

    Args:
        columns: Columns of one length, sorted together.

    Examples:
        >>> begins(np.array([1, 1, 2, 2]), np.array([5, 5, 5, 6])).tolist()
        [True, False, True, True]
    """
    new = np.ones(len(columns[0]), dtype=np.bool_)
    if new.size:
        np.not_equal(columns[0][1:], columns[0][:-1], out=new[1:])
    for column in columns[1:]:
        new[1:] |= column[1:] != column[:-1]
    return new


def group_sums(group: Column | tuple[Column, ...], values: Column, groups: int | tuple[int, ...]) -> Column:
    """Return the exact sum of each group's values; NumPy's `bincount` would add floats.

    Args:
        group: Index of each value's group, int64 (values,); for a result with several axes, one such column for each.
        values: Values to add up, int64 (values,).
        groups: Number of groups, or the shape of the result.

    Examples:
        >>> group_sums(np.array([0, 2, 2]), np.array([6, 1, 4]), 3).tolist()
        [6, 0, 5]
    """
    sums = np.zeros(groups, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


def span_numbers(first: Column, count: Column) -> tuple[Column, Column]:
    """Return the integers in several spans, ranges of consecutive integers, with the index of each integer's span.

    Args:
        first: First integer of each span, int64 (spans,).
        count: Length of each span, int64 (spans,).

    Returns:
        ``(span, number)``, int64 (integers,) each: the index of each integer's span, and the integer.

    Examples:
        >>> [column.tolist() for column in span_numbers(np.array([5, 0]), np.array([2, 1]))]
        [[0, 0, 1], [5, 6, 0]]
    """
    span = np.repeat(np.arange(count.size), count)
    return span, np.arange(span.size) + (first - np.cumsum(count) + count)[span]


def rows_of(columns: Record, rows: Column | NDArray[np.bool_] | slice) -> Record:
    """Return a record with only the given rows, in this order; a record is an object whose slots are all columns.

    Examples:
        >>> from shardtree.core.plans import Runs
        >>> rows_of(Runs(*(np.arange(3) for _ in range(5))), np.array([2, 0])).byte
        array([2, 0])
    """
    kind: Any = type(columns)
    all_columns = (getattr(columns, name) for name in kind.__slots__)
    # Row numbers go through `take`, which is several times as fast; slices and flags can't.
    is_plain = isinstance(rows, slice) or rows.dtype == np.bool_
    record: Record = kind(*(column[rows] if is_plain else column.take(rows, axis=0) for column in all_columns))
    return record


def joined_rows(parts: Sequence[Record]) -> Record:
    """Return one record with the concatenated columns of several records; all slots of their class are columns.

    Examples:
        >>> class Pairs:
        ...     __slots__ = ("left", "right")
        ...
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> both = joined_rows([Pairs(np.array([1]), np.array([2])), Pairs(np.array([3]), np.array([4]))])
        >>> both.left, both.right
        (array([1, 3]), array([2, 4]))
    """
    kind: Any = type(parts[0])
    record: Record = kind(*(np.concatenate([getattr(part, name) for part in parts]) for name in kind.__slots__))
    return record


def row_numbers(columns: Iterable[Column]) -> tuple[Column, int]:
    """Return each row's index among the sorted distinct rows, and the number of distinct rows.

    The columns of a row become one integer, which sorts many times faster than several columns.

    Args:
        columns: Columns of one length, the most significant first.

    Returns:
        The indices, int64 (rows,), and the count.

    Examples:
        >>> row_numbers([np.array([1, 0, 1]), np.array([7, 9, 7])])
        (array([1, 0, 1]), 2)
    """
    code, size = np.zeros(0, dtype=np.int64), 0
    for column in columns:
        column, width = _from_zero(column)
        code, size = (code, size) if size else (np.zeros(column.size, dtype=np.int64), 1)
        # Before the code could overflow, values are replaced by their indices among the distinct values, which are less
        # than the number of rows.
        if size * width > _ROOM:
            (code, size), (column, width) = _ranks(code), _ranks(column)
        code, size = code * width + column if width > 1 else code, size * width
    return _ranks(code)


def _from_zero(column: Column) -> tuple[Column, int]:
    """Return the column shifted to begin at 0 (or its `_ranks` if its range is too large), and its maximum plus one."""
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    return (column - low, high - low + 1) if high - low < _ROOM else _ranks(column)


def _ranks(values: Column) -> tuple[Column, int]:
    """Return each value's index among the sorted distinct values, and the number of distinct values."""
    # The order of equal values doesn't matter, so the default sort suffices, which is faster but not stable.
    order = np.argsort(values)
    new = begins(values[order])
    number = np.empty(values.size, dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return number, int(new.sum())
