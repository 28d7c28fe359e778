"""Saving in the native format: each rank writes its data files, then rank 0 writes the index."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from ...codec import encode_tree
from ...errors import CheckpointingException, StorageError, error_text
from ...geometry import Column
from ...layouts import ShardColumns, select_rows, shard_columns
from ...mapping import ShardedObject, ShardedTensor
from ...storage import BlockHasher, Buffer, Hashes, hash_column, hashed, in_parts, tensor_buffers
from ...world import on_rank_zero
from .._checked import write_checked
from .._collector import collector_paused
from .._values import AsyncRequest, Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._clean import remove_left_overs, remove_unless_committed
from ._collect import collect_index
from ._gather import checked_data, gathered, together
from ._index_file import encode_index
from ._layout import Item, Part, Shard, part_name, parts
from ._totals import with_total
from ._written import Written

BACKEND, VERSION = "safetensors", 1

logger = logging.getLogger("shardtree")


@register_default_strategy(StrategyAction.SAVE_COMMON, BACKEND, VERSION)
def save_common(draft: Draft, common: Any) -> Fields:
    """Write the common tree as one file, and return what metadata.json says about it."""
    data = encode_tree(common, allow_pickle=draft.options.allow_pickle)
    name = f"{draft.save_id}/common.safetensors"
    entry = write_checked(draft.storage, name, data, durable=draft.options.durable)
    return {"save_id": draft.save_id, "common": entry}


@register_default_strategy(StrategyAction.SAVE_OBJECTS, BACKEND, VERSION)
@register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION)
def save_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[Written]:
    """Prepare the data files of a rank's shards, and return the request that writes them."""
    with collector_paused():
        layout = parts(shards, allow_pickle=draft.options.allow_pickle)
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        columns = shard_columns(tensors, draft.world.rank)
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(_write, draft, layout, columns, _tensor_rows(shards)),
        commit=partial(_commit, draft),
        finalize_fns=(partial(_clean_up, draft),),
        abandon=partial(_abandon, draft),
    )


def _abandon(draft: Draft) -> None:
    """Remove what a save that failed has written, so that a full disk has room for the next one."""
    if draft.world.rank != 0:
        return
    try:
        remove_unless_committed(draft.storage, draft.save_id)
    except Exception as error:
        # The save's own error is on its way; what stays is removed by a later save.
        logger.warning("save: what a failed save wrote stays in %s: %s", draft.storage.where(draft.save_id), error)


def _tensor_rows(shards: Sequence[Shard]) -> Column:
    """Return, for each shard, the row that it has among the tensors; -1 for an object."""
    is_tensor = np.array([isinstance(shard, ShardedTensor) for shard in shards], dtype=np.bool_)
    return np.where(is_tensor, np.cumsum(is_tensor) - 1, -1)


def _write(draft: Draft, layout: tuple[Part, ...], columns: ShardColumns, row: Column) -> Written:
    names = tuple(part_name(draft.save_id, draft.world.rank, draft.world.size, part) for part in range(len(layout)))
    # A request may be tried again after its folder was removed.
    draft.storage.make_folder(draft.save_id, durable=draft.options.durable)
    lengths, hashes, places, objects = [], [], [], []
    totals: list[int] = []
    for number, (name, part) in enumerate(zip(names, layout, strict=True)):
        length, file_hashes = _write_part(draft, name, part, totals)
        lengths.append(length)
        hashes.append(file_hashes)
        for item, byte in zip(part.items, part.bytes_before, strict=True):
            if item.shard is None:
                objects.append((item.key, number, byte, item.length))
            else:
                places.append((int(row[item.number]), number, byte))
    if draft.options.durable and names:
        draft.storage.sync_folder(draft.save_id)
    rows, file, byte_of = np.array(places, dtype=np.int64).reshape(-1, 3).T
    sums = np.array(totals, dtype=np.uint64) if draft.options.fingerprint else None
    held = select_rows(columns, rows)
    return Written(names, tuple(lengths), tuple(hashes), held, file, byte_of, tuple(objects), sums)


def _write_part(draft: Draft, name: str, part: Part, totals: list[int]) -> tuple[int, Hashes | None]:
    buffers = _with_progress(_part_buffers(part, totals if draft.options.fingerprint else None), draft)
    write = partial(draft.storage.write, name, durable=draft.options.durable)
    if not draft.options.checksums:
        return write(in_parts(buffers)), None
    hasher = BlockHasher()
    with closing(hashed(buffers, hasher)) as stream:
        return write(stream), hash_column(hasher)


def _part_buffers(part: Part, totals: list[int] | None) -> Iterator[Buffer]:
    yield memoryview(part.header)
    for group in together(part.items) if totals is None else map(_alone, part.items):
        if len(group) > 1:
            yield gathered(group)
            continue
        (item,) = group
        size = 0
        buffers = _item_buffers(item)
        if totals is not None and item.shard is not None:
            buffers = with_total(buffers, item.shard, totals)
        for buffer in buffers:
            size += buffer.nbytes
            yield buffer
        if size != item.length:
            found, expected = f"{size} bytes of data", f"{item.length} bytes"
            raise CheckpointingException(
                error_text(f"save: {item.key!r} changed its size", found=found, expected=expected)
            )


def _alone(item: Item) -> list[Item]:
    return [item]


def _item_buffers(item: Item) -> Iterator[Buffer]:
    if item.payload is not None:
        yield memoryview(item.payload)
    elif item.shard is not None:
        yield from tensor_buffers(checked_data(item))


def _with_progress(buffers: Iterator[Buffer], draft: Draft) -> Iterator[Buffer]:
    for buffer in buffers:
        yield buffer
        draft.options.progress(buffer.nbytes)


def _commit(draft: Draft, written: Sequence[Written]) -> Fields:
    return on_rank_zero(draft.world, "save: index", partial(_write_index, draft, written))


def _write_index(draft: Draft, written: Sequence[Written]) -> Fields:
    for rank, part in enumerate(written):
        for name, length in zip(part.files, part.lengths, strict=True):
            found = draft.storage.length(name)
            if found != length:
                where = draft.storage.where(name)
                fix = "Every rank must see the same folder; use shared storage."
                what = f"save: rank 0 doesn't see {where!r} as rank {rank} wrote it"
                raise StorageError(error_text(what, found=found, expected=f"{length} bytes", fix=fix))
    data = encode_index(collect_index(written))
    entry = write_checked(draft.storage, f"{draft.save_id}/index-0.safetensors", data, durable=draft.options.durable)
    return {"save_id": draft.save_id, "index": entry}


def _clean_up(draft: Draft) -> None:
    if draft.world.rank != 0:
        return
    try:
        remove_left_overs(draft.storage, keep=draft.save_id, before=draft.before, stale_after=draft.options.stale_after)
    except StorageError as error:
        # The checkpoint is saved; what couldn't be removed is tried again by the next save.
        logger.warning("save: left-overs of earlier saves stay in %s: %s", draft.storage.where(), error)
