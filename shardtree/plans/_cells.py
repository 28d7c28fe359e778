"""Wanted shards cut into cells, of which any two are equal or apart: each can be read by one rank for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry import Column, distinct, row_numbers, shared_groups, volumes
from ..layouts import ShardColumns
from ._save import Rows, held_places

MOST_CELLS = 16
"""The most cells that the boxes of a tensor are cut into, on average; where they would be more, they stay whole."""

_MOST_ROWS = 2**18
"""Shards that are compared at once, if a single tensor hasn't more."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """What ranks want, in parts that each rank wants whole or not at all.

    Attributes:
        key: the tensor, numbered as in the columns of the shards, int64 (cells,).
        offset: in the tensor, right-aligned, int64 (cells, axes).
        shape: int64 (cells, axes).
        start: first element of the flat range of that box, -1 for all of it, int64 (cells,).
        stop: int64 (cells,).
        row: who wants a cell: a shard, a row of the columns, int64 (wants,).
        cell: which cell that is, int64 (wants,).
    """

    key: Column
    offset: Column
    shape: Column
    start: Column
    stop: Column
    row: Column
    cell: Column

    @property
    def elements(self) -> Column:
        """How many elements each cell has, int64 (cells,)."""
        return np.where(self.start >= 0, self.stop - self.start, volumes(self.shape))


def wanted_cells(columns: ShardColumns, *, is_cut: bool = True, most: int = MOST_CELLS) -> Cells:
    """Return the cells of shards: equal shards are one, and boxes that overlap are cut along each other's edges.

    Flat ranges aren't cut, nor boxes of a tensor that would be cut into too many cells: where these overlap, some
    elements are in several cells.

    Args:
        columns: the shards that all ranks want.
        is_cut: whether boxes are cut; if not, cells are shards.
        most: cells that each box of a tensor is cut into, on average.

    Examples:
        >>> import torch, shardtree as st
        >>> rows = [st.ShardedTensor("w", None, torch.int8, (2,), (3,), (at,), None) for at in (0, 1)]
        >>> cells = wanted_cells(st.layouts.shard_columns(rows))
        >>> cells.offset.tolist(), cells.shape.tolist(), cells.row.tolist(), cells.cell.tolist()
        ([[0], [1], [2]], [[1], [1], [1]], [0, 0, 1, 1], [0, 1, 1, 2])
    """
    place, places = held_places(columns)
    # Equal shards are cut alike: one of each place stands for the others.
    one = np.zeros(places, dtype=np.int64)
    one[place] = np.arange(place.size)
    whole = Cells(
        columns.key[one],
        columns.offset.take(one, axis=0),
        columns.shape.take(one, axis=0),
        columns.start[one],
        columns.stop[one],
        np.arange(place.size),
        place,
    )
    boxes = np.flatnonzero((whole.start < 0) & (volumes(whole.shape) > 0))
    key, offset, shape = whole.key[boxes], whole.offset.take(boxes, axis=0), whole.shape.take(boxes, axis=0)
    chosen = np.isin(key, shared_groups(key, offset, shape)) if is_cut else np.zeros(key.size, dtype=np.bool_)
    if not chosen.any():
        return whole
    return _cut(whole, boxes[chosen], most)


def wanted_apart(columns: ShardColumns) -> Rows:
    """Return the tensors of which no two shards share an element, bool (keys,); none with flat ranges is one.

    Examples:
        >>> import torch, shardtree as st
        >>> rows = [st.ShardedTensor(key, None, torch.int8, (2,), (4,), (at,), None) for key in "ab" for at in (0, 2)]
        >>> wanted_apart(st.layouts.shard_columns([*rows, rows[0]])).tolist()
        [False, True]
    """
    apart = np.ones(len(columns.keys), dtype=np.bool_)
    apart[columns.key[columns.start >= 0]] = False
    # Some tensors at a time: comparing takes several times the memory of the columns.
    order = np.argsort(columns.key, kind="stable")
    for rows in np.split(order, _ends(columns.key[order])):
        apart[shared_groups(columns.key[rows], columns.offset.take(rows, axis=0), columns.shape.take(rows, axis=0))] = (
            False
        )
    return apart


def _ends(key: Column) -> Column:
    """Return where to split sorted keys, none of them in two, into parts of about `_MOST_ROWS`."""
    return distinct(np.searchsorted(key, key[_MOST_ROWS::_MOST_ROWS]))


def _cut(whole: Cells, boxes: Column, most: int) -> Cells:
    """Return cells of which some boxes, all of those tensors, are cut along all edges of their tensor's boxes."""
    key, offset, shape = whole.key[boxes], whole.offset.take(boxes, axis=0), whole.shape.take(boxes, axis=0)
    grid = [_edges(key, offset[:, axis], shape[:, axis]) for axis in range(offset.shape[1])]
    first = np.stack([low for low, _, _ in grid], axis=1)
    count = np.stack([high for _, high, _ in grid], axis=1) - first
    # As floats: before it is known whether they are too many, the product may be any number.
    total = count.astype(np.float64).prod(axis=1)
    few = np.bincount(key, weights=total)[key] <= most * np.bincount(key)[key]
    boxes, first, count = boxes[few], first[few], count[few]
    pieces = volumes(count)
    of = np.repeat(np.arange(boxes.size), pieces)
    number = np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    index = np.zeros((of.size, len(grid)), dtype=np.int64)
    for axis in range(len(grid) - 1, -1, -1):
        number, at = np.divmod(number, count[of, axis])
        index[:, axis] = first[of, axis] + at
    # Edges are numbered through all tensors, so that equal indices are the same cell of the same tensor.
    cell, cells = row_numbers(index.T)
    one = np.zeros(cells, dtype=np.int64)
    one[cell] = np.arange(cell.size)
    begin, end = (
        np.stack([edge[index[one, axis] + step] for axis, (_, _, edge) in enumerate(grid)], axis=1) for step in (0, 1)
    )
    return _with_cells(whole, boxes, of, cell, (whole.key[boxes[of[one]]], begin, end - begin))


def _edges(key: Column, begin: Column, size: Column) -> tuple[Column, Column, Column]:
    """Return the numbers of each box's two edges along an axis, among those of all tensors, and where these are."""
    edge = np.concatenate([begin, begin + size])
    number, count = row_numbers((np.concatenate([key, key]), edge))
    place = np.zeros(count, dtype=np.int64)
    place[number] = edge
    return number[: begin.size], number[begin.size :], place


def _with_cells(whole: Cells, boxes: Column, of: Column, cell: Column, new: tuple[Column, Column, Column]) -> Cells:
    """Return cells of which boxes are replaced by what they are cut into.

    Args:
        whole: all, one for each place.
        boxes: those that are replaced.
        of: for each part of a box, which of these it belongs to, ascending.
        cell: which new cell it is.
        new: key, offset and shape of the new cells.
    """
    kept = np.ones(whole.key.size, dtype=np.bool_)
    kept[boxes] = False
    rest = np.flatnonzero(kept)
    key, offset, shape = new
    none = np.full(key.size, -1)
    # What each place is now, one after the other: itself, or the parts of its box.
    places, parts = np.concatenate([rest, boxes[of]]), np.concatenate([np.arange(rest.size), rest.size + cell])
    order = np.argsort(places, kind="stable")
    places, parts = places[order], parts[order]
    count = np.bincount(places, minlength=whole.key.size)
    first = np.cumsum(count) - count
    wants = count[whole.cell]
    row = np.repeat(np.arange(whole.row.size), wants)
    turn = np.arange(row.size) - np.repeat(np.cumsum(wants) - wants, wants)
    return Cells(
        np.concatenate([whole.key[rest], key]),
        np.concatenate([whole.offset[rest], offset]),
        np.concatenate([whole.shape[rest], shape]),
        np.concatenate([whole.start[rest], none]),
        np.concatenate([whole.stop[rest], none]),
        row,
        parts[first[whole.cell[row]] + turn],
    )
