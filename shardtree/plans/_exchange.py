"""Which rank reads for others: shards that several ranks want alike are read once and passed on in bounded rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..geometry import Column
from ..layouts import ShardColumns
from ._save import Rows, deal_rows, held_places

ROUND_BYTES = 64 * 1024 * 1024
"""The most bytes that all ranks together pass on in one round."""


@dataclass(frozen=True, slots=True, eq=False)
class ExchangePlan:
    """Who reads which shard, and which bytes of it go to whom in which round.

    Attributes:
        reads: the shards that are read from storage, bool (shards,), rows as in the columns of all ranks.
        source: the row that is passed on, int64 (transfers,).
        target: the row that gets it, int64 (transfers,).
        start: first byte of the shard's data that is passed on, int64 (transfers,).
        stop: one past the last, int64 (transfers,).
        round: when, ascending, int64 (transfers,).
    """

    reads: Rows
    source: Column
    target: Column
    start: Column
    stop: Column
    round: Column

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return int(self.round[-1]) + 1 if self.round.size else 0


def plan_exchange(columns: ShardColumns, ranks: int, *, round_bytes: int = ROUND_BYTES) -> ExchangePlan:
    """Return the plan by which ranks that want the same shard read it once between them.

    Args:
        columns: the shards that all ranks want.
        ranks: how many ranks there are.
        round_bytes: the most that is passed on in one round.

    Examples:
        >>> import torch, shardtree as st
        >>> def wanted_by(rank):
        ...     shard = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=rank)
        ...     return st.shard_columns([shard], rank)
        >>> plan = plan_exchange(st.join_columns([wanted_by(0), wanted_by(1)]), 2)
        >>> plan.reads.tolist(), plan.source.tolist(), plan.target.tolist(), plan.stop.tolist()
        ([True, False], [0], [1], [16])
    """
    place, places = held_places(columns)
    reads = deal_rows(columns, ranks, place, np.ones(places, dtype=np.bool_))
    reader = np.zeros(places, dtype=np.int64)
    reader[place[reads]] = np.flatnonzero(reads)
    target = np.flatnonzero(~reads)
    size = (columns.elements * columns.item_size[columns.key])[target]
    # All that is passed on stands in one line; every `round_bytes` of it are a round, and what spans two is cut.
    end = np.cumsum(size)
    begin = end - size
    pieces = np.where(size > 0, -(-end // round_bytes) - begin // round_bytes, 0)
    row = np.repeat(np.arange(target.size), pieces)
    turn = (begin // round_bytes)[row] + np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = np.maximum(turn * round_bytes, begin[row]) - begin[row]
    stop = np.minimum((turn + 1) * round_bytes, end[row]) - begin[row]
    return ExchangePlan(reads, reader[place[target]][row], target[row], start, stop, turn)
