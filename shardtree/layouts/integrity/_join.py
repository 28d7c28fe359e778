"""Several ranks' columns as one, where they agree about their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ...errors import IntegrityError, error_text
from ...geometry import Column, widen
from .._columns import ShardColumns, TensorKind, check_ranks_columns
from ._kinds import ONE_KIND, kind_problems

_Keys: TypeAlias = tuple[str, ...]
_Kinds: TypeAlias = tuple[TensorKind, ...]


def join_columns(parts: Sequence[ShardColumns]) -> ShardColumns:
    """Return several ranks' columns as one, rows in the order given.

    Raises:
        IntegrityError: ranks differ about a key's global shape, dtype or prepended axes.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, 2)) for rank in range(2)]
        >>> join_columns([st.shard_columns([shard], rank) for rank, shard in enumerate(shards)]).offset.tolist()
        [[0], [2]]
    """
    check_ranks_columns("join_columns", parts)
    disagreed = kind_problems(parts)
    if disagreed:
        what = "the ranks don't agree about their tensors"
        raise IntegrityError(error_text(what, offenders=map(str, disagreed), fix=ONE_KIND))
    return join_agreed(parts)


def join_agreed(parts: Sequence[ShardColumns]) -> ShardColumns:
    """Return several ranks' columns as one, where it is known that they agree about their tensors."""
    if len(parts) == 1:
        return parts[0]
    keys, kinds, numbers = _joined_tables({part.keys: part.kinds for part in parts})
    none = np.zeros(0, dtype=np.int64)
    axes = max((part.offset.shape[1] for part in parts), default=1)
    renumbered = [numbers[part.keys][part.key] for part in parts]
    return ShardColumns(
        keys=keys,
        kinds=kinds,
        key=np.concatenate([*renumbered, none]),
        offset=np.concatenate([widen(part.offset, axes, 0) for part in parts] or [np.zeros((0, 1), dtype=np.int64)]),
        shape=np.concatenate([widen(part.shape, axes, 1) for part in parts] or [np.zeros((0, 1), dtype=np.int64)]),
        start=np.concatenate([*(part.start for part in parts), none]),
        stop=np.concatenate([*(part.stop for part in parts), none]),
        rank=np.concatenate([*(part.rank for part in parts), none]),
        main=np.concatenate([*(part.main for part in parts), np.zeros(0, dtype=np.bool_)]),
    )


def _joined_tables(tables: dict[_Keys, _Kinds]) -> tuple[_Keys, _Kinds, dict[_Keys, Column]]:
    """Return all tables' keys, sorted as those of each are, their kinds, and where each table's keys are among them."""
    if len(tables) == 1:  # many ranks hold shards of the same tensors
        ((keys, kinds),) = tables.items()
        return keys, kinds, {keys: np.arange(len(keys))}
    kind_of = {key: kind for table in tables.items() for key, kind in zip(*table, strict=True)}
    keys = tuple(sorted(kind_of))
    number = {key: position for position, key in enumerate(keys)}
    numbers = {table: np.array([number[key] for key in table], dtype=np.int64) for table in tables}
    return keys, tuple([kind_of[key] for key in keys]), numbers
