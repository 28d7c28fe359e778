"""Which rows of a plan are a rank's own shards: matched by the place that they have in their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import IntegrityError, error_text
from ..geometry import Column, widen
from ..layouts import ShardColumns, shard_columns
from ..mapping import ShardedTensor


def own_rows(side: str, columns: ShardColumns, shards: Sequence[ShardedTensor], rank: int) -> list[int]:
    """Return the row of each of a rank's shards among those of all ranks.

    Args:
        side: "source" or "target", for the message.
        columns: all ranks' shards.
        shards: the rank's own, in any order.
        rank: which one.

    Raises:
        IntegrityError: the rank's shards aren't exactly those that the columns say it has.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, part, 2)) for part in range(2)]
        >>> own_rows("source", st.shard_columns(shards[::-1], 3), shards, 3)
        [1, 0]
    """
    rows = np.flatnonzero(columns.rank == rank)
    own = shard_columns(shards, rank)
    number = {key: position for position, key in enumerate(columns.keys)}
    kinds = dict(zip(columns.keys, columns.kinds, strict=True))
    unlike = [
        f"{key!r}: the tree has {kind}, the plan {kinds.get(key, 'none')}"
        for key, kind in zip(own.keys, own.kinds, strict=True)
        if kinds.get(key) != kind
    ]
    if unlike:
        _refuse(side, rank, unlike)
    axes = max(columns.offset.shape[1], own.offset.shape[1])
    mine = _places(own, np.array([number[key] for key in own.keys], dtype=np.int64)[own.key], axes)
    planned = _places(columns, columns.key, axes)[rows]
    order, planned_order = _sorted(mine), _sorted(planned)
    if not np.array_equal(mine[order], planned[planned_order]):
        _refuse(side, rank, _differences(columns.keys, mine, planned, axes))
    found = np.empty(len(mine), dtype=np.int64)
    found[order] = rows[planned_order]
    return list(map(int, found))


def _places(columns: ShardColumns, key: Column, axes: int) -> Column:
    """Return what tells a rank's shards apart, int64 (shards, 1 + axes + axes + 2)."""
    offset, shape = widen(columns.offset, axes, 0), widen(columns.shape, axes, 1)
    return np.column_stack([key, offset, shape, columns.start, columns.stop])


def _sorted(places: Column) -> Column:
    return np.lexsort(places.T[::-1])


def _differences(keys: Sequence[str], mine: Column, planned: Column, axes: int) -> list[str]:
    own, other = ({tuple(place) for place in places.tolist()} for places in (mine, planned))
    lines = [f"only in the tree: {_text(keys, place, axes)}" for place in sorted(own - other)]
    lines += [f"only in the plan: {_text(keys, place, axes)}" for place in sorted(other - own)]
    return lines or ["some shards are there more often in one than in the other"]


def _text(keys: Sequence[str], place: tuple[int, ...], axes: int) -> str:
    key, offset, shape, (start, stop) = place[0], place[1 : 1 + axes], place[1 + axes : 1 + 2 * axes], place[-2:]
    flat = f", elements {start} to {stop}" if start >= 0 else ""
    return f"{keys[key]!r} at {offset} of {shape}{flat}"


def _refuse(side: str, rank: int, lines: Sequence[str]) -> None:
    what = f"redistribute: the {side} tree of rank {rank} isn't what the plan says"
    fix = "Make the plan from the layouts that the ranks really have, numbered as in the world."
    raise IntegrityError(error_text(what, offenders=lines, fix=fix))
