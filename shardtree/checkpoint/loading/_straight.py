"""Which shards are read to their devices part by part, and not as a whole in the host's memory first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ...mapping import ShardedTensor
from ...strategies import Checkpoint, Strategies, StrategyAction, default_strategies
from .._dispatch import Choice, sharded_backend, strategy_of
from ._exchange import Exchange, exchanges
from ._fit import Kinds

_FORMATS = ("safetensors", "huggingface")
"""Those whose own functions fill memory on any device of which copies are staged."""


def straight_to_device(
    checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None, exchange: Exchange, kinds: Kinds
) -> Callable[[ShardedTensor], bool]:
    """Return what says of a shard whose target is on a device whether it is read there part by part.

    It isn't where something is done in the host's memory: a conversion, an exchange between ranks, or a load by a
    function that isn't known to do without.
    """

    @cache
    def is_possible() -> bool:
        backend = sharded_backend(checkpoint.fields)
        load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, choice, backend, strategies)
        own = {default_strategies.get((StrategyAction.LOAD_SHARDED, name, backend[1])) for name in _FORMATS}
        return load_sharded in own and not exchanges(exchange, checkpoint.storage, checkpoint.world.size)

    def is_straight(shard: ShardedTensor) -> bool:
        return is_possible() and (shard.key not in kinds or kinds[shard.key].dtype == shard.dtype)

    return is_straight
