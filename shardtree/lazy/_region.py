"""Strided views of a dense row-major tensor, and the smallest box of it that holds a view's elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add, le, mul
from typing import NamedTuple

Shape = tuple[int, ...]


class Strided(NamedTuple):
    """Where a view's elements lie in the flat tensor: element ``i`` at ``offset + sum(i * stride)``."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Box(NamedTuple):
    """The rectangle of indices [offset, offset + shape)."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def row_major(shape: Shape) -> Shape:
    """Return the strides, in elements, of a dense tensor of this shape.

    Examples:
        >>> row_major((4, 6)), row_major(())
        ((6, 1), ())
    """
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def dense(shape: Shape) -> Strided:
    """Return the view that is the whole tensor.

    Examples:
        >>> dense((4, 6))
        Strided(offset=0, size=(4, 6), stride=(6, 1))
    """
    return Strided(0, shape, row_major(shape))


def narrowed(view: Strided, box: Box) -> Strided:
    """Return the part of a view that a box of its own indices picks.

    Examples:
        >>> narrowed(dense((4, 6)), Box((1, 2), (2, 3)))
        Strided(offset=8, size=(2, 3), stride=(6, 1))
    """
    return Strided(view.offset + _dot(box.offset, view.stride), box.shape, view.stride)


def rows(view: Strided, first: int, last: int) -> Strided:
    """Return the part of a view that a range of its first dimension's indices picks.

    Examples:
        >>> rows(dense((4, 6)), 1, 3)
        Strided(offset=6, size=(2, 6), stride=(6, 1))
    """
    return Strided(view.offset + first * view.stride[0], (last - first, *view.size[1:]), view.stride)


def covering(view: Strided, shape: Shape) -> tuple[Box, Strided]:
    """Return the box of a dense tensor that holds a view's elements, and the view as one of that box.

    Each stride is written in the tensor's own strides, so that it becomes a step along some dimensions. A dimension
    that the steps leave (one that a reshape merged into the one before it) is taken whole, which keeps the step
    into the one before it right. The box is the smallest one, but for steps across such merged dimensions.

    Args:
        view: the elements, at least one of them.
        shape: the dense tensor's.

    Examples:
        >>> covering(Strided(8, (3, 2), (1, 6)), (4, 6))  # rows 1 and 2, columns 2 to 4, transposed
        (Box(offset=(1, 2), shape=(2, 3)), Strided(offset=0, size=(3, 2), stride=(1, 3)))
        >>> covering(Strided(5, (2,), (1,)), (4, 6))  # the end of row 0 and the beginning of row 1
        (Box(offset=(0, 0), shape=(2, 6)), Strided(offset=5, size=(2,), stride=(1,)))
    """
    strides = row_major(shape)
    start = _steps(view.offset, strides)
    if view.stride == strides and all(map(le, map(add, start, view.size), shape)):
        return Box(start, view.size), dense(view.size)  # a box itself, as most are
    steps = [_steps(stride, strides) if size > 1 else (0,) * len(shape) for size, stride in zip(*view[1:], strict=True)]
    spans = [sum((size - 1) * step[dim] for size, step in zip(view.size, steps, strict=True)) for dim in _dims(shape)]
    box = _box(start, spans, shape)
    inner = row_major(box.shape)
    first = _dot([at - low for at, low in zip(start, box.offset, strict=True)], inner)
    return box, Strided(first, view.size, tuple(_dot(step, inner) for step in steps))


def _box(start: Shape, spans: Sequence[int], shape: Shape) -> Box:
    """Return the box from a first index, how far each dimension goes from there, and what overflows leftwards."""
    carry = 0
    ranges: list[tuple[int, int]] = []
    for dim in reversed(_dims(shape)):
        last = start[dim] + spans[dim] + carry
        carry = last // shape[dim]
        ranges.append((0, shape[dim]) if carry else (start[dim], last + 1 - start[dim]))
    return Box(tuple(low for low, _ in reversed(ranges)), tuple(length for _, length in reversed(ranges)))


def _steps(flat: int, strides: Shape) -> Shape:
    """Return a flat distance as one along each dimension."""
    steps = []
    for stride in strides:
        step, flat = divmod(flat, stride)
        steps.append(step)
    return tuple(steps)


def _dims(shape: Shape) -> range:
    return range(len(shape))


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(map(mul, left, right))
