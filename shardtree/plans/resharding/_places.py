"""Where shards lie before resharding: places that replicas share, and who holds each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...geometry import Column, widen
from ...layouts import BoxColumns, ShardColumns, select_rows, shard_boxes
from .._save import Rows, held_places
from ._transfers import renumbered


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Boxes, or flat ranges of them, that ranks hold, each once, however many replicas there are.

    Attributes:
        shards: one shard of each place, keys numbered as in the target.
        main: whether a main replica lies there, bool (places,).
        first: where a place's holders begin in the columns below, int64 (places + 1,).
        holder: ranks, ascending within a place, int64 (holders,).
        row: the holder's shard in the plan's `source`, int64 (holders,).
    """

    shards: ShardColumns
    main: Rows
    first: Column
    holder: Column
    row: Column

    @property
    def holders(self) -> Column:
        """How many ranks hold each place, int64 (places,)."""
        return np.diff(self.first)

    def row_at(self, place: Column, rank: Column) -> Column:
        """Return the source row of the shard that a rank has at a place, -1 where it has none."""
        ranks = int(max(self.holder.max(initial=0), rank.max(initial=0))) + 1
        known = np.repeat(np.arange(len(self.main)), self.holders) * ranks + self.holder
        asked = place * ranks + rank
        at = np.minimum(np.searchsorted(known, asked), max(known.size - 1, 0))
        return np.where(known[at] == asked, self.row[at], -1) if known.size else np.full(place.size, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Boxes that places consist of, once for each rank that holds the place.

    Attributes:
        boxes: the boxes; their `shard` is the number of a place's holder, as in `Places.holder` and `Places.row`.
        key: the tensor of each box, int64 (boxes,).
        rank: who holds it, int64 (boxes,).
    """

    boxes: BoxColumns
    key: Column
    rank: Column


def find_holdings(places: Places, chosen: Rows) -> Holdings:
    """Return what ranks hold at the chosen places."""
    place = np.repeat(np.arange(len(chosen)), places.holders)
    numbers = np.flatnonzero(chosen[place])
    boxes = place_boxes(select_rows(places.shards, place[numbers]))
    number = numbers[boxes.shard]
    return Holdings(replace(boxes, shard=number), places.shards.key[place[number]], places.holder[number])


def find_places(source: ShardColumns, target: ShardColumns) -> Places:
    """Return the places of the tensors that the target wants, those without elements left out.

    Args:
        source: the shards of all ranks.
        target: what is wanted; all its keys are the source's too.
    """
    known = renumbered(source, target)
    rows = np.flatnonzero((known.key >= 0) & (source.elements > 0))
    shards = select_rows(known, rows)
    place, places = held_places(shards)
    order = np.lexsort((shards.rank, place))
    new = np.ones(order.size, dtype=np.bool_)
    new[1:] = (place[order[1:]] != place[order[:-1]]) | (shards.rank[order[1:]] != shards.rank[order[:-1]])
    order = order[new]
    first = np.searchsorted(place[order], np.arange(places + 1))
    main = np.bincount(place[shards.main], minlength=places) > 0
    return Places(select_rows(shards, order[first[:-1]]), main, first, shards.rank[order], rows[order])


def place_boxes(shards: ShardColumns) -> BoxColumns:
    """Return the boxes that shards consist of."""
    return shard_boxes(shards.offset, shards.shape, shards.start, shards.stop)


def of_equal_width(source: ShardColumns, target: ShardColumns) -> tuple[ShardColumns, ShardColumns]:
    """Return both with as many axes as the one that has more."""
    axes = max(source.offset.shape[1], target.offset.shape[1])
    one, other = (
        replace(columns, offset=widen(columns.offset, axes, 0), shape=widen(columns.shape, axes, 1))
        for columns in (source, target)
    )
    return one, other
