"""Wanted shards cut into cells, of which any two of a tensor are equal or apart: one rank can read each for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..geometry import Column, distinct, shared_groups
from ..layouts import ShardColumns, select_rows, shard_boxes
from ._aligned import aligned_boxes, first_rows, grid_cells
from ._save import held_places

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
    turn = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return Cells(wanted, cells, np.repeat(np.arange(place.size), count), number[np.repeat(first, count) + turn])


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
