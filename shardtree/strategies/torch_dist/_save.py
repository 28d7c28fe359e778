"""Saving shards as archives in one file for each rank: for Megatron-Core's `torch_dist` and for plain DCP."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...errors import CheckpointingException, StrategyError, TreePath, error_text, render_path
from ...mapping import ShardedObject, ShardedTensor
from ...storage import Buffer, remove_folder
from .._traits import METADATA_FILE
from .._values import AsyncRequest, Fields, PendingSave
from ..torch import COMMON_FILE, encode_with_holes
from ..torch import save_common as save_torch_common
from . import recognize
from ._commit import Saving, StoredValue, collect, stored_by
from ._common import check_names, named_values, without_hollow
from ._listing import DCP, META_FILE, TORCH_DIST
from ._metadata_file import INDEX_FILE
from ._write import Written, data_file, file_layout, write_file

logger = logging.getLogger("shardtree")


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data file of a rank's shards, and return the request that writes it."""
    return _request(pending, shards, TORCH_DIST[0])


def save_dcp_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data file of a rank's shards, and return the request that writes it.

    Raises:
        StrategyError: a common.pt is there, with which the folder would look like an unfinished one of Megatron-Core.
    """
    for name, program in ((COMMON_FILE, "Megatron-Core"), (META_FILE, "Lightning")):
        if pending.storage.length(name) is not None:
            what = f"save: {pending.storage.where()!r} has the {name} of a checkpoint of {program}'s"
            raise StrategyError(error_text(what, fix="Save to another folder, or remove it if it is left over."))
    return _request(pending, shards, DCP[0])


def _request(
    pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject], backend: str
) -> AsyncRequest[Written]:
    layout = file_layout(shards, pending.world.rank, allow_pickle=pending.options.allow_pickle)
    saving = Saving(backend)
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(write_file, pending, layout),
        commit=partial(_commit, pending, saving),
        abandon=partial(_abandon, pending, saving.names),
        state=saving,
    )


def _commit(pending: PendingSave, saving: Saving, written: Sequence[Written]) -> Fields:
    """Check what all ranks wrote, and keep it for the strategy's COMMIT: it writes the index."""
    saving.stored = collect(pending.storage, written)
    return {}


def _abandon(pending: PendingSave, noted: Sequence[str]) -> None:
    """Remove the files of a failed save, unless the folder has a checkpoint: this save's, or one made meanwhile."""
    # File names are fixed: with a checkpoint there, they may be its own.
    storage = pending.storage
    try:
        if storage.length(METADATA_FILE) is not None or (INDEX_FILE not in noted and recognize(storage) is not None):
            return
        # The index first: as long as it is there, the folder may be recognised as a checkpoint.
        for name in (*sorted(noted, key=INDEX_FILE.__ne__), data_file(pending.world.rank)):
            storage.remove(name)
        remove_folder(storage, pending.save_id)
    except Exception as error:
        # The save's own error is being raised, and must not be hidden.
        logger.warning("save: what a failed save wrote stays in %s: %s", storage.where(), error)


# Saving the common state: Megatron-Core's common.pt, or a file of plain values for torch.distributed.checkpoint


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write common.pt, and return the fields of metadata.json that name its format."""
    if isinstance(pending.state, Saving):  # else another format has the shards
        pending.state.names.append(COMMON_FILE)
    return {**save_torch_common(pending, common), "common_backend": "torch", "common_backend_version": 1}


def save_dcp_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree's plain values, each an archive of its own; the index will list them.

    Raises:
        UnsupportedValue: a value can't be stored.
        TreeError: two of them, or a value and a shard, have one name.
    """
    saving, stored = stored_by(pending, DCP[0])
    taken = {*stored.columns.keys, *stored.objects}
    named = without_hollow(named_values(common), taken)
    check_names(named, taken)
    encoded = {name: _encoded(path, value, pending) for name, (path, value) in named.items()}
    # A second file of rank 0: its first one was written before the common state was.
    file, byte, values = data_file(0, 1), 0, []
    for name, data in encoded.items():
        values.append(StoredValue(name, named[name][0], (file, byte, len(data))))
        byte += len(data)
    if values:
        saving.names.append(file)
        pending.storage.write(file, _buffers(encoded), durable=pending.options.durable)
    saving.values = tuple(values)
    return {"common_backend": DCP[0], "common_backend_version": DCP[1]}


def _encoded(path: TreePath, value: Any, pending: PendingSave) -> bytes:
    try:
        return encode_with_holes(value, allow_pickle=pending.options.allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the value at {render_path(path, 'common')}")
        raise


def _buffers(encoded: dict[str, bytes]) -> Iterator[Buffer]:
    return map(memoryview, encoded.values())
