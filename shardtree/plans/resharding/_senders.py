"""Who sends what: among the ranks that hold a box, so that the bytes that each one sends are level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...geometry import Column, volumes
from ...layouts import ShardColumns
from ._pieces import Pieces, as_routes, select_pieces
from ._places import Places
from ._transfers import Routes

_SWEEPS = 8
_MANY_SETS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """Pieces that one set of ranks holds, one behind the other, and where the line may be cut.

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
    """Parts of a line's pieces, with who sends each: item, first and last byte of it, rank, int64 (parts,) each."""

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
    parts = [_Parts(alone, np.zeros_like(alone), size[alone], sender), *_levelled(lines, load, shortest_cut)]
    item, begin, end, chosen = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("item", "begin", "end", "sender")
    )
    cut = _cut(pieces, item, begin, end, size)
    return as_routes(cut, places.row_at(cut.place, chosen))


def _cut(pieces: Pieces, item: Column, begin: Column, end: Column, size: Column) -> Pieces:
    """Return the parts of pieces that lie between two bytes of each, cut across their longest axis."""
    offset, shape = pieces.offset[item], pieces.shape[item]
    axis, rows = shape.argmax(axis=1), np.arange(item.size)
    row = size[item] // shape[rows, axis]
    offset[rows, axis] += begin // row
    shape[rows, axis] = (end - begin) // row
    return Pieces(pieces.target[item], pieces.place[item], offset, shape)


def _lines(places: Places, target: ShardColumns, pieces: Pieces, size: Column, row: Column) -> Iterator[_Line]:
    """Yield the pieces of each set of several holders, small sets first, pieces by place, then box, then who wants."""
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
        own = own[_canonical(select_pieces(pieces, own), set_of[pieces.place[own]], target)]
        ends = np.cumsum(np.bincount(set_of[pieces.place[own]], minlength=len(sets)))
        for holders, items in zip(sets, np.split(own, ends[:-1]), strict=True):
            yield _Line(items, size[items], row[items], holders)


def _canonical(pieces: Pieces, group: Column, target: ShardColumns) -> Column:
    """Return the order of pieces by group, place, box and rank: places are numbered by key, then box."""
    boxes = (*pieces.shape.T[::-1], *pieces.offset.T[::-1])
    vary = [column for column in boxes if (column != column[0]).any()]
    return np.lexsort((target.rank[pieces.target], *vary, pieces.place, group))


def _levelled(lines: list[_Line], load: Column, shortest_cut: int) -> list[_Parts]:
    """Return who sends what of each line, so that loads are level; each line is dealt again as the others change."""
    dealt: list[_Parts] = []
    for line in lines:
        dealt.append(_dealt(line, load[line.holders], shortest_cut))
        load = _with(load, dealt[-1], 1)
    for _ in range(_SWEEPS if 1 < len(lines) <= _MANY_SETS else 0):
        before = load
        for number, line in enumerate(lines):
            load = _with(load, dealt[number], -1)
            dealt[number] = _dealt(line, load[line.holders], shortest_cut)
            load = _with(load, dealt[number], 1)
        if np.array_equal(before, load):
            break
    return dealt


def _with(load: Column, parts: _Parts, sign: int) -> Column:
    changed = load.copy()
    np.add.at(changed, parts.sender, sign * (parts.end - parts.begin))
    return changed


def _dealt(line: _Line, load: Column, shortest_cut: int) -> _Parts:
    """Return a line's pieces with their senders: each holder gets a stretch, as long as levels its load."""
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
    """Return where a line is cut: at a row of the piece that a bound is in, or at its nearer end."""
    at = bounds - begin
    whole = np.where(2 * at > size, size, 0)
    rows = np.maximum(row, 1)
    cut = (at + rows // 2) // rows * rows
    cut = np.where(cut < shortest_cut, 0, np.where(size - cut < shortest_cut, size, cut))
    return begin + np.where(row > 0, cut, whole)


def _shares(load: Column, total: int) -> Column:
    """Return how a number of bytes is added to loads, so that the highest is as low as can be."""
    order = np.argsort(load, kind="stable")
    above = load[order] - load.min()
    needed = above * np.arange(load.size) - (np.cumsum(above) - above)
    count = int(np.searchsorted(needed, total, side="right"))
    level, more = divmod(total + int(above[:count].sum()), count)
    share = np.zeros_like(load)
    share[order[:count]] = level - above[:count] + (np.arange(count) < more)
    return share
