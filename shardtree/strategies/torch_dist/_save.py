"""Saving shards as archives in one file a rank: for Megatron-Core's `torch_dist` and for plain DCP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from ...errors import StrategyError, error_text
from ...mapping import ShardedObject, ShardedTensor
from .._metadata import METADATA_FILE
from .._values import AsyncRequest, Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ..torch import COMMON_FILE
from ._backends import DCP, INDEX_FILE, TORCH_DIST
from ._common import recognize
from ._write import Written, data_file, names_of, write_file
from ._write_collect import collect
from ._write_layout import file_layout

logger = logging.getLogger("shardtree")


@register_default_strategy(StrategyAction.SAVE_OBJECTS, *TORCH_DIST)
@register_default_strategy(StrategyAction.SAVE_SHARDED, *TORCH_DIST)
def save_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data file of a rank's shards, and return the request that writes it."""
    return _request(draft, shards, TORCH_DIST[0])


@register_default_strategy(StrategyAction.SAVE_OBJECTS, *DCP)
@register_default_strategy(StrategyAction.SAVE_SHARDED, *DCP)
def save_dcp_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data file of a rank's shards, and return the request that writes it.

    Raises:
        StrategyError: a common.pt is there, which would make the folder one of Megatron-Core's, and unfinished.
    """
    if draft.storage.length(COMMON_FILE) is not None:
        what = f"save: {draft.storage.where()!r} has the {COMMON_FILE} of a checkpoint of Megatron-Core's"
        raise StrategyError(error_text(what, fix="Save to another folder, or remove it if it is left over."))
    return _request(draft, shards, DCP[0])


def _request(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject], backend: str) -> AsyncRequest[Written]:
    layout = file_layout(shards, draft.world.rank, allow_pickle=draft.options.allow_pickle)
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(write_file, draft, layout),
        commit=partial(_commit, draft, backend),
        abandon=partial(_abandon, draft),
    )


def _commit(draft: Draft, backend: str, written: Sequence[Written]) -> Fields:
    """Check what all ranks wrote, and keep it for the strategy's COMMIT: it writes the index."""
    draft.memo[backend] = collect(draft.storage, written)
    return {}


def _abandon(draft: Draft) -> None:
    """Remove what a save that failed has written, unless there is a checkpoint: this save's, or one made meanwhile."""
    storage, noted = draft.storage, names_of(draft)
    try:
        if storage.length(METADATA_FILE) is not None or (INDEX_FILE not in noted and recognize(storage) is not None):
            return
        # First what the rest could be taken for a checkpoint by.
        for name in (*sorted(noted, key=INDEX_FILE.__ne__), data_file(draft.world.rank)):
            storage.remove(name)
        storage.remove_folder(draft.save_id)
    except Exception as error:
        # The save's own error is on its way.
        logger.warning("save: what a failed save wrote stays in %s: %s", storage.where(), error)
