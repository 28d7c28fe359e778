"""Work taken apart: a tensor into boxes that follow each other in row-major order, many things into groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import TypeVar

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A first index and a shape."""


def box_shape(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the shape of the largest box of whole rows that holds at most so many elements, one at least.

    Args:
        shape: the tensor's.
        most: elements in a box.

    Examples:
        >>> box_shape((10, 4, 6), 100), box_shape((10, 4, 6), 12), box_shape((10, 4, 6), 5)
        ((4, 4, 6), (1, 2, 6), (1, 1, 5))
    """
    for axis, size in enumerate(shape):
        row = prod(shape[axis + 1 :])
        if row <= most or axis == len(shape) - 1:
            return (1,) * axis + (min(size, max(1, most // max(row, 1))),) + shape[axis + 1 :]
    return ()


def boxes(shape: tuple[int, ...], cell: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of a grid, those at its ends perhaps smaller; none of a tensor without elements.

    Args:
        shape: the tensor's.
        cell: a box's, at least 1 along each axis that has elements.

    Examples:
        >>> list(boxes((3, 4), (2, 4)))
        [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    if not prod(shape):
        return
    for offset in product(*(range(0, size, step) for size, step in zip(shape, cell, strict=True))):
        ends = zip(offset, cell, shape, strict=True)
        yield offset, tuple(min(step, size - start) for start, step, size in ends)


def boxes_within(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes of at most so many elements, each a run of the row-major tensor, in order.

    Examples:
        >>> [offset for offset, _ in boxes_within((2, 3), 2)]
        [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    yield from boxes(shape, box_shape(shape, most))
