"""Boxes cut until any two of a tensor are equal or disjoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..geometry import Column, overlapping_pairs, row_numbers


@dataclass(frozen=True, slots=True, eq=False)
class AlignedBoxes:
    """Boxes of which any two of one tensor are equal or disjoint.

    Attributes:
        row: the box that each is a piece of, int64 (pieces,).
        offset: int64 (pieces, axes).
        shape: int64 (pieces, axes).
        number: the same for equal boxes, ascending with nothing left out, int64 (pieces,).
    """

    row: Column
    offset: Column
    shape: Column
    number: Column


def aligned_boxes(key: Column, offset: Column, shape: Column) -> AlignedBoxes:
    """Return boxes cut along the edges of those that they overlap, until no edge is inside of a box.

    Args:
        key: the tensor that each belongs to, int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: without zeros, int64 (boxes, axes).

    Examples:
        >>> boxes = aligned_boxes(np.array([0, 0]), np.array([[0], [2]]), np.array([[4], [4]]))
        >>> boxes.row.tolist(), boxes.offset.ravel().tolist(), boxes.number.tolist()
        ([0, 0, 1, 1], [0, 2, 2, 4], [0, 1, 1, 2])
    """
    row = np.arange(len(key))
    number, first = distinct_boxes(key, offset, shape)
    cuts = _cuts(key[first], offset[first], shape[first])
    # Repeated, since the pieces of a box that was cut may overlap others that the box's own cuts didn't meet.
    while any(box.size for box, _ in cuts):
        for axis, (box, at) in enumerate(cuts):
            piece, begin, size = _cut_along(number, offset[:, axis], shape[:, axis], box, at)
            row, number, offset, shape = row[piece], number[piece], offset[piece], shape[piece]
            offset[:, axis] += begin
            shape[:, axis] = size
        number, first = distinct_boxes(key[row], offset, shape)
        cuts = _cuts(key[row[first]], offset[first], shape[first])
    return AlignedBoxes(row, offset, shape, number)


def distinct_boxes(key: Column, offset: Column, shape: Column) -> tuple[Column, Column]:
    """Return a number for each distinct box, ascending by key and place, and a row of each."""
    number, count = row_numbers((key, *offset.T, *shape.T))
    return number, first_rows(number, count)


def first_rows(number: Column, count: int) -> Column:
    """Return where each number occurs first, int64 (count,).

    Examples:
        >>> first_rows(np.array([1, 0, 1]), 2).tolist()
        [1, 0]
    """
    first = np.zeros(count, dtype=np.int64)
    first[number[::-1]] = np.arange(number.size)[::-1]
    return first


def _cuts(key: Column, offset: Column, shape: Column) -> list[tuple[Column, Column]]:
    """Return, for each axis, as (box, place), where boxes are cut by those that they overlap; no two are the same."""
    left, right = overlapping_pairs(key, offset, shape, key, offset, shape)
    left, right = left[left != right], right[left != right]
    found = []
    for axis in range(offset.shape[1]):
        begin, end = offset[:, axis], (offset + shape)[:, axis]
        box, at = np.tile(left, 2), np.concatenate([begin[right], end[right]])
        inside = (at > begin[box]) & (at < end[box])
        pairs = np.unique(np.stack([box[inside], at[inside]], axis=1), axis=0)
        found.append((pairs[:, 0], pairs[:, 1]))
    return found


def _cut_along(number: Column, offset: Column, shape: Column, box: Column, at: Column) -> tuple[Column, Column, Column]:
    """Return what intervals are cut into: the row, the begin within it, and the size of each piece.

    Args:
        number: which box each row is, int64 (rows,).
        offset: of the interval, int64 (rows,).
        shape: of the interval, int64 (rows,).
        box: what is cut, ascending, int64 (cuts,).
        at: where, ascending within a box, int64 (cuts,).
    """
    low, high = np.searchsorted(box, number, side="left"), np.searchsorted(box, number, side="right")
    pieces = high - low + 1
    row = np.repeat(np.arange(number.size), pieces)
    turn = np.arange(row.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    places = np.append(at, 0)
    before, after = (places[np.minimum(low[row] + turn + side, at.size)] - offset[row] for side in (-1, 0))
    begin = np.where(turn == 0, 0, before)
    return row, begin, np.where(turn == pieces[row] - 1, shape[row], after) - begin


def grid_cells(key: Column, offset: Column, shape: Column) -> NDArray[np.float64]:
    """Return into how many parts each box is cut by the edges of all boxes of its tensor, float64 (boxes,).

    Boxes that are aligned have no more. As floats: the product may be any number.

    Examples:
        >>> grid_cells(np.array([0, 0, 1]), np.array([[0], [2], [1]]), np.array([[4], [4], [1]])).tolist()
        [2.0, 2.0, 1.0]
    """
    cells = np.ones(key.size)
    for begin, size in zip(offset.T, shape.T, strict=True):
        edge, _ = row_numbers((np.tile(key, 2), np.concatenate([begin, begin + size])))
        cells *= edge[key.size :] - edge[: key.size]
    return cells
