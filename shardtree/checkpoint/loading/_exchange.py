"""Ranks that read for each other: whether they do, which part each reads, and how the others get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from ...codec import bit_view
from ...errors import StrategyError, error_text
from ...layouts import ShardColumns, join_columns
from ...mapping import ShardedTensor
from ...plans import ExchangePlan, plan_exchange
from ...storage import LocalStorage, MemoryStorage, Storage
from ...strategies import (
    Checkpoint,
    Exchange,
    FormatTraits,
    Strategies,
    StrategyAction,
    default_strategies,
    find_strategy,
    traits_of,
)
from ...world import World
from .._dispatch import Choice, sharded_backend, strategy_of


def exchanges(exchange: Exchange, storage: Storage, ranks: int) -> bool:
    """Return whether ranks send each other what they read.

    "auto" means remote storage: from a local file system a second read comes from the page cache, which is faster than
    a message with its extra copy.

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


def cuts_shards(checkpoint: Checkpoint, choices: tuple[Choice, Choice, Strategies | None]) -> bool:
    """Return whether shards that ranks read for each other may be cut between them."""
    cuts = traits_of_load(checkpoint, choices[0], choices[2]).cuts_chunks
    # A checksum of a whole chunk couldn't be compared by ranks that each read a part, or each would read all of it.
    return cuts == "always" or (cuts == "unchecked" and checkpoint.options.verify is None)


def parts_to_read(
    plan: ExchangePlan, columns: ShardColumns, rank: int, shards: Sequence[ShardedTensor]
) -> list[ShardedTensor]:
    """Return what a rank reads itself: its shards, or flat ranges of them, in the shards' own memory.

    Args:
        plan: who reads what.
        columns: all ranks' shards, each rank's rows together and in the order of its shards.
        rank: which.
        shards: the rank's, with contiguous data or none.
    """
    first = int(np.searchsorted(columns.rank, rank))
    mine = np.flatnonzero(plan.reader == rank)
    rows = zip(plan.row[mine].tolist(), plan.read_start[mine].tolist(), plan.read_stop[mine].tolist(), strict=True)
    item_size = columns.item_size[columns.key]
    return [
        _flat_part(shards[row - first], start // int(item_size[row]), stop // int(item_size[row]))
        for row, start, stop in rows
    ]


def _flat_part(shard: ShardedTensor, start: int, stop: int) -> ShardedTensor:
    """Return so many elements of a shard's data, as a shard that shares its memory."""
    if (start, stop) == (0, prod(shard.data_shape)):
        return shard
    data = shard.data.view(-1)[start:stop] if isinstance(shard.data, torch.Tensor) else None
    base = 0 if shard.flattened_range is None else shard.flattened_range.start
    return replace(shard, data=data, flattened_range=slice(base + start, base + stop))


def shares(
    ranks: Sequence[Sequence[ShardedTensor]], columns_of: Callable[..., ShardColumns], *, is_cut: bool
) -> list[list[ShardedTensor]]:
    """Return what each rank reads of what it wants, without memory.

    Args:
        ranks: what each wants, by rank.
        columns_of: returns shards of a rank as columns, in the dtypes that they are stored in.
        is_cut: whether shards are cut.
    """
    # Without memory: a target's own may be a view, of which no flat range can be taken.
    bare = [[replace(one, data=None) for one in shards] for shards in ranks]
    own, alike = zip(*map(by_sharing, bare), strict=True)
    columns = join_columns([columns_of(shards, rank=rank) for rank, shards in enumerate(alike)])
    plan = plan_exchange(columns, len(ranks), is_cut=is_cut)
    return [[*mine, *parts_to_read(plan, columns, rank, alike[rank])] for rank, mine in enumerate(own)]


def by_sharing(shards: Sequence[ShardedTensor]) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that each rank reads itself, and those that ranks read for each other."""
    # Where a shape mismatch is allowed, elements that aren't stored keep each rank's own values.
    own = [shard for shard in shards if shard.allow_shape_mismatch]
    return own, [shard for shard in shards if not shard.allow_shape_mismatch]


def pass_on(world: World, plan: ExchangePlan, columns: ShardColumns, memories: Sequence[torch.Tensor]) -> None:
    """Fill the memories that this rank didn't read with what other ranks read; collective.

    Args:
        world: the ranks that take part.
        plan: who read what.
        columns: all ranks' shards, each rank's rows together and in the order of its memories.
        memories: this rank's tensors, contiguous and on the CPU.
    """
    # Bytes, not elements: any dtype can be sent, also those that NumPy lacks.
    first = int(np.searchsorted(columns.rank, world.rank))
    views = [bit_view(memory).numpy() for memory in memories]
    for number in range(plan.rounds):
        outgoing: list[list[tuple[int, int, Any]]] = [[] for _ in range(world.size)]
        for row in np.flatnonzero((plan.round == number) & (plan.sender == world.rank)).tolist():
            start, stop = int(plan.start[row]), int(plan.stop[row])
            part = views[int(plan.source[row]) - first][start:stop]
            outgoing[int(plan.receiver[row])].append((int(plan.target[row]), start, part))
        for target, start, part in (item for incoming in world.all_to_all(outgoing) for item in incoming):
            views[target - first][start : start + part.size] = part


def traits_of_load(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> FormatTraits:
    """Return the traits of the function that loads shards, the defaults if it isn't the format's own."""
    backend = sharded_backend(checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, choice, backend, strategies)
    # The traits are those of the format's own function, not of one that was put into its place for this call.
    own = find_strategy(StrategyAction.LOAD_SHARDED, *backend, strategies=strategies)
    registered = default_strategies.get((StrategyAction.LOAD_SHARDED, *backend), own)
    return traits_of(*backend, strategies) if load_sharded is own is registered else FormatTraits()
