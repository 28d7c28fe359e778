"""Boxes cut so that those that overlap are the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...geometry import Column, overlapping_pairs


@dataclass(frozen=True, slots=True, eq=False)
class AlikeBoxes:
    """Boxes of which two of one tensor are the same, or have nothing in common.

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


def alike_boxes(key: Column, offset: Column, shape: Column) -> AlikeBoxes:
    """Return boxes cut along the edges of those that they overlap, until no edge is inside of a box.

    Args:
        key: the tensor that each belongs to, int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: without zeros, int64 (boxes, axes).

    Examples:
        >>> boxes = alike_boxes(np.array([0, 0]), np.array([[0], [2]]), np.array([[4], [4]]))
        >>> boxes.row.tolist(), boxes.offset.ravel().tolist(), boxes.number.tolist()
        ([0, 0, 1, 1], [0, 2, 2, 4], [0, 1, 1, 2])
    """
    row = np.arange(len(key))
    number, first = numbered_rows(_boxes(key, offset, shape))
    cuts = _cuts(key[first], offset[first], shape[first])
    while any(box.size for box, _ in cuts):
        for axis, (box, at) in enumerate(cuts):
            piece, begin, size = _cut(number, offset[:, axis], shape[:, axis], box, at)
            row, number, offset, shape = row[piece], number[piece], offset[piece], shape[piece]
            offset[:, axis] += begin
            shape[:, axis] = size
        number, first = numbered_rows(_boxes(key[row], offset, shape))
        cuts = _cuts(key[row[first]], offset[first], shape[first])
    return AlikeBoxes(row, offset, shape, number)


def _boxes(key: Column, offset: Column, shape: Column) -> Column:
    return np.concatenate([shape[:, ::-1], offset[:, ::-1], key[:, None]], axis=1)


def numbered_rows(columns: Column) -> tuple[Column, Column]:
    """Return a number for each distinct row, in no order that means anything, and where each occurs first.

    Examples:
        >>> numbered_rows(np.array([[2, 1], [3, 0], [2, 1]]))[0].tolist()
        [1, 0, 1]
    """
    order = np.lexsort(columns.T)
    new = np.ones(order.size, dtype=np.bool_)
    new[1:] = (columns[order[1:]] != columns[order[:-1]]).any(axis=1)
    number = np.empty(order.size, dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return number, order[new]


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


def _cut(number: Column, offset: Column, shape: Column, box: Column, at: Column) -> tuple[Column, Column, Column]:
    """Return what stretches are cut into: the row, the begin within it, and the size of each piece.

    Args:
        number: which box each row is, int64 (rows,).
        offset: of the stretch, int64 (rows,).
        shape: of the stretch, int64 (rows,).
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
