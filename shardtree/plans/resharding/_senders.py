"""Which rank sends what, among those that hold a box: chosen so that ranks send about as many bytes each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...geometry import Column, overlapping_pairs, rows_of, volumes
from ...layouts import ShardColumns
from ._pieces import Pieces, Places, as_routes
from ._transfers import Routes

_SWEEPS = 8
_MANY_SETS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """Pieces that one set of ranks holds, laid end to end as a line, and where the line may be cut.

    Attributes:
        item: the numbers of the pieces, int64 (items,).
        size: bytes, int64 (items,).
        row: the bytes that a piece is cut in multiples of; 0 where it isn't cut, int64 (items,).
        holders: ranks, ascending, int64 (holders,).
    """

    item: Column
    size: Column
    row: Column
    holders: Column


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Parts of a line's pieces, each with its sender: item, first byte, end, rank, int64 (parts,) each."""

    item: Column
    begin: Column
    end: Column
    sender: Column


def sent_routes(places: Places, target: ShardColumns, pieces: Pieces, shortest_cut: int) -> Routes:
    """Return pieces as routes from the ranks that send them.

    Args:
        places: where the source's shards lie.
        target: the shards of all ranks after.
        pieces: that their ranks don't hold, each at a place.
        shortest_cut: bytes; no part of a piece that is cut is shorter.
    """
    item_size = target.item_size[target.key[pieces.target]]
    size = volumes(pieces.shape) * item_size
    alone = np.flatnonzero(places.holders[pieces.place] == 1)
    sender = places.holder[places.first[pieces.place[alone]]]
    ranks = int(places.holder.max(initial=0)) + 1
    load = np.bincount(sender, weights=size[alone], minlength=ranks).astype(np.int64)
    row = np.where(size >= 2 * shortest_cut, size // pieces.shape.max(axis=1, initial=1), 0)
    lines = list(_lines(places, target, pieces, size, row))
    parts = [_Parts(alone, np.zeros_like(alone), size[alone], sender), *_assign_lines(lines, load, shortest_cut)]
    item, begin, end, chosen = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("item", "begin", "end", "sender")
    )
    cut = _cut_pieces(pieces, item, begin, end, size)
    return as_routes(cut, places.row_at(cut.place, chosen))


def _cut_pieces(pieces: Pieces, item: Column, begin: Column, end: Column, size: Column) -> Pieces:
    """Return the parts of pieces that lie between two bytes of each, cut across their longest axis."""
    offset, shape = pieces.offset[item], pieces.shape[item]
    axis, rows = shape.argmax(axis=1), np.arange(item.size)
    row = size[item] // shape[rows, axis]
    offset[rows, axis] += begin // row
    shape[rows, axis] = (end - begin) // row
    return Pieces(pieces.target[item], pieces.place[item], offset, shape)


def _lines(places: Places, target: ShardColumns, pieces: Pieces, size: Column, row: Column) -> Iterator[_Line]:
    """Yield the pieces of each set of several holders, small sets first, pieces by place, then box, then receiver."""
    used = np.unique(pieces.place)
    for count in np.unique(places.holders[used]).tolist():
        if count == 1:
            continue
        chosen = used[places.holders[used] == count]
        sets, number = np.unique(
            places.holder[places.first[chosen][:, None] + np.arange(count)], axis=0, return_inverse=True
        )
        set_of = np.full(len(places.main), -1, dtype=np.int64)
        set_of[chosen] = number.reshape(-1)
        own = np.flatnonzero(set_of[pieces.place] >= 0)
        own = own[_canonical(rows_of(pieces, own), set_of[pieces.place[own]], target)]
        ends = np.cumsum(np.bincount(set_of[pieces.place[own]], minlength=len(sets)))
        for holders, items in zip(sets, np.split(own, ends[:-1]), strict=True):
            yield _Line(items, size[items], row[items], holders)


def _canonical(pieces: Pieces, group: Column, target: ShardColumns) -> Column:
    """Return the order of pieces by group, place, box and rank: places are numbered by key, then box."""
    boxes = (*pieces.shape.T[::-1], *pieces.offset.T[::-1])
    # Columns with one value decide nothing, and a sort by them takes as long as by any other.
    vary = [column for column in boxes if (column != column[0]).any()]
    return np.lexsort((target.rank[pieces.target], *vary, pieces.place, group))


def _assign_lines(lines: list[_Line], load: Column, shortest_cut: int) -> list[_Parts]:
    """Return who sends what of each line, so that loads are level."""
    assigned: list[_Parts] = []
    for line in lines:
        assigned.append(_assign_line(line, load[line.holders], shortest_cut))
        load = _add_load(load, assigned[-1], 1)
    # The first pass sees only the loads of lines before. Sweeps assign each line anew under all others' loads, until
    # nothing changes; with very many sets that would take long.
    for _ in range(_SWEEPS if 1 < len(lines) <= _MANY_SETS else 0):
        before = load
        for number, line in enumerate(lines):
            load = _add_load(load, assigned[number], -1)
            assigned[number] = _assign_line(line, load[line.holders], shortest_cut)
            load = _add_load(load, assigned[number], 1)
        if np.array_equal(before, load):
            break
    return assigned


def _add_load(load: Column, parts: _Parts, sign: int) -> Column:
    changed = load.copy()
    np.add.at(changed, parts.sender, sign * (parts.end - parts.begin))
    return changed


def _assign_line(line: _Line, load: Column, shortest_cut: int) -> _Parts:
    """Return a line's pieces with their senders: each holder gets a interval whose length levels its load."""
    end = np.cumsum(line.size)
    begin = end - line.size
    bounds = np.cumsum(_shares(load, int(end[-1])))[:-1]
    inside = np.searchsorted(begin, bounds, side="right") - 1
    cuts = snapped(bounds, begin[inside], line.size[inside], line.row[inside], shortest_cut)
    edges = np.sort(np.concatenate([begin, cuts[cuts < end[-1]]]))
    edges = edges[np.append(True, edges[1:] > edges[:-1])]
    item = np.searchsorted(begin, edges, side="right") - 1
    sender = line.holders[np.searchsorted(cuts, edges, side="right")]
    stops = np.append(edges[1:], end[-1])
    return _Parts(line.item[item], edges - begin[item], stops - begin[item], sender)


def snapped(bounds: Column, begin: Column, size: Column, row: Column, shortest_cut: int) -> Column:
    """Return where a line is cut: at the row nearest to a bound inside its piece, or at the piece's nearer end."""
    at = bounds - begin
    whole = np.where(2 * at > size, size, 0)
    rows = np.maximum(row, 1)
    cut = (at + rows // 2) // rows * rows
    cut = np.where(cut < shortest_cut, 0, np.where(size - cut < shortest_cut, size, cut))
    return begin + np.where(row > 0, cut, whole)


def _shares(load: Column, total: int) -> Column:
    """Return how a number of bytes is added to loads, so that the highest becomes as low as possible."""
    order = np.argsort(load, kind="stable")
    above = load[order] - load.min()
    needed = above * np.arange(load.size) - (np.cumsum(above) - above)
    count = int(np.searchsorted(needed, total, side="right"))
    level, more = divmod(total + int(above[:count].sum()), count)
    share = np.zeros_like(load)
    share[order[:count]] = level - above[:count] + (np.arange(count) < more)
    return share


# Boxes cut until they are equal or disjoint.


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
    number, first = numbered_rows(_boxes(key, offset, shape))
    cuts = _cuts(key[first], offset[first], shape[first])
    # Repeated, since the pieces of a box that was cut may overlap others that the box's own cuts didn't meet.
    while any(box.size for box, _ in cuts):
        for axis, (box, at) in enumerate(cuts):
            piece, begin, size = _cut_along(number, offset[:, axis], shape[:, axis], box, at)
            row, number, offset, shape = row[piece], number[piece], offset[piece], shape[piece]
            offset[:, axis] += begin
            shape[:, axis] = size
        number, first = numbered_rows(_boxes(key[row], offset, shape))
        cuts = _cuts(key[row[first]], offset[first], shape[first])
    return AlignedBoxes(row, offset, shape, number)


def _boxes(key: Column, offset: Column, shape: Column) -> Column:
    return np.concatenate([shape[:, ::-1], offset[:, ::-1], key[:, None]], axis=1)


def numbered_rows(columns: Column) -> tuple[Column, Column]:
    """Return a number for each distinct row, in an arbitrary order, and where each occurs first.

    Examples:
        >>> numbered_rows(np.array([[2, 1], [3, 0], [2, 1]]))[0].tolist()
        [1, 0, 1]
    """
    # By a sort of columns: `np.unique` with an axis sorts rows as structured values, which is slower.
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
