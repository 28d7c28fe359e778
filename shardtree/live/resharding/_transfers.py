"""Transfers: boxes that go from one shard's memory to another's, in columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.geometry import Column, row_major_strides, volumes
from ...core.layouts import ROWS, ShardColumns, select_rows


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Boxes that go from one rank's shard to another's, or to another shard of the same rank, one a row.

    A shard's data is counted in elements of its row-major memory, a flat shard's in the order of its range.

    Where two shards of a rank want the same elements, one of them gets them at hop 0; the other one's come from it at
    hop 1, and nothing moves between ranks.

    Attributes:
        hop: 0 where it comes from a source shard; 1 or more where it comes from a target shard, whose row `source` is
            then, and which has these elements from earlier hops.
        source: the row of the shard that it comes from, in the plan's `source` (or `target`), int64 (transfers,).
        target: the row of the shard that it goes to, in the plan's `target`, int64 (transfers,).
        from_rank: who has it, int64 (transfers,).
        to_rank: who gets it; the same rank, where nothing moves, int64 (transfers,).
        key: the tensor, numbered as in the plan's `target.keys`, int64 (transfers,).
        offset: of the box in the global tensor, right-aligned, int64 (transfers, axes).
        shape: of the box, int64 (transfers, axes).
        nbytes: its bytes, int64 (transfers,).
        source_element: where its first element lies in the data of the shard that it comes from, int64 (transfers,).
        source_stride: of that data, in elements along each axis, int64 (transfers, axes).
        target_element: where its first element goes, int64 (transfers,).
        target_stride: likewise, int64 (transfers, axes).
    """

    hop: Column
    source: Column
    target: Column
    from_rank: Column
    to_rank: Column
    key: Column
    offset: Column
    shape: Column
    nbytes: Column
    source_element: Column
    source_stride: Column
    target_element: Column
    target_stride: Column

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Which box goes from which shard to which; all else about a transfer follows from it.

    Attributes:
        hop: int64 (routes,).
        source: row in the plan's `source`, or in its `target` at hop 1 and later, int64 (routes,).
        target: row in the plan's `target`, int64 (routes,).
        offset: int64 (routes, axes).
        shape: int64 (routes, axes).
    """

    hop: Column
    source: Column
    target: Column
    offset: Column
    shape: Column


def as_transfers(source: ShardColumns, target: ShardColumns, routes: Routes) -> Transfers:
    """Return routes as transfers, in their order: by hop, to_rank, target, offset.

    Args:
        source: the shards of all ranks before, of as many axes as the target.
        target: the shards of all ranks after.
        routes: in any order.
    """
    order = np.lexsort((*routes.offset.T[::-1], routes.target, target.rank[routes.target], routes.hop))
    hop, source_row, target_row = routes.hop[order], routes.source[order], routes.target[order]
    offset, shape = routes.offset[order], routes.shape[order]
    before, after = sending_shards(source, target, hop, source_row), select_rows(target, target_row)
    source_element, source_stride = shard_memory(before, offset)
    target_element, target_stride = shard_memory(after, offset)
    return Transfers(
        hop=hop,
        source=source_row,
        target=target_row,
        from_rank=before.rank,
        to_rank=after.rank,
        key=after.key,
        offset=offset,
        shape=shape,
        nbytes=volumes(shape) * target.item_size[after.key],
        source_element=source_element,
        source_stride=source_stride,
        target_element=target_element,
        target_stride=target_stride,
    )


def sending_shards(source: ShardColumns, target: ShardColumns, hop: Column, row: Column) -> ShardColumns:
    """Return the shard that each transfer comes from, which is the source's at hop 0 and the target's after.

    Args:
        source: the shards of all ranks before, of as many axes as the target.
        target: the shards of all ranks after.
        hop: int64 (transfers,).
        row: of the shard, int64 (transfers,).
    """
    before, after = np.flatnonzero(hop == 0), np.flatnonzero(hop > 0)
    sources = select_rows(renumber_keys(source, target), row[before])
    if not after.size:
        return sources
    targets = select_rows(target, row[after])
    # The argsort of a permutation is its inverse: rows come back in the order of the transfers.
    place = np.argsort(np.concatenate([before, after]))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(sources, name), getattr(targets, name)])[place] for name in ROWS
    }
    return replace(targets, **columns)


def renumber_keys(source: ShardColumns, target: ShardColumns) -> ShardColumns:
    """Return the source with its keys numbered as in the target; -1 is the number of those that the target hasn't."""
    number = {key: position for position, key in enumerate(target.keys)}
    # Keys that the target lacks stay in the columns, so that rows keep their numbers.
    key = np.array([number.get(key, -1) for key in source.keys], dtype=np.int64)[source.key]
    return replace(source, keys=target.keys, kinds=target.kinds, key=key)


def shard_memory(shards: ShardColumns, offset: Column) -> tuple[Column, Column]:
    """Return where boxes begin in the data of shards, and the data's strides.

    Args:
        shards: the shard of each box.
        offset: of each box in the global tensor, int64 (boxes, axes).

    Returns:
        elements int64 (boxes,), and strides int64 (boxes, axes).
    """
    # A flat range keeps the element order of its box, so the box's strides hold, from the range's start on.
    stride = row_major_strides(shards.shape)
    return ((offset - shards.offset) * stride).sum(axis=1) - np.maximum(shards.start, 0), stride
