"""What a rank reads at once: what is stored in its own dtype, then, round by round, what is converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....core.geometry import Column
from ....core.layouts import shard_columns
from ....core.mapping import ShardedTensor
from ....core.plans import read_rounds
from ...table import (
    Checkpoint,
    FormatTraits,
    Strategies,
    StrategyAction,
    default_strategies,
    find_strategy,
    traits_of,
)
from .._dispatch import Choice, sharded_backend, strategy_of
from ._targets import Kinds

Shards = Sequence[ShardedTensor]


def by_dtype(shards: Shards, kinds: Kinds) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that are stored in their own dtype, as far as is known, and the others."""
    # By identity: shards of one key in a target may ask for different dtypes.
    others = [shard for shard in shards if shard.key in kinds and kinds[shard.key].dtype != shard.dtype]
    ids = set(map(id, others))
    return [shard for shard in shards if id(shard) not in ids], others


def stored_shard(shard: ShardedTensor, kinds: Kinds) -> ShardedTensor:
    """Return a shard without data, in the dtype that it is stored in."""
    return replace(shard, data=None, dtype=kinds[shard.key].dtype)


def groups_of(shards: Shards, kinds: Kinds, rounds: Column | None = None, count: int = 0) -> list[list[ShardedTensor]]:
    """Return what a rank reads at once: what is stored in its own dtype, then what is converted in each round.

    Args:
        shards: the rank's.
        kinds: what is stored.
        rounds: in which round each that is converted is read, int64; None where the rank reads by itself.
        count: how many rounds there are at least.
    """
    alike, others = by_dtype(shards, kinds)
    if rounds is None and others:
        rounds = read_rounds(shard_columns([stored_shard(shard, kinds) for shard in others]))
        count = int(rounds.max()) + 1
    parts: list[list[ShardedTensor]] = [[] for _ in range(count)]
    for shard, number in zip(others, [] if rounds is None else rounds.tolist(), strict=True):
        parts[number].append(shard)
    return [alike, *parts]


def traits_of_load(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> FormatTraits:
    """Return the traits of the function that loads shards, the defaults if it isn't the format's own."""
    backend = sharded_backend(checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, choice, backend, strategies)
    # The traits are those of the format's own function, not of one that was put into its place for this call.
    own = find_strategy(StrategyAction.LOAD_SHARDED, *backend, strategies=strategies)
    default = default_strategies.get((StrategyAction.LOAD_SHARDED, *backend), own)
    return traits_of(*backend, strategies) if load_sharded is own is default else FormatTraits()
