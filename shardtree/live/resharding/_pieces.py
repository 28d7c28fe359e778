"""The boxes that each rank wants, cut along the boxes that ranks hold, and the ranks that send them.

A place of the source is a tensor and a box of it, or a flat range of such a box, that some rank holds. Replicas are at
the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...core.geometry import (
    Column,
    Mask,
    carve_boxes,
    group_sums,
    intersect,
    joined_rows,
    overlapping_pairs,
    rows_of,
    volumes,
    widen,
)
from ...core.layouts import BoxColumns, ShardColumns, select_rows, shard_boxes
from ...core.plans import HeldLine, Parts, deal_out, find_holders, held_places, holder_sets
from ._transfers import Routes, renumber_keys

# Places of the source: each distinct box or flat range, with all ranks that hold a replica.


@dataclass(frozen=True, slots=True, eq=False)
class HeldPlaces:
    """The places of the source, and the ranks that hold each place.

    A place is a tensor and a box of it, or a flat range of such a box. Replicas are at the same place.

    Attributes:
        shards: One shard of each place; its `key` is an index into the keys of the target.
        main: Whether each place has a main replica, bool (places,).
        first: Index in `holder` and `row` at which each place begins; then the length of these, int64 (places + 1,).
        holder: Ranks that hold each place, ascending, place after place, int64 (holders,).
        row: Row in the plan's `source` of each holder's shard, int64 (holders,).
    """

    shards: ShardColumns
    main: Mask
    first: Column
    holder: Column
    row: Column

    @property
    def holders(self) -> Column:
        """Number of ranks that hold a shard at each place of the source, int64 (places,)."""
        return np.diff(self.first)

    def row_at(self, place: Column, rank: Column) -> Column:
        """Return the row in the plan's `source` of the shard for each pair of a place and a rank; -1 without a shard.

        Args:
            place: Index of each pair's place, int64 (pairs,).
            rank: Rank of each pair, int64 (pairs,).
        """
        ranks = int(max(self.holder.max(initial=0), rank.max(initial=0))) + 1
        # Holders are sorted by place, then rank: as one number, the pair is found by binary search.
        pairs = np.repeat(np.arange(len(self.main)), self.holders) * ranks + self.holder
        pair = place * ranks + rank
        at = np.minimum(np.searchsorted(pairs, pair), max(pairs.size - 1, 0))
        return np.where(pairs[at] == pair, self.row[at], -1) if pairs.size else np.full(place.size, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """The boxes of source shards that ranks hold, with a row for each box and each rank that holds it.

    Attributes:
        boxes: The boxes. Their `shard` is an index into the columns `holder` and `row` of `HeldPlaces`.
        key: Index of each box's tensor in the target's keys, int64 (boxes,).
        rank: Rank that holds the box, int64 (boxes,).
    """

    boxes: BoxColumns
    key: Column
    rank: Column


def find_holdings(places: HeldPlaces, mask: Mask) -> Holdings:
    """Return the boxes that ranks hold at the places of the source for which `mask` is true."""
    place = np.repeat(np.arange(len(mask)), places.holders)
    numbers = np.flatnonzero(mask[place])
    boxes = place_boxes(select_rows(places.shards, place[numbers]))
    number = numbers[boxes.shard]
    return Holdings(replace(boxes, shard=number), places.shards.key[place[number]], places.holder[number])


def find_places(source: ShardColumns, target: ShardColumns) -> HeldPlaces:
    """Return the distinct places of the source's shards, and the ranks that hold each place.

    Shards without elements, and shards of tensors that the target lacks, are left out.

    Args:
        source: Source shards of all ranks.
        target: Target shards; the source has all their keys.
    """
    source = renumber_keys(source, target)
    rows = np.flatnonzero((source.key >= 0) & (source.elements > 0))
    shards = select_rows(source, rows)
    place, places = held_places(shards)
    order = np.lexsort((shards.rank, place))
    new = np.ones(order.size, dtype=np.bool_)
    new[1:] = (place[order[1:]] != place[order[:-1]]) | (shards.rank[order[1:]] != shards.rank[order[:-1]])
    order = order[new]
    first = np.searchsorted(place[order], np.arange(places + 1))
    main = np.bincount(place[shards.main], minlength=places) > 0
    return HeldPlaces(select_rows(shards, order[first[:-1]]), main, first, shards.rank[order], rows[order])


def place_boxes(shards: ShardColumns) -> BoxColumns:
    """Return the boxes that make up shards. A flat range is made up of a few boxes."""
    return shard_boxes(shards.offset, shards.shape, shards.start, shards.stop)


def with_equal_axes(source: ShardColumns, target: ShardColumns) -> tuple[ShardColumns, ShardColumns]:
    """Return source and target with the same number of axes: the one with fewer axes is padded on the left."""
    axes = max(source.offset.shape[1], target.offset.shape[1])
    one, other = (
        replace(columns, offset=widen(columns.offset, axes, 0), shape=widen(columns.shape, axes, 1))
        for columns in (source, target)
    )
    return one, other


NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The target shards, cut into boxes. Each box lies within one place of the source, or no place was found for it.

    Attributes:
        target: Row of the target shard, int64 (pieces,).
        place: Index in `HeldPlaces` of the source's place that contains the box; -1 if none was found, int64 (pieces,).
        offset: Offset of the box in the global tensor, int64 (pieces, axes).
        shape: Shape of the box, int64 (pieces, axes).
    """

    target: Column
    place: Column
    offset: Column
    shape: Column

    def __len__(self) -> int:
        return len(self.target)


def cut_pieces(places: HeldPlaces, target: ShardColumns) -> Pieces:
    """Return the target shards, cut into pieces along the boxes of the source's main replicas.

    Pieces that no main replica covers have -1 in the column `place`.

    Args:
        places: Distinct boxes of the source's shards.
        target: Target shards of all ranks.
    """
    boxes = place_boxes(target)
    tiles = np.flatnonzero(places.main)
    main_boxes = place_boxes(select_rows(places.shards, tiles))
    key, main_key = target.key[boxes.shard], places.shards.key[tiles][main_boxes.shard]
    left, right = overlapping_pairs(key, boxes.offset, boxes.shape, main_key, main_boxes.offset, main_boxes.shape)
    offset, shape = intersect(boxes.offset[left], boxes.shape[left], main_boxes.offset[right], main_boxes.shape[right])
    pieces = Pieces(boxes.shard[left], tiles[main_boxes.shard[right]], offset, shape)
    short = np.flatnonzero(group_sums(left, volumes(shape), len(key)) < volumes(boxes.shape))
    nowhere = np.full(short.size, NOWHERE)
    lacking = Pieces(boxes.shard[short], nowhere, boxes.offset[short], boxes.shape[short])
    return joined_rows([pieces, carved_pieces(lacking, key[short], main_boxes, main_key)[2]])


def own_routes(places: HeldPlaces, target: ShardColumns, pieces: Pieces) -> tuple[Routes, Pieces]:
    """Return the routes within a rank, for elements that it wants and already holds, and the remaining pieces.

    Args:
        places: Distinct boxes of the source's shards.
        target: Target shards of all ranks.
        pieces: All wanted pieces.
    """
    row = places.row_at(pieces.place, target.rank[pieces.target])
    held_rows, others = np.flatnonzero(row >= 0), np.flatnonzero(row < 0)
    routes = as_routes(rows_of(pieces, held_rows), row[held_rows])
    pieces = rows_of(pieces, others)
    if places.main.all() or not len(pieces):
        return routes, pieces
    # Replicas may be cut otherwise than the main ones, and pieces follow the main ones: a rank may hold part of a
    # piece.
    holdings = find_holdings(places, ~places.main)
    parts, box, missing = carved_pieces(
        pieces, wanted_by(target, pieces), holdings.boxes, rank_groups(holdings.key, holdings.rank)
    )
    return joined_rows([routes, as_routes(parts, places.row[holdings.boxes.shard[box]])]), missing


def located_pieces(places: HeldPlaces, target: ShardColumns, pieces: Pieces) -> Pieces:
    """Return the pieces, with places also for elements that some rank holds, but no main replica has.

    A piece's place is the index in `places` of a source box that contains it, or -1 if no main replica covers the
    piece. A piece with -1 is cut along the source boxes without a main replica. Parts inside such a box get its index;
    other parts keep -1.

    Args:
        places: Distinct boxes of the source's shards.
        target: Target shards of all ranks.
        pieces: Pieces to get from other ranks.
    """
    nowhere = np.flatnonzero(pieces.place == NOWHERE)
    others = np.flatnonzero(~places.main)
    # In the usual case, main replicas hold everything.
    if not nowhere.size or not others.size:
        return pieces
    boxes = place_boxes(select_rows(places.shards, others))
    place = others[boxes.shard]
    lacking = rows_of(pieces, nowhere)
    parts, box, missing = carved_pieces(lacking, target.key[lacking.target], boxes, places.shards.key[place])
    main_pieces = rows_of(pieces, np.flatnonzero(pieces.place != NOWHERE))
    return joined_rows([main_pieces, replace(parts, place=place[box]), missing])


def repeat_routes(target: ShardColumns, pieces: Pieces) -> tuple[Routes, Pieces]:
    """Return routes of copies within a rank, for elements that several of its shards want, and the remaining pieces.

    One of these shards receives the elements from another rank (hop 0); the others then copy them from it (hop 1).

    Args:
        target: Target shards of all ranks.
        pieces: Wanted pieces.
    """
    group = wanted_by(target, pieces)
    order = np.lexsort((pieces.target, *pieces.shape.T[::-1], *pieces.offset.T[::-1], group))
    several = _in_mixed_groups(group[order], pieces.target[order])
    order = order[several]
    if not order.size:
        return as_routes(rows_of(pieces, order), order), pieces
    some, group = rows_of(pieces, order), group[order]
    # With this order, the plans of all ranks let the same one of several shards receive the elements.
    left, right = overlapping_pairs(group, some.offset, some.shape, group, some.offset, some.shape)
    later = (right < left) & (some.target[left] != some.target[right])
    left, right = left[later], right[later]
    cuts = carve_boxes(some.offset, some.shape, left, some.offset[right], some.shape[right])
    parts = Pieces(some.target[left[cuts.pair]], some.place[left[cuts.pair]], cuts.offset, cuts.shape)
    uncovered = Pieces(some.target[cuts.row], some.place[cuts.row], cuts.rest_offset, cuts.rest_shape)
    single = np.delete(np.arange(len(pieces)), order)
    routes = as_routes(parts, some.target[right[cuts.pair]], hop=1)
    return routes, joined_rows([rows_of(pieces, single), uncovered])


def _in_mixed_groups(group: Column, target: Column) -> Column:
    """Return the rows whose group occurs with more than one target shard; equal groups follow each other."""
    first = np.searchsorted(group, group)
    differs = target != target[first]
    return np.flatnonzero(np.isin(group, group[differs]))


def carved_pieces(pieces: Pieces, group: Column, boxes: BoxColumns, box_group: Column) -> tuple[Pieces, Column, Pieces]:
    """Cut pieces along boxes: return the parts that boxes cover, and the rest.

    Args:
        pieces: Pieces to cut.
        group: Group of each piece, int64 (pieces,); only boxes of the same group cut it.
        boxes: Boxes to cut along.
        box_group: Group of each box, int64 (boxes,).

    Returns:
        The covered parts, the row in `boxes` of the first box that covers each of them, and the uncovered parts.
    """
    left, right = overlapping_pairs(group, pieces.offset, pieces.shape, box_group, boxes.offset, boxes.shape)
    cuts = carve_boxes(pieces.offset, pieces.shape, left, boxes.offset[right], boxes.shape[right])
    row = left[cuts.pair]
    parts = Pieces(pieces.target[row], pieces.place[row], cuts.offset, cuts.shape)
    rest = Pieces(pieces.target[cuts.row], pieces.place[cuts.row], cuts.rest_offset, cuts.rest_shape)
    return parts, right[cuts.pair], rest


def wanted_by(target: ShardColumns, pieces: Pieces) -> Column:
    """Return a group number for each piece, from `rank_groups`; equal for pieces of one tensor that one rank wants."""
    return rank_groups(target.key[pieces.target], target.rank[pieces.target])


def rank_groups(key: Column, rank: Column) -> Column:
    """Return a number for each pair of key and rank, with the key in the lower 32 bits."""
    return rank << 32 | key


def as_routes(pieces: Pieces, source: Column, *, hop: int = 0) -> Routes:
    """Return a route for each piece, to the target shard that wants it.

    Args:
        pieces: Pieces to send.
        source: Row of each sending shard: in the plan's `source` at hop 0; in its `target` at later hops, where target
            shards pass on what they have received.
        hop: Hop of all routes.
    """
    return Routes(np.full(len(pieces), hop), source, pieces.target, pieces.offset, pieces.shape)


# A lower bound of the bytes to move between two layouts.


def least_bytes(source: ShardColumns, target: ShardColumns) -> int:
    """Return the fewest bytes that any plan moves: each element that a rank lacks counts once for that rank.

    Args:
        source: Shards of all ranks before the resharding, with as many axes as the target.
        target: Shards of all ranks after the resharding; the source has all their keys.
    """
    boxes = place_boxes(target)
    pieces = Pieces(boxes.shard, np.full(boxes.shard.size, NOWHERE), boxes.offset, boxes.shape)
    # A rank that wants an element in several shards receives it once, and copies it.
    _, pieces = repeat_routes(target, pieces)
    places = find_places(source, target)
    holdings = find_holdings(places, np.ones(len(places.main), dtype=np.bool_))
    _, _, lacking = carved_pieces(
        pieces, wanted_by(target, pieces), holdings.boxes, rank_groups(holdings.key, holdings.rank)
    )
    return int((volumes(lacking.shape) * target.item_size[target.key[lacking.target]]).sum())


def sent_routes(places: HeldPlaces, target: ShardColumns, pieces: Pieces, shortest_cut: int) -> Routes:
    """Return the routes of pieces from ranks that hold them; the choice of senders balances the bytes that ranks send.

    A large piece may be cut into parts that come from several ranks.

    Args:
        places: Distinct boxes of the source's shards.
        target: Target shards of all ranks.
        pieces: Pieces to get from other ranks, all with a known place.
        shortest_cut: Lower bound of the size of a cut piece's parts, in bytes.
    """
    item_size = target.item_size[target.key[pieces.target]]
    size = volumes(pieces.shape) * item_size
    alone = np.flatnonzero(places.holders[pieces.place] == 1)
    sender = places.holder[places.first[pieces.place[alone]]]
    ranks = int(places.holder.max(initial=0)) + 1
    row = np.where(size >= 2 * shortest_cut, size // pieces.shape.max(axis=1, initial=1), 0)
    lines = [*_lines(places, target, pieces, size, row)]
    parts = deal_out(Parts(alone, alone * 0, size[alone], sender), lines, np.zeros(ranks, dtype=np.int64), shortest_cut)
    cut = _cut_pieces(pieces, parts.item, parts.begin, parts.end, size)
    return as_routes(cut, places.row_at(cut.place, parts.sender))


def _cut_pieces(pieces: Pieces, item: Column, begin: Column, end: Column, size: Column) -> Pieces:
    """Return parts of pieces; each part is given as a byte range of its piece.

    Byte ranges count as if the piece's longest axis came first in memory, and are made of whole indices of this axis.

    Args:
        pieces: Pieces to cut.
        item: Row in `pieces` of each part's piece, int64 (parts,).
        begin: Offset of each part's first byte in its piece, int64 (parts,).
        end: Offset after each part's last byte, int64 (parts,).
        size: Size of each piece in bytes, int64 (pieces,).
    """
    offset, shape = pieces.offset[item], pieces.shape[item]
    axis, rows = shape.argmax(axis=1), np.arange(item.size)
    row = size[item] // shape[rows, axis]
    offset[rows, axis] += begin // row
    shape[rows, axis] = (end - begin) // row
    return Pieces(pieces.target[item], pieces.place[item], offset, shape)


def _lines(places: HeldPlaces, target: ShardColumns, pieces: Pieces, size: Column, row: Column) -> Iterator[HeldLine]:
    """Yield a line for each set of several ranks: the pieces that exactly these ranks hold. Smaller sets come first.

    Within a line, pieces are ordered by place, box, then receiver. `size` has the size of every piece in bytes; `row`
    has the granularity of its cuts in bytes, or 0 if it must stay whole.
    """
    is_used = np.zeros(len(places.main), dtype=np.bool_)
    is_used[pieces.place] = True
    holders = find_holders(np.repeat(np.arange(is_used.size), places.holders), places.holder, is_used)
    sets, set_of = [*holder_sets(holders)], np.full(is_used.size, -1)
    for number, (place, _) in enumerate(sets):
        set_of[place] = number
    selected = np.flatnonzero(set_of[pieces.place] >= 0)
    selected = selected[_canonical(rows_of(pieces, selected), set_of[pieces.place[selected]], target)]
    ends = np.cumsum(np.bincount(set_of[pieces.place[selected]], minlength=len(sets)))[:-1]
    # Without any sets, `split` returns one empty part.
    for (_, members), items in zip(sets, np.split(selected, ends), strict=False):
        yield HeldLine(items, size[items], row[items], members)


def _canonical(pieces: Pieces, group: Column, target: ShardColumns) -> Column:
    """Return the rows of pieces, sorted by group, place, box and the rank that wants the piece.

    Pieces have the same `group` if the same ranks hold them. The order is the same on all ranks.
    """
    boxes = (*pieces.shape.T[::-1], *pieces.offset.T[::-1])
    # A column with one value has no effect on the order, but costs as much as any other.
    vary = [column for column in boxes if (column != column[:1]).any()]
    return np.lexsort((target.rank[pieces.target], *vary, pieces.place, group))
