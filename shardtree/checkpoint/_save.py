"""save: a sharded tree becomes a checkpoint, written by all ranks and committed by one file."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..codec import decode_tree, encode_tree
from ..errors import AlreadyACheckpoint, StorageError, explain
from ..layouts import ShardColumns
from ..mapping import ShardedObject, ShardedTensor, is_main_replica
from ..plans import level_writes
from ..storage import Directory, Storage, storage_at
from ..strategies import (
    METADATA_FILE,
    AsyncRequest,
    Draft,
    SaveOptions,
    Strategies,
    StrategyAction,
    check_unchanged,
    default_strategies,
    find_strategy,
    replace_metadata,
)
from ..world import World, agree, current_world, gather, on_rank_zero
from ._consistency import check_common, check_together, common_digest, describe
from ._dispatch import DEFAULT_BACKEND, Choice, backend_of, strategy_of
from ._prepare import Prepared, comparable, prepare, prepare_for_later

Fields = Mapping[str, Any]


def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistency_check: Callable[[Any], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    world: Any = None,
    overwrite: bool = False,
    durable: bool = True,
    allow_pickle: bool = False,
    stale_after: float = 3600.0,
    strategies: Strategies = default_strategies,
    progress: Callable[[int], None] | None = None,
) -> AsyncRequest[Any] | None:
    """Save a sharded tree; every rank of the world calls it with its own tree.

    Until metadata.json is written, as the last step, the folder holds what it held before.

    Args:
        sharded_state_dict: dicts, lists and tuples of shards, objects, factories and plain values. It isn't changed.
        checkpoint_dir: a path or URL that all ranks see, made if it isn't there, or a `Storage`.
        sharded_strategy: the format of the shards, as (backend, version) or a function; the native format by default.
        common_strategy: the format of everything else, likewise.
        validate_access_integrity: whether ranks exchange their layouts, check that every element has exactly one
            main replica, and share out the writing of replicas: since these hold equal values, whichever has least
            else to write does it. Otherwise each main replica is written where it is.
        async_sharded_save: whether to return the request instead of running it. The common state and objects are
            taken as they are now; the shards' tensors are written where they lie, and mustn't change until then.
        preprocess_common_before_consistency_check: applied to the common state before ranks compare theirs.
        content_metadata: stored with the common state, for `load_content_metadata`.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        overwrite: whether a checkpoint that is already there may be replaced.
        durable: whether everything is on the medium before the checkpoint counts. Without, a power failure soon
            after the save can leave a checkpoint whose files are incomplete; a crash of the process can't.
        allow_pickle: whether values that the format can't hold are pickled; loading them then needs it too.
        stale_after: seconds without a change after which what a dead save left behind is removed.
        strategies: the dispatch table.
        progress: is told, now and then, how many bytes this rank wrote since the last time.

    Returns:
        None; with `async_sharded_save` the request, for ``execute_sync()`` on every rank.

    Raises:
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        IntegrityError: the ranks' shards don't tile their tensors, or common states differ.
        UnsupportedValue: a value can't be stored.
        StorageError: files can't be written, or ranks don't see the same folder.
        RemoteError: another rank failed.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4)), "step": 7}
        >>> folder = tempfile.mkdtemp()
        >>> st.save(tree, folder)
        >>> st.load({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, dtype=torch.int64))}, folder)
        {'w': tensor([0, 1, 2, 3]), 'step': 7}

    References:
        megatron.core.dist_checkpointing.serialization.save, megatron-core 0.16.1.
    """
    ranks = current_world(world)
    options = SaveOptions(durable, allow_pickle, stale_after, progress or SaveOptions().progress)
    take_apart = prepare_for_later if async_sharded_save else prepare
    prepared = agree(ranks, "save: prepare", partial(take_apart, sharded_state_dict, content_metadata))
    for_comparison = preprocess_common_before_consistency_check or (lambda common: common)
    writes = agree(ranks, "save: choose main replicas", partial(_main_replicas, prepared))
    if validate_access_integrity:
        writes = _shared_out(ranks, prepared, for_comparison, allow_pickle=allow_pickle)
    draft = _begin(ranks, checkpoint_dir, options, overwrite=overwrite)
    chosen = partial(_request, draft, prepared, writes, sharded_strategy, common_strategy, strategies)
    try:
        request = agree(ranks, "save: plan", chosen)
    except BaseException:
        if ranks.rank == 0:
            draft.storage.remove_folder(draft.save_id)  # still empty: nothing is written before all ranks can
        raise
    if async_sharded_save:
        return request
    request.execute_sync()
    return None


Writes = tuple[tuple[ShardedTensor, ...], tuple[ShardedObject, ...]]


def _main_replicas(prepared: Prepared) -> Writes:
    """Return what a rank writes that knows nothing of the others."""
    tensors = tuple(shard for shard in prepared.tensors if is_main_replica(shard.replica_id))
    return tensors, tuple(item for item in prepared.objects if is_main_replica(item.replica_id))


def _shared_out(
    world: World, prepared: Prepared, for_comparison: Callable[[Any], Any], *, allow_pickle: bool
) -> Writes:
    """Return what this rank writes, after all ranks told each other what they hold and checked that it fits."""

    def encode_own() -> bytes:
        return encode_tree(for_comparison(comparable(prepared.common)), allow_pickle=allow_pickle)

    def decoded(encoded: Sequence[bytes]) -> list[Any]:
        return [decode_tree(data, allow_pickle=allow_pickle) for data in encoded]

    def describe_own() -> Any:
        common = common_digest(for_comparison(comparable(prepared.common)), allow_pickle=allow_pickle)
        return describe(prepared.tensors, prepared.objects, world.rank, common)

    descriptions = gather(world, "save: describe shards", describe_own)
    if len({part.common for part in descriptions}) > 1:
        # Not pickled: ranks may hold instances of classes that others can't import.
        encoded = gather(world, "save: compare common states", encode_own)
        agree(world, "save: check common states", lambda: check_common(decoded(encoded)))
    columns = agree(world, "save: check integrity", partial(check_together, descriptions))
    tensors = agree(world, "save: share out", partial(_own_tensors, prepared, columns, world))
    return tensors, _main_replicas(prepared)[1]


def _own_tensors(prepared: Prepared, columns: ShardColumns, world: World) -> tuple[ShardedTensor, ...]:
    own = np.flatnonzero(columns.rank == world.rank)
    writes = level_writes(columns, world.size)[own]
    return tuple(shard for shard, write in zip(prepared.tensors, writes.tolist(), strict=True) if write)


def _begin(world: World, directory: Directory, options: SaveOptions, *, overwrite: bool) -> Draft:
    """Return the draft of a checkpoint: the save has a name, and a folder that every rank sees."""
    storage = agree(world, "save: find the folder", partial(storage_at, directory))
    begun = partial(_make_save_folder, storage, overwrite=overwrite)
    save_id, before = on_rank_zero(world, "save: make the folder", begun)
    agree(world, "save: see the folder", partial(_see_folder, storage, save_id, world.rank))
    return Draft(storage, save_id, world, before, options)


def _make_save_folder(storage: Storage, *, overwrite: bool) -> tuple[str, bytes | None]:
    before = storage.read(METADATA_FILE) if storage.length(METADATA_FILE) is not None else None
    if before is not None and not overwrite:
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        raise AlreadyACheckpoint(explain(f"save: {storage.where()!r} already holds a checkpoint", fix=fix))
    save_id = f"save-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"
    storage.make_folder(save_id)
    return save_id, before


def _see_folder(storage: Storage, save_id: str, rank: int) -> None:
    if not storage.is_folder(save_id):
        fix = "Save to a folder on storage that all ranks share."
        raise StorageError(
            explain(f"save: {storage.where()!r} is not shared: rank {rank} doesn't see what rank 0 made in it", fix=fix)
        )


def _request(
    draft: Draft,
    prepared: Prepared,
    writes: Writes,
    sharded_strategy: Choice,
    common_strategy: Choice,
    strategies: Strategies,
) -> AsyncRequest[Any]:
    """Return the request that writes this rank's part and then commits."""
    tensors, objects = writes
    sharded_backend = backend_of(sharded_strategy, DEFAULT_BACKEND)
    common_backend = backend_of(common_strategy, DEFAULT_BACKEND)
    save_sharded = strategy_of(StrategyAction.SAVE_SHARDED, sharded_strategy, DEFAULT_BACKEND, strategies)
    save_common = strategy_of(StrategyAction.SAVE_COMMON, common_strategy, DEFAULT_BACKEND, strategies)
    takes_objects = find_strategy(StrategyAction.SAVE_OBJECTS, *sharded_backend, strategies=strategies) is not None
    if takes_objects:
        requests: tuple[AsyncRequest[Any], ...] = (save_sharded(draft, [*tensors, *objects]),)
    else:
        save_objects = strategy_of(StrategyAction.SAVE_OBJECTS, common_backend, DEFAULT_BACKEND, strategies)
        requests = (save_sharded(draft, tensors), save_objects(draft, objects))
    fields = {
        "sharded_backend": sharded_backend[0],
        "sharded_backend_version": sharded_backend[1],
        "common_backend": common_backend[0],
        "common_backend_version": common_backend[1],
    }
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(_write, draft, requests),
        commit=partial(_commit, draft, requests, partial(save_common, draft, prepared.common), fields),
        finalize_fns=tuple(fn for request in requests for fn in request.finalize_fns),
        abandon=partial(_abandon, requests),
    )


def _write(draft: Draft, requests: Sequence[AsyncRequest[Any]]) -> tuple[Any, ...]:
    # Once committed, a request's files are the checkpoint: running it again would write over them.
    check_unchanged(draft.storage, draft.before)
    return tuple(request.async_fn() for request in requests)


def _abandon(requests: Sequence[AsyncRequest[Any]]) -> None:
    for request in requests:
        request.abandon()


def _commit(
    draft: Draft,
    requests: Sequence[AsyncRequest[Any]],
    save_common: Callable[[], Fields],
    fields: Fields,
    written: Sequence[tuple[Any, ...]],
) -> Fields:
    """Make the checkpoint count: the strategies' own commits, the common state, and last metadata.json."""
    merged = dict(fields)
    for number, request in enumerate(requests):
        merged |= request.commit([part[number] for part in written])
    merged |= on_rank_zero(draft.world, "save: common state", save_common)
    on_rank_zero(draft.world, "save: commit", partial(_replace_metadata, draft, merged))
    return merged


def _replace_metadata(draft: Draft, fields: Fields) -> None:
    if draft.options.durable:
        draft.storage.sync_folder(draft.save_id)
        draft.storage.sync_folder()
    replace_metadata(draft.storage, draft.before, fields, durable=draft.options.durable)
