"""Which rank sends what, among those that hold a box: chosen so that ranks send about as many bytes each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...geometry import Column, rows_of, volumes
from ...layouts import ShardColumns
from .._level import Line, Parts, dealt_out
from .._save import find_holders, holder_sets
from ._pieces import Pieces, Places, as_routes
from ._transfers import Routes


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
    row = np.where(size >= 2 * shortest_cut, size // pieces.shape.max(axis=1, initial=1), 0)
    lines = [*_lines(places, target, pieces, size, row)]
    parts = dealt_out(
        Parts(alone, alone * 0, size[alone], sender), lines, np.zeros(ranks, dtype=np.int64), shortest_cut
    )
    cut = _cut_pieces(pieces, parts.item, parts.begin, parts.end, size)
    return as_routes(cut, places.row_at(cut.place, parts.sender))


def _cut_pieces(pieces: Pieces, item: Column, begin: Column, end: Column, size: Column) -> Pieces:
    """Return the parts of pieces that lie between two bytes of each, cut across their longest axis."""
    offset, shape = pieces.offset[item], pieces.shape[item]
    axis, rows = shape.argmax(axis=1), np.arange(item.size)
    row = size[item] // shape[rows, axis]
    offset[rows, axis] += begin // row
    shape[rows, axis] = (end - begin) // row
    return Pieces(pieces.target[item], pieces.place[item], offset, shape)


def _lines(places: Places, target: ShardColumns, pieces: Pieces, size: Column, row: Column) -> Iterator[Line]:
    """Yield the pieces of each set of several holders, small sets first, pieces by place, then box, then receiver."""
    used = np.zeros(len(places.main), dtype=np.bool_)
    used[pieces.place] = True
    held = find_holders(np.repeat(np.arange(used.size), places.holders), places.holder, used)
    sets, set_of = [*holder_sets(held)], np.full(used.size, -1)
    for number, (chosen, _) in enumerate(sets):
        set_of[chosen] = number
    own = np.flatnonzero(set_of[pieces.place] >= 0)
    own = own[_canonical(rows_of(pieces, own), set_of[pieces.place[own]], target)]
    ends = np.cumsum(np.bincount(set_of[pieces.place[own]], minlength=len(sets)))[:-1]
    # Of no sets, `split` gives one empty part.
    for (_, holders), items in zip(sets, np.split(own, ends), strict=False):
        yield Line(items, size[items], row[items], holders)


def _canonical(pieces: Pieces, group: Column, target: ShardColumns) -> Column:
    """Return the order of pieces by group, place, box and rank: places are numbered by key, then box."""
    boxes = (*pieces.shape.T[::-1], *pieces.offset.T[::-1])
    # Columns with one value decide nothing, and a sort by them takes as long as by any other.
    vary = [column for column in boxes if (column != column[:1]).any()]
    return np.lexsort((target.rank[pieces.target], *vary, pieces.place, group))
