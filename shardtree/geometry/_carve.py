"""Boxes cut out of boxes: the pieces that one list takes of another, and the rest, as disjoint boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._boxes import Column, begins, distinct, intersect, volumes
from ._coverage import held_elements, tiled_groups
from ._pairs import overlapping_pairs, rows_with_elements

# Groups in which two boxes share an element. Input may be adversarial, so no number of boxes may lead to all pairs.

_FEW_TOGETHER = 64
"""Groups of at most so many boxes are compared in pairs, all groups at once; larger ones, if so many pairs for each
box suffice."""
_MOST_PAIRS = 1 << 18
"""Pairs that are tried at once, which bounds memory."""


def shared_groups(group: Column, offset: Column, shape: Column) -> Column:
    """Return the groups in which two boxes share an element, ascending.

    A group of many boxes is cut in two until each part is decided: by volumes that exceed the smallest box around
    them, or by trying its pairs, once they are few. So a million equal boxes take no longer than a million that tile.

    Args:
        group: the group that each box belongs to, int64 (boxes,).
        offset: int64 (boxes, axes).
        shape: int64 (boxes, axes).

    Examples:
        >>> offset, shape = np.array([[0], [2], [0], [1]]), np.array([[2], [2], [2], [2]])
        >>> shared_groups(np.array([0, 0, 1, 1]), offset, shape).tolist()
        [1]
    """
    rows = rows_with_elements(shape)
    rows = rows[np.argsort(group[rows], kind="stable")]
    rows = rows[_untiled(group[rows], offset.take(rows, axis=0), shape.take(rows, axis=0))]
    group, offset, shape = group[rows], offset.take(rows, axis=0), shape.take(rows, axis=0)
    first = np.flatnonzero(begins(group))
    names, count = group[first], np.diff(first, append=group.size)
    small = np.repeat(count <= _FEW_TOGETHER, count)
    left, right = overlapping_pairs(
        group[small], offset[small], shape[small], group[small], offset[small], shape[small]
    )
    ends = offset + shape
    large = [
        number
        for number, begin, size in zip(names.tolist(), first.tolist(), count.tolist(), strict=True)
        if size > _FEW_TOGETHER and _shared(offset[begin : begin + size], ends[begin : begin + size])
    ]
    return distinct(np.concatenate([group[small][left[left != right]], np.array(large, dtype=np.int64)]))


def _untiled(group: Column, offset: Column, shape: Column) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which boxes, sorted by group, are of groups that don't tile a box: only those may share elements."""
    number = np.cumsum(begins(group)) - 1
    groups = int(number[-1]) + 1 if number.size else 0
    is_tiled = tiled_groups(number, offset, shape, groups)
    return np.asarray(~is_tiled[number])


def _shared(begin: Column, end: Column) -> bool:
    """Return whether two of some boxes, none of them empty, share an element."""
    if len(begin) < 2 or _overfull(begin, end):
        return len(begin) > 1
    crossings = [_crossings(begin[:, axis], end[:, axis]) for axis in range(begin.shape[1])]
    axis = int(np.argmin(crossings))
    # Along some axis few boxes are side by side, as in grids: their pairs are cheaper than further cuts.
    if crossings[axis] <= _FEW_TOGETHER * len(begin):
        return _any_pair_meets(begin, end, axis)
    cut = _cut(begin, end)
    if cut is None:
        return _any_pair_meets(begin, end, axis)
    axis, at = cut
    low, high = begin[:, axis] < at, end[:, axis] > at
    before, after = end[low].copy(), begin[high].copy()
    before[:, axis], after[:, axis] = np.minimum(before[:, axis], at), np.maximum(after[:, axis], at)
    return _shared(begin[low], before) or _shared(after, end[high])


def _overfull(begin: Column, end: Column) -> bool:
    """Return whether boxes hold more elements than the smallest box around them."""
    around = (end.max(axis=0) - begin.min(axis=0)).astype(np.float64).prod()
    # By a margin, since these are sums of floats; what is within it is decided by pairs.
    return bool((end - begin).astype(np.float64).prod(axis=1).sum() > around * 1.001)


def _crossings(begin: Column, end: Column) -> int:
    """Return how many pairs of intervals share a point."""
    return int(np.searchsorted(np.sort(begin), end, side="left").sum()) - len(begin) * (len(begin) + 1) // 2


def _cut(begin: Column, end: Column) -> tuple[int, int] | None:
    """Return the axis and place of the cut that leaves the fewest boxes in the larger part; None if no cut helps."""
    best, most = None, len(begin)
    for axis in range(begin.shape[1]):
        at = int(np.median(np.concatenate([begin[:, axis], end[:, axis]])))
        parts = max(int((begin[:, axis] < at).sum()), int((end[:, axis] > at).sum()))
        if parts < most:
            best, most = (axis, at), parts
    return best


def _any_pair_meets(begin: Column, end: Column, axis: int) -> bool:
    """Return whether two boxes meet, trying pairs that do so on one axis."""
    order = np.argsort(begin[:, axis], kind="stable")
    begin, end = begin[order], end[order]
    count = np.searchsorted(begin[:, axis], end[:, axis], side="left") - np.arange(len(begin)) - 1
    before = np.concatenate([[0], np.cumsum(count)])
    # Few pairs at first, then more at a time: where boxes overlap, one of the first pairs mostly does.
    row, most = 0, _FEW_TOGETHER * _FEW_TOGETHER
    while row < len(begin):
        stop = max(row + 1, int(np.searchsorted(before, before[row] + most, side="right")) - 1)
        one = np.repeat(np.arange(row, stop), count[row:stop])
        other = np.arange(one.size) + before[row] - before[one] + one + 1
        if _any_meets(begin, end, one, other):
            return True
        row, most = stop, min(most * 4, _MOST_PAIRS)
    return False


def _any_meets(begin: Column, end: Column, one: Column, other: Column) -> bool:
    for axis in range(begin.shape[1]):
        low, high = begin[:, axis], end[:, axis]
        meets = np.flatnonzero((low[one] < high[other]) & (low[other] < high[one]))
        one, other = one.take(meets), other.take(meets)
    return one.size > 0


_FEW = 16
"""A box with more pairs is divided first: else each pair would be compared with all pieces left of the box."""

_Boxes = tuple[Column, Column, Column]
"""Identifiers of boxes, int64 (boxes,), and their offsets and shapes, int64 (boxes, axes) each."""


@dataclass(frozen=True, slots=True, eq=False)
class Carved:
    """What was cut out of boxes, and what is left of them; together exactly the boxes.

    Attributes:
        pair: the number of the pair that cut the piece out, int64 (taken,).
        offset: of the piece, int64 (taken, axes).
        shape: int64 (taken, axes).
        row: the box that a remaining piece belongs to, int64 (left,).
        rest_offset: int64 (left, axes).
        rest_shape: int64 (left, axes).
    """

    pair: Column
    offset: Column
    shape: Column
    row: Column
    rest_offset: Column
    rest_shape: Column


def carve_boxes(offset: Column, shape: Column, left: Column, cut_offset: Column, cut_shape: Column) -> Carved:
    """Return what other boxes cut out of some boxes, one after the other, and what they leave.

    A box's pairs are applied in the order given: an element goes to the first that has it. Cuts of a box that don't
    overlap each other stay whole.

    Args:
        offset: of the boxes, int64 (boxes, axes).
        shape: int64 (boxes, axes).
        left: the box of each pair, int64 (pairs,).
        cut_offset: of the pair's other box, int64 (pairs, axes).
        cut_shape: int64 (pairs, axes).

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
    tiled = apart & (held_elements(left[pair], hits[2], len(offset)) == volumes(shape))
    waits = np.flatnonzero(~tiled[left[pair]])
    row = np.flatnonzero(~tiled)
    taken, rest = _carve_in_order((row, offset[row], shape[row]), left[pair[waits]], _select(hits, waits))
    whole = _select(hits, np.flatnonzero(apart[left[pair]]))
    parts = _select(taken, np.flatnonzero(~apart[left[taken[0]]]))
    return Carved(*_concatenate([whole, parts]), *_in_order(*rest))


def _carve_in_order(boxes: _Boxes, left: Column, cuts: _Boxes) -> tuple[_Boxes, _Boxes]:
    """Return what cuts take of the boxes that they lie in, in order, and the rest.

    Args:
        boxes: identified by their rows, ascending.
        left: the row that each cut is of, int64 (cuts,).
        cuts: identified by their pairs.
    """
    (number, *places), node, cut = _divide(boxes, np.searchsorted(boxes[0], left), cuts)
    order = np.argsort(node, kind="stable")
    count = np.bincount(node, minlength=number.size)
    first = np.cumsum(count) - count
    live: _Boxes = (np.arange(number.size), places[0], places[1])
    taken, rest, step = [_select(cuts, order[:0])], [_select(live, order[:0])], 0
    while live[0].size:
        waits = step < count[live[0]]
        rest.append(_select(live, np.flatnonzero(~waits)))
        live = row, offset, shape = _select(live, np.flatnonzero(waits))
        now = cut[order[first[row] + step]]
        hit_offset, hit_shape = intersect(offset, shape, cuts[1][now], cuts[2][now])
        hit, missed = np.flatnonzero((hit_shape > 0).all(axis=1)), np.flatnonzero((hit_shape <= 0).any(axis=1))
        taken.append((cuts[0][now[hit]], hit_offset[hit], hit_shape[hit]))
        around = _rest_of_box(*_select(live, hit), hit_offset[hit], hit_shape[hit])
        live = _concatenate([_select(live, missed), *around])
        step += 1
    left_over = _concatenate(rest)
    return _concatenate(taken), (number[left_over[0]], *left_over[1:])


def _divide(boxes: _Boxes, node: Column, cuts: _Boxes) -> tuple[_Boxes, Column, Column]:
    """Return boxes divided along edges of cuts until each has few of them.

    Args:
        boxes: to be divided; a part keeps its box's identifier.
        node: the place of the box that each cut is in, int64 (cuts,).
        cuts: each within its box.

    Returns:
        ``(parts, node, cut)``: the parts, and for each part and each cut that it meets their places, int64 (pairs,);
        pairs of a part are in the order of the cuts.
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


def _middles(
    boxes: _Boxes, node: Column, offset: Column, shape: Column
) -> tuple[Column, Column, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Return, for each box, the axis along which most cuts have an edge inside, the middle edge, and if any exists."""
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
    """Return the lower parts of boxes that are cut across an axis, then the upper ones."""
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
    """Return a box without an inner one: slabs below and above it, along one axis after the other."""
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
