"""Wanted shards cut into cells, of which any two of a tensor are equal or apart: one rank can read each for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..geometry import Column, distinct, overlapping_pairs, row_numbers, shared_groups, span_numbers
from ..layouts import ShardColumns, select_rows, shard_boxes
from ._save import held_places

# Boxes cut until any two of a tensor are equal or disjoint.


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
    row, turn = span_numbers(np.zeros_like(pieces), pieces)
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


MOST_CELLS = 16
"""The most cells that the boxes of a tensor are cut into, on average; where they would be more, they stay whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """What ranks want, in parts that each shard wants whole or not at all.

    Attributes:
        wanted: the shards, as given; one that stays whole though it overlaps others is of a tensor of its own.
        shards: the cells, each as one of the shards that want it would hold it alone.
        row: who wants a cell: a row of `wanted`, int64 (wants,).
        cell: which cell that is, int64 (wants,).
    """

    wanted: ShardColumns
    shards: ShardColumns
    row: Column
    cell: Column


def wanted_cells(columns: ShardColumns, *, is_cut: bool = True, most: int = MOST_CELLS) -> Cells:
    """Return the cells of shards: equal shards are one, and those that overlap are cut along each other's edges.

    Args:
        columns: the shards that all ranks want; those without elements have no cell.
        is_cut: whether shards are cut; if not, cells are shards.
        most: cells that each box of a tensor is cut into, on average; if they would be more, its shards stay whole.

    Examples:
        >>> import torch, shardtree as st
        >>> rows = [st.ShardedTensor("w", None, torch.int8, (2,), (3,), (at,), None) for at in (0, 1)]
        >>> cells = wanted_cells(st.layouts.shard_columns(rows))
        >>> cells.shards.offset.tolist(), cells.shards.shape.tolist(), cells.row.tolist(), cells.cell.tolist()
        ([[0], [1], [2]], [[1], [1], [1]], [0, 0, 1, 1], [0, 1, 1, 2])
    """
    place, places = held_places(columns)
    one = first_rows(place, places)  # equal shards are cut alike: one of each place stands for the others
    shards = select_rows(columns, one)
    boxes = shard_boxes(shards.offset, shards.shape, shards.start, shards.stop)
    overlapping = shared_groups(shards.key[boxes.shard], boxes.offset, boxes.shape)
    chosen = np.flatnonzero(np.isin(shards.key, overlapping)[boxes.shard] & (boxes.shape > 0).all(axis=1))
    key, offset, shape = shards.key[boxes.shard[chosen]], boxes.offset[chosen], boxes.shape[chosen]
    many = np.bincount(key, grid_cells(key, offset, shape), len(columns.keys)) > most * np.bincount(
        key, minlength=len(columns.keys)
    )
    whole = many[key] if is_cut else np.ones(key.size, dtype=np.bool_)
    wanted = _as_own_tensors(columns, place, distinct(boxes.shard[chosen[whole]]))
    cut = chosen[~whole]
    parts = aligned_boxes(key[~whole], offset[~whole], shape[~whole])
    kept = np.ones(places, dtype=np.bool_)
    kept[boxes.shard[cut]] = False
    rest = np.flatnonzero(kept & (shards.elements > 0))
    first = first_rows(parts.number, int(parts.number.max(initial=-1)) + 1)
    cells = select_rows(wanted, one[np.concatenate([rest, boxes.shard[cut[parts.row[first]]]])])
    cells.offset[rest.size :], cells.shape[rest.size :] = parts.offset[first], parts.shape[first]
    cells.start[rest.size :], cells.stop[rest.size :] = -1, -1
    # From the cells of places to those of all shards.
    of = np.concatenate([rest, boxes.shard[cut[parts.row]]])
    order = np.argsort(of, kind="stable")
    number = np.concatenate([np.arange(rest.size), rest.size + parts.number])[order]
    first, count = np.searchsorted(of[order], place), np.bincount(of, minlength=places)[place]
    row, at = span_numbers(first, count)
    return Cells(wanted, cells, row, number[at])


def _as_own_tensors(columns: ShardColumns, place: Column, alone: Column) -> ShardColumns:
    """Return shards of which those at some places are of tensors of their own: none shares elements with others."""
    if not alone.size:
        return columns
    key = columns.key.copy()
    at = np.minimum(np.searchsorted(alone, place), alone.size - 1)
    mine = alone[at] == place
    key[mine] = len(columns.keys) + at[mine]
    of = np.zeros(alone.size, dtype=np.int64)
    of[at[mine]] = columns.key[mine]
    names = [*columns.keys, *(columns.keys[each] for each in of.tolist())]
    # Numbered, all of them: a key with a number behind it might be another tensor's.
    keys = tuple(f"{number}: {name}" for number, name in enumerate(names))
    return replace(columns, keys=keys, kinds=(*columns.kinds, *(columns.kinds[each] for each in of.tolist())), key=key)
