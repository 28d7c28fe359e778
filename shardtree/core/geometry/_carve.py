"""Boxes cut into smaller boxes: by other boxes, or along the edges of overlaps; and flat ranges cut into boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._boxes import Column, Mask, group_sums, intersect, row_major_strides, row_numbers, span_numbers, volumes
from ._coverage import shared_groups
from ._pairs import overlapping_pairs

_FEW = 16
"""Greatest number of cuts of a box that isn't divided first: each cut is compared with all remaining pieces."""

_Boxes = tuple[Column, Column, Column]
"""Identifiers of boxes, int64 (boxes,), and their offsets and shapes, int64 (boxes, axes) each."""


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """The result of `carve_boxes`: pieces cut out of boxes, and the remaining pieces; together they tile the boxes.

    Attributes:
        pair: Index of the pair, a box and a cutting box, that each piece comes from, int64 (pieces,).
        offset: Offset of each piece, int64 (pieces, axes).
        shape: Shape of each piece, int64 (pieces, axes).
        row: Row of the box that each remaining piece is a part of, int64 (remaining,).
        rest_offset: Offset of each remaining piece, int64 (remaining, axes).
        rest_shape: Shape of each remaining piece, int64 (remaining, axes).
    """

    pair: Column
    offset: Column
    shape: Column
    row: Column
    rest_offset: Column
    rest_shape: Column


def carve_boxes(offset: Column, shape: Column, left: Column, cut_offset: Column, cut_shape: Column) -> Cuts:
    """Cut pieces out of boxes, and return these pieces and the remaining ones.

    Each pair is a box and another box that cuts it. The pairs of a box are applied in order: an element goes to the
    first pair whose cutting box contains it. A pair may get several pieces. It gets at most one if the cutting boxes of
    its box don't overlap each other within this box.

    Args:
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, int64 (boxes, axes).
        left: Row in `offset` of the box that each pair cuts, int64 (pairs,).
        cut_offset: Offset of each pair's cutting box, int64 (pairs, axes).
        cut_shape: Shape of each pair's cutting box, int64 (pairs, axes).

    Examples:
        >>> carved = carve_boxes(*map(np.array, ([[0, 0]], [[2, 4]], [0], [[0, 1]], [[5, 2]])))
        >>> carved.offset.tolist(), carved.shape.tolist()
        ([[0, 1]], [[2, 2]])
        >>> carved.rest_offset.tolist(), carved.rest_shape.tolist()
        ([[0, 0], [0, 3]], [[2, 1], [2, 1]])
    """
    hit_offset, hit_shape = intersect(offset[left], shape[left], cut_offset, cut_shape)
    pair = np.flatnonzero((hit_shape > 0).all(axis=1))
    hits = pair, hit_offset[pair], hit_shape[pair]
    apart = np.ones(len(offset), dtype=np.bool_)
    apart[shared_groups(left[pair], *hits[1:])] = False
    # Boxes that their cuts tile need no carving: nothing remains of them, and the cuts stay whole.
    tiled = apart & (group_sums(left[pair], volumes(hits[2]), len(offset)) == volumes(shape))
    waits = np.flatnonzero(~tiled[left[pair]])
    row = np.flatnonzero(~tiled)
    pieces, remains = _carve_in_order((row, offset[row], shape[row]), left[pair[waits]], _select(hits, waits))
    whole = _select(hits, np.flatnonzero(apart[left[pair]]))
    parts = _select(pieces, np.flatnonzero(~apart[left[pieces[0]]]))
    return Cuts(*_concatenate([whole, parts]), *_in_order(*remains))


def _carve_in_order(boxes: _Boxes, left: Column, cuts: _Boxes) -> tuple[_Boxes, _Boxes]:
    """Return the pieces that cuts take out of their boxes, one cut after the other, and the remaining pieces.

    Args:
        boxes: Boxes; their identifiers ascend.
        left: Identifier of the box that each cut applies to, int64 (cuts,).
        cuts: Cuts, each a box within its box. A piece has the identifier of its cut.
    """
    (number, *places), node, cut = _divide(boxes, np.searchsorted(boxes[0], left), cuts)
    order = np.argsort(node, kind="stable")
    count = np.bincount(node, minlength=number.size)
    first = np.cumsum(count) - count
    live: _Boxes = (np.arange(number.size), places[0], places[1])
    pieces, remains, step = [_select(cuts, order[:0])], [_select(live, order[:0])], 0
    while live[0].size:
        waits = step < count[live[0]]
        remains.append(_select(live, np.flatnonzero(~waits)))
        live = row, offset, shape = _select(live, np.flatnonzero(waits))
        now = cut[order[first[row] + step]]
        hit_offset, hit_shape = intersect(offset, shape, cuts[1][now], cuts[2][now])
        hit, miss = np.flatnonzero((hit_shape > 0).all(axis=1)), np.flatnonzero((hit_shape <= 0).any(axis=1))
        pieces.append((cuts[0][now[hit]], hit_offset[hit], hit_shape[hit]))
        around = _rest_of_box(*_select(live, hit), hit_offset[hit], hit_shape[hit])
        live = _concatenate([_select(live, miss), *around])
        step += 1
    left_over = _concatenate(remains)
    return _concatenate(pieces), (number[left_over[0]], *left_over[1:])


def _divide(boxes: _Boxes, node: Column, cuts: _Boxes) -> tuple[_Boxes, Column, Column]:
    """Return boxes divided along edges of cuts, until few cuts overlap each part.

    Args:
        boxes: Boxes to divide; a part keeps its box's identifier.
        node: Index of the box that each cut applies to, int64 (cuts,).
        cuts: Cuts, each within its box.

    Returns:
        ``(parts, node, cut)``: the parts, and the indices of the part and the cut of each overlapping pair, int64
        (pairs,) each. The pairs of a part are in the order of the cuts.
    """
    cut, begin = np.arange(node.size), 0
    parts, nodes, members = [_select(boxes, cut[:0])], [cut[:0]], [cut[:0]]
    while boxes[0].size:
        axis, at, divides = _middles(boxes, node, cuts[1][cut], cuts[2][cut])
        # A box with few cuts is carved by them one after the other: dividing it would only make more pieces.
        divides &= np.bincount(node, minlength=boxes[0].size) > _FEW
        number, stays = np.cumsum(~divides) - 1, ~divides[node]
        parts.append(_select(boxes, np.flatnonzero(~divides)))
        nodes.append(begin + number[node[stays]])
        members.append(cut[stays])
        begin += len(parts[-1][0])
        number, node, cut = np.cumsum(divides) - 1, node[~stays], cut[~stays]
        low, high = cuts[1][cut, axis[node]] < at[node], (cuts[1] + cuts[2])[cut, axis[node]] > at[node]
        rows = np.flatnonzero(divides)
        boxes = _halves(_select(boxes, rows), axis[rows], at[rows])
        node, cut = np.append(number[node[low]], number[node[high]] + rows.size), np.append(cut[low], cut[high])
    return _concatenate(parts), np.concatenate(nodes), np.concatenate(members)


def _middles(boxes: _Boxes, node: Column, offset: Column, shape: Column) -> tuple[Column, Column, Mask]:
    """Return an axis and a coordinate at which to divide each box: the median of its cuts' edges.

    A cut is itself a box, with an `offset` and a `shape`; `node` has the index of the box that it applies to.

    Returns:
        ``(axis, at, divides)``, (boxes,) each: the axis with the most edges inside the box, the median of these edges,
        and whether there is an edge inside.
    """
    count, axes = boxes[0].size, range(offset.shape[1])
    edges, twice = np.concatenate([offset, offset + shape]), np.tile(node, 2)
    inside = (edges > boxes[1][twice]) & (edges < (boxes[1] + boxes[2])[twice])
    numbers = np.array([np.bincount(twice[inside[:, axis]], minlength=count) for axis in axes]).reshape(-1, count)
    axis = numbers.argmax(axis=0)
    rows = np.flatnonzero(inside[np.arange(twice.size), axis[twice]])
    group, place = twice[rows], edges[rows, axis[twice[rows]]]
    order = np.lexsort((place, group))
    many = numbers.max(axis=0)
    middle = np.append(place[order], 0)[np.searchsorted(group[order], np.arange(count)) + many // 2]
    return axis, middle, many > 0


def _halves(boxes: _Boxes, axis: Column, at: Column) -> _Boxes:
    """Divide each box along one axis at a coordinate, and return all lower parts, then all upper parts."""
    row, rows = boxes[0], np.arange(axis.size)
    offset, shape, upper, size = boxes[1].copy(), boxes[2].copy(), boxes[1].copy(), boxes[2].copy()
    upper[rows, axis] = at
    size[rows, axis] -= at - offset[rows, axis]
    shape[rows, axis] = at - offset[rows, axis]
    return _concatenate([(row, offset, shape), (row, upper, size)])


def _select(boxes: _Boxes, rows: Column) -> _Boxes:
    return boxes[0][rows], boxes[1][rows], boxes[2][rows]


def _rest_of_box(
    row: Column, offset: Column, shape: Column, inner_offset: Column, inner_shape: Column
) -> list[tuple[Column, Column, Column]]:
    """Return the parts of boxes outside of their inner boxes: slabs below and above these, axis by axis.

    Each item of the list has the slabs on one side of one axis: the rows of their boxes, their offsets and shapes.
    """
    offset, end = offset.copy(), offset + shape
    inner_end = inner_offset + inner_shape
    slabs = []
    for axis in range(offset.shape[1]):
        for low, high in ((offset, inner_offset), (inner_end, end)):
            rows = np.flatnonzero(low[:, axis] < high[:, axis])
            slab_offset, slab_end = offset[rows].copy(), end[rows].copy()
            slab_offset[:, axis], slab_end[:, axis] = low[rows, axis], high[rows, axis]
            slabs.append((row[rows], slab_offset, slab_end - slab_offset))
        offset[:, axis], end[:, axis] = inner_offset[:, axis], inner_end[:, axis]
    return slabs


def _concatenate(parts: list[tuple[Column, Column, Column]]) -> tuple[Column, Column, Column]:
    row, offset, shape = (np.concatenate(column) for column in zip(*parts, strict=True))
    return row, offset, shape


def _in_order(row: Column, offset: Column, shape: Column) -> tuple[Column, Column, Column]:
    order = np.lexsort((*offset.T[::-1], row))
    return row[order], offset[order], shape[order]


# Flat ranges, slices of a row-major flattened box, divided into boxes.


def flat_boxes(shape: Column, start: Column, stop: Column) -> tuple[Column, Column, Column, Column]:
    """Return the boxes that make up flat ranges, each of which is a slice of a row-major flattened box.

    A range has at most ``2 * axes - 1`` boxes, each contiguous in the range. In a matrix these are the end of a row,
    some whole rows, and the beginning of a row. With three axes, whole planes are in the middle, whole rows on both
    sides of them, and incomplete rows at both ends.

    Args:
        shape: Shape of each range's flattened box, int64 (ranges, axes).
        start: First element of each range in its flattened box, int64 (ranges,).
        stop: One past the last element, int64 (ranges,).

    Returns:
        ``(row, offset, shape, position)``: the index of each box's range; the box's offset within the flattened box;
        its shape; and the index of its first element in the range. Ordered by range, then position.

    Examples:
        >>> row, offset, part, position = flat_boxes(*map(np.array, ([[3, 4]], [2], [9])))
        >>> for columns in zip(offset.tolist(), part.tolist(), position.tolist()): print(*columns)
        [0, 2] [1, 2] 0
        [1, 0] [1, 4] 2
        [2, 0] [1, 1] 6
    """
    axes = shape.shape[1]
    # Boxes without elements have strides of 0, which can't be divisors.
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
            # All ranges advance together: the loop is over axes, not over ranges.
            cursor = np.maximum(cursor, until)
    return _sorted_pieces(pieces, axes)


def _axis_boxes(
    shape: Column, strides: Column, axis: int, rows: Column, begin: Column, until: Column, start: Column
) -> tuple[Column, Column, Column, Column]:
    """Return, for each flat range, its elements from `begin` to ``until - 1`` as a box.

    The box has size 1 along the axes before `axis`, and the whole size along the axes after it. `shape` and `strides`
    describe each range's flattened box; `begin`, `until` and `start`, the range's first element, are positions in it.
    `rows` are the indices of the ranges. The result has the columns ``(row, offset, shape, position)`` of `flat_boxes`.
    """
    offset = begin[:, None] // strides % np.maximum(shape, 1)
    part = shape.copy()
    part[:, :axis] = 1
    part[:, axis] = (until - begin) // strides[:, axis]
    return rows, offset, part, begin - start


def _sorted_pieces(
    pieces: list[tuple[Column, Column, Column, Column]], axes: int
) -> tuple[Column, Column, Column, Column]:
    if not pieces:
        empty = np.zeros(0, dtype=np.int64)
        return empty, np.zeros((0, axes), dtype=np.int64), np.zeros((0, axes), dtype=np.int64), empty
    row, offset, part, position = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.lexsort((position, row))
    return row[order], offset[order], part[order], position[order]


# Boxes cut until any two boxes of a tensor are equal or disjoint.


@dataclass(frozen=True, slots=True, eq=False)
class AlignedBoxes:
    """Boxes cut so that any two boxes of one tensor are equal or disjoint.

    Attributes:
        row: Row of the box that each piece comes from, int64 (pieces,).
        offset: Offset of each piece, int64 (pieces, axes).
        shape: Shape of each piece, int64 (pieces, axes).
        number: Index of each piece among the distinct pieces of all tensors, int64 (pieces,); equal pieces share it.
    """

    row: Column
    offset: Column
    shape: Column
    number: Column


def aligned_boxes(key: Column, offset: Column, shape: Column) -> AlignedBoxes:
    """Return boxes cut along the edges of the boxes that they overlap, until no edge is inside of a box.

    Args:
        key: Index of the tensor that each box belongs to, int64 (boxes,).
        offset: Offset of each box, int64 (boxes, axes).
        shape: Shape of each box, without zeros, int64 (boxes, axes).

    Examples:
        >>> boxes = aligned_boxes(np.array([0, 0]), np.array([[0], [2]]), np.array([[4], [4]]))
        >>> boxes.row.tolist(), boxes.offset.ravel().tolist(), boxes.number.tolist()
        ([0, 0, 1, 1], [0, 2, 2, 4], [0, 1, 1, 2])
    """
    row = np.arange(len(key))
    number, first = distinct_boxes(key, offset, shape)
    cuts = _cuts(key[first], offset[first], shape[first])
    # Cutting repeats, since pieces of two boxes may still overlap without being equal.
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
    """Return each box's index among the distinct boxes, and one row of each distinct box.

    Boxes are equal if key, offset and shape are; the distinct boxes are ordered by key, then offset, then shape.
    """
    number, count = row_numbers((key, *offset.T, *shape.T))
    return number, first_rows(number, count)


def first_rows(number: Column, count: int) -> Column:
    """Return the position at which each of the numbers 0 to ``count - 1`` first occurs in `number`, int64 (count,).

    Examples:
        >>> first_rows(np.array([1, 0, 1]), 2).tolist()
        [1, 0]
    """
    first = np.zeros(count, dtype=np.int64)
    first[number[::-1]] = np.arange(number.size)[::-1]
    return first


def _cuts(key: Column, offset: Column, shape: Column) -> list[tuple[Column, Column]]:
    """Return, for each axis, the coordinates at which to cut boxes, as ``(box, at)``, int64 (cuts,) each.

    `box` is the row of a box, and `at` a coordinate inside it, where an overlapping box of its tensor has an edge.
    """
    left, right = overlapping_pairs(key, offset, shape, key, offset, shape)
    left, right = left[left != right], right[left != right]
    cuts = []
    for axis in range(offset.shape[1]):
        begin, end = offset[:, axis], (offset + shape)[:, axis]
        box, at = np.tile(left, 2), np.concatenate([begin[right], end[right]])
        inside = (at > begin[box]) & (at < end[box])
        pairs = np.unique(np.stack([box[inside], at[inside]], axis=1), axis=0)
        cuts.append((pairs[:, 0], pairs[:, 1]))
    return cuts


def _cut_along(number: Column, offset: Column, shape: Column, box: Column, at: Column) -> tuple[Column, Column, Column]:
    """Return the pieces into which cuts divide the sides of boxes along one axis.

    Args:
        number: Number of the box that has each side, int64 (sides,).
        offset: Begin of each side, int64 (sides,).
        shape: Length of each side, int64 (sides,).
        box: Number of the box that each cut divides, ascending, int64 (cuts,).
        at: Coordinate of each cut, ascending within a box, int64 (cuts,).

    Returns:
        ``(row, begin, size)``, int64 (pieces,) each: the row of each piece's side, its begin relative to that side, and
        its length.
    """
    low, high = np.searchsorted(box, number, side="left"), np.searchsorted(box, number, side="right")
    pieces = high - low + 1
    row, turn = span_numbers(np.zeros_like(pieces), pieces)
    places = np.append(at, 0)
    before, after = (places[np.minimum(low[row] + turn + side, at.size)] - offset[row] for side in (-1, 0))
    begin = np.where(turn == 0, 0, before)
    return row, begin, np.where(turn == pieces[row] - 1, shape[row], after) - begin


def grid_cells(key: Column, offset: Column, shape: Column) -> NDArray[np.float64]:
    """Return the number of cells in each box if all edges of its tensor's boxes formed a grid, float64 (boxes,).

    `aligned_boxes` cuts a box into at most this many pieces. The numbers are floats, as a product may exceed an int64.

    Examples:
        >>> grid_cells(np.array([0, 0, 1]), np.array([[0], [2], [1]]), np.array([[4], [4], [1]])).tolist()
        [2.0, 2.0, 1.0]
    """
    cells = np.ones(key.size)
    for begin, size in zip(offset.T, shape.T, strict=True):
        edge, _ = row_numbers((np.tile(key, 2), np.concatenate([begin, begin + size])))
        cells *= edge[key.size :] - edge[: key.size]
    return cells
