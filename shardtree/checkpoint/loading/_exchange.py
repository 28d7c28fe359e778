"""Passing on what one rank read to the others that want the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from ...codec import bit_view
from ...errors import StrategyError, error_text
from ...layouts import ShardColumns
from ...plans import ExchangePlan
from ...storage import LocalStorage, MemoryStorage, Storage
from ...world import World

Exchange = Literal["auto", "always", "never"]
"""Whether ranks that want the same shard read it once between them."""


def exchanges(exchange: Exchange, storage: Storage, ranks: int) -> bool:
    """Return whether ranks pass on what they read.

    "auto" does so where storage is remote: from a local file system's cache, a read is faster than a message.

    Raises:
        StrategyError: no such choice.

    Examples:
        >>> exchanges("always", MemoryStorage(), 1)
        False
    """
    if exchange not in ("auto", "always", "never"):
        expected = "'auto', 'always' or 'never'"
        raise StrategyError(error_text("load: no such exchange", found=repr(exchange), expected=expected))
    if ranks == 1 or exchange == "never":
        return False
    return exchange == "always" or not isinstance(storage, (LocalStorage, MemoryStorage))


def pass_on(world: World, plan: ExchangePlan, columns: ShardColumns, memories: Sequence[torch.Tensor]) -> None:
    """Fill the memories that this rank didn't read with what other ranks read; collective.

    Args:
        world: the ranks that take part.
        plan: who read what.
        columns: all ranks' shards, each rank's rows together and in the order of its memories.
        memories: this rank's tensors, contiguous and on the CPU.
    """
    first = int(np.searchsorted(columns.rank, world.rank))
    views = [bit_view(memory).numpy() for memory in memories]
    source_rank, target_rank = columns.rank[plan.source], columns.rank[plan.target]
    for number in range(plan.rounds):
        outgoing: list[list[tuple[int, int, Any]]] = [[] for _ in range(world.size)]
        for row in np.flatnonzero((plan.round == number) & (source_rank == world.rank)).tolist():
            start, stop = int(plan.start[row]), int(plan.stop[row])
            part = views[int(plan.source[row]) - first][start:stop]
            outgoing[int(target_rank[row])].append((int(plan.target[row]), start, part))
        for target, start, part in (item for incoming in world.all_to_all(outgoing) for item in incoming):
            views[target - first][start : start + part.size] = part
