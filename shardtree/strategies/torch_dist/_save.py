"""Saving shards as archives in one file a rank: for Megatron-Core's `torch_dist` and for plain DCP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from ...errors import StorageError
from ...mapping import ShardedObject, ShardedTensor
from ...world import on_rank_zero
from .._metadata import METADATA_FILE
from .._values import AsyncRequest, Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._backends import DCP, INDEX_FILE, TORCH_DIST
from ._write import Written, data_file, write_file
from ._write_collect import collect
from ._write_layout import file_layout

COMMON_FILES = ("common.pt", data_file(0, 1))
"""What rank 0 writes of the common state, in one format or the other."""

logger = logging.getLogger("shardtree")


@register_default_strategy(StrategyAction.SAVE_OBJECTS, *TORCH_DIST)
@register_default_strategy(StrategyAction.SAVE_SHARDED, *TORCH_DIST)
def save_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data file of a rank's shards, and return the request that writes it."""
    return _request(draft, shards, TORCH_DIST[0], committed_by=METADATA_FILE)


@register_default_strategy(StrategyAction.SAVE_OBJECTS, *DCP)
@register_default_strategy(StrategyAction.SAVE_SHARDED, *DCP)
def save_dcp_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data file of a rank's shards, and return the request that writes it."""
    return _request(draft, shards, DCP[0], committed_by=INDEX_FILE)


def _request(
    draft: Draft, shards: Sequence[ShardedTensor | ShardedObject], backend: str, *, committed_by: str
) -> AsyncRequest[Written]:
    layout = file_layout(shards, draft.world.rank, allow_pickle=draft.options.allow_pickle)
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(write_file, draft, layout),
        commit=partial(_commit, draft, backend),
        abandon=partial(_abandon, draft, committed_by),
    )


def _commit(draft: Draft, backend: str, written: Sequence[Written]) -> Fields:
    """Check on rank 0 what all ranks wrote, and keep it there for the strategy's COMMIT: it writes the index."""
    return on_rank_zero(draft.world, "save: index", partial(_remember, draft, backend, written))


def _remember(draft: Draft, backend: str, written: Sequence[Written]) -> Fields:
    draft.memo[backend] = collect(draft.storage, written)
    return {}


def _abandon(draft: Draft, committed_by: str) -> None:
    """Remove what a save that failed has written, unless it is a checkpoint already."""
    own = (data_file(draft.world.rank),)
    # First what could be taken for a checkpoint.
    names = (INDEX_FILE, *COMMON_FILES, *own) if draft.world.rank == 0 else own
    try:
        if draft.storage.length(committed_by) is None:
            for name in names:
                draft.storage.remove(name)
            draft.storage.remove_folder(draft.save_id)
    except StorageError as error:
        # The save's own error is on its way.
        logger.warning("save: what a failed save wrote stays in %s: %s", draft.storage.where(), error)
