"""Windows: boxes that tile a tensor, each small enough for a cache or for the memory that a read may take."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A first index and a shape."""


def slabs(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes of at most so many elements that tile a tensor, in row-major order; none of one without elements.

    Args:
        shape: the tensor's.
        most: elements in a box, 1 at least.

    Examples:
        >>> list(slabs((3, 4), 8)), list(slabs((2, 3), 2))[:2]
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], [((0, 0), (1, 2)), ((0, 2), (1, 1))])
    """
    size = prod(shape)
    if not size:
        return
    if size <= most:
        yield (0,) * len(shape), shape
        return
    rows = max(1, most * shape[0] // size)
    for start in range(0, shape[0], rows):
        count = min(rows, shape[0] - start)
        for offset, part in slabs(shape[1:], most) if rows == 1 else [((0,) * (len(shape) - 1), shape[1:])]:
            yield (start, *offset), (count, *part)


def slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of a box in its tensor.

    Examples:
        >>> slices((2, 0), (1, 4))
        (slice(2, 3, None), slice(0, 4, None))
    """
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
