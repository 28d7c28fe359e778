"""verify: whether every byte of a checkpoint is what was saved, and where it isn't."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import CorruptCheckpoint
from ..storage import Directory
from ..strategies import (
    METADATA_FILE,
    Damage,
    LoadOptions,
    Strategies,
    StrategyAction,
    default_strategies,
    find_strategy,
)
from ..world import one_process
from ._dispatch import common_backend, sharded_backend, strategy_of
from ._open import open_at


def verify(
    checkpoint_dir: Directory,
    *,
    strategies: Strategies = default_strategies,
    progress: Callable[[int], None] | None = None,
) -> tuple[Damage, ...]:
    """Return what is damaged in a checkpoint, by file, key and bytes; nothing where all is as it was saved.

    Every file is read whole, headers and padding included. Not collective.

    Args:
        checkpoint_dir: where the checkpoint is.
        strategies: the dispatch table.
        progress: is told, now and then, how many bytes were read since the last time.

    Raises:
        NotACheckpoint: there is none.
        StrategyError: the format carries nothing to check.

    Examples:
        >>> import torch, shardtree as st
        >>> folder = st.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, folder)
        >>> st.verify(folder)
        ()
    """
    options = LoadOptions(progress=progress or LoadOptions().progress)
    try:
        checkpoint = open_at(checkpoint_dir, one_process(), options, strategies)
    except CorruptCheckpoint as error:
        return (Damage(METADATA_FILE, str(error)),)
    sharded, common = sharded_backend(checkpoint.fields), common_backend(checkpoint.fields)
    found: tuple[Damage, ...] = strategy_of(StrategyAction.VERIFY, None, sharded, strategies)(checkpoint)
    verify_common = find_strategy(StrategyAction.VERIFY, *common, strategies=strategies)
    return found if common == sharded or verify_common is None else (*found, *verify_common(checkpoint))
