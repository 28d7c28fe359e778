"""Transfers: boxes that go from one shard's memory to another's, in columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.geometry import Column, row_major_strides, volumes
from ...core.layouts import ROWS, ShardColumns, select_rows


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Boxes that go from one shard to another, on the same rank or another, one per row.

    Offsets in a shard's data count elements in row-major order; in a flat shard, in the order of its range.

    If two shards of a rank want the same elements, one of them receives them at hop 0. The other gets them from it at
    hop 1, a copy within the rank.

    Attributes:
        hop: 0 if the box comes from a source shard; 1 or more if it comes from a target shard that received these
            elements at earlier hops. `source` is then a row of the plan's `target`.
        source: Row of the sending shard in the plan's `source` (or `target`), int64 (transfers,).
        target: Row of the receiving shard in the plan's `target`, int64 (transfers,).
        from_rank: Sender, int64 (transfers,).
        to_rank: Receiver; equal to `from_rank` if nothing moves between ranks, int64 (transfers,).
        key: Index of the tensor in the plan's `target.keys`, int64 (transfers,).
        offset: Offset of the box in the global tensor, int64 (transfers, axes), padded on the left with zeros.
        shape: Shape of the box, int64 (transfers, axes), padded on the left with ones.
        nbytes: Size of the box in bytes, int64 (transfers,).
        source_element: Offset of the first element in the sending shard's data, int64 (transfers,).
        source_stride: Strides of the sending shard's data along each axis, in elements, int64 (transfers, axes).
        target_element: Offset of the first element in the receiving shard's data, int64 (transfers,).
        target_stride: Strides of the receiving shard's data along each axis, in elements, int64 (transfers, axes).
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
    """Boxes with the shards that send and receive them, one per row. `as_transfers` computes the rest.

    Attributes:
        hop: 0 if the box comes from a source shard; 1 or more if a target shard passes it on after it has received it,
            int64 (routes,).
        source: Row of the sending shard: in the plan's `source` at hop 0, in its `target` at later hops, int64
            (routes,).
        target: Row of the receiving shard in the plan's `target`, int64 (routes,).
        offset: Offset of the box in the global tensor, int64 (routes, axes).
        shape: Shape of the box, int64 (routes, axes).
    """

    hop: Column
    source: Column
    target: Column
    offset: Column
    shape: Column


def as_transfers(source: ShardColumns, target: ShardColumns, routes: Routes) -> Transfers:
    """Return the transfers of routes, with ranks, sizes and strides; sorted by hop, to_rank, target and offset.

    Args:
        source: Shards of all ranks before the resharding, with as many axes as the target.
        target: Shards of all ranks after the resharding.
        routes: Routes, in any order.
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
    """Return the sending shard of each transfer.

    At hop 0, it is a source shard. At later hops, it is a target shard, which passes on what it has received.

    Args:
        source: Shards of all ranks before the resharding, with as many axes as the target.
        target: Shards of all ranks after the resharding.
        hop: Hop of each transfer, int64 (transfers,).
        row: Row of the sending shard in `source` or `target`, int64 (transfers,).
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
    """Return the source with its keys numbered as in the target, and -1 for keys that the target lacks."""
    number = {key: position for position, key in enumerate(target.keys)}
    # Keys that the target lacks stay in the columns, so that rows keep their numbers.
    key = np.array([number.get(key, -1) for key in source.keys], dtype=np.int64)[source.key]
    return replace(source, keys=target.keys, kinds=target.kinds, key=key)


def shard_memory(shards: ShardColumns, offset: Column) -> tuple[Column, Column]:
    """Return the offset of each box's first element in the data of its shard, and the strides of that data.

    Args:
        shards: Shard of each box.
        offset: Offset of each box in the global tensor, int64 (boxes, axes).

    Returns:
        Offsets, int64 (boxes,), and strides, int64 (boxes, axes), both in elements.
    """
    # A flat range keeps the element order of its box, so the box's strides hold, from the range's start on.
    stride = row_major_strides(shards.shape)
    return ((offset - shards.offset) * stride).sum(axis=1) - np.maximum(shards.start, 0), stride
