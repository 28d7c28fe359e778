"""save: a sharded tree becomes a checkpoint, written by all ranks and committed by one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...codec import decode_tree, encode_tree
from ...layouts import ShardColumns, shard_columns
from ...mapping import ShardedTensor, is_main_replica
from ...plans import level_writes
from ...storage import Directory
from ...strategies import AsyncRequest, SaveOptions, Strategies, default_strategies
from ...trees import comparable
from ...world import World, agree, current_world, gather
from .._consistency import Description, check_common, check_together, common_digest, describe
from .._dispatch import Backends, Choice, backends_of
from .._fingerprint import check_can_hold
from .._known_layout import KnownLayout, known_layout
from ..async_saves import refuse_overlap, snapshot_shards
from ._begin import begin, end
from ._prepare import Prepared, prepare, prepare_for_later
from ._request import Writes, save_request


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
    snapshot: bool = True,
    durable: bool = True,
    allow_pickle: bool = False,
    stale_after: float = 3600.0,
    strategies: Strategies = default_strategies,
    progress: Callable[[int], None] | None = None,
    fingerprint: bool = False,
    layout: ShardColumns | None = None,
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
        async_sharded_save: whether to return the request instead of running it, for an `AsyncCallsQueue`.
            Everything is taken as it is now: the caller may go on changing it at once.
        preprocess_common_before_consistency_check: applied to the common state before ranks compare theirs.
        content_metadata: stored with the common state, for `load_content_metadata`.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        overwrite: whether a checkpoint that is already there may be replaced.
        snapshot: whether a request holds copies of the shards' tensors. Without, as for functional training steps,
            they are written where they lie, and mustn't change until the request is done; objects and the common
            state are taken as they are now all the same.
        durable: whether everything is on the medium before the checkpoint counts. Without, a power failure soon
            after the save can leave a checkpoint whose files are incomplete; a crash of the process can't.
        allow_pickle: whether values that the format can't hold are pickled; loading them then needs it too.
        stale_after: seconds without a change after which a save of another machine counts as dead, so that what it
            left behind is removed; one of this machine does as soon as its process is gone.
        strategies: the dispatch table.
        progress: is told, now and then, how many bytes this rank wrote since the last time; by the thread that
            writes, which is a queue's own one.
        fingerprint: whether each tensor's `fingerprint` is stored with it, added up from the bytes as they are written;
            `verify` then reads the tensors back and compares. Only our own format has a place for that.
        layout: the tensor shards of all ranks, as every rank computed them by itself from a mesh and specs, or from
            DTensors: then no layouts are exchanged, only a hash of this one. It is checked as exchanged ones are, and
            replicas are shared out by it also where `validate_access_integrity` is False.

    Returns:
        None; with `async_sharded_save` the request, to be scheduled or executed on every rank.

    Raises:
        CheckpointReplaced: a save to the same folder is on its way.
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        IntegrityError: the ranks' shards don't tile their tensors, common states differ, or `layout` isn't what the
            ranks hold, or not the same on all.
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
    # A group of its own, so that what is committed at the end of a process never meets another's training step.
    ranks = current_world(world, purpose="async save" if async_sharded_save else None)
    options = SaveOptions(durable, allow_pickle, stale_after, progress or SaveOptions().progress, fingerprint)
    take_apart = partial(prepare_for_later if async_sharded_save else prepare, sharded_state_dict, content_metadata)
    prepared, known = agree(ranks, "save: prepare", partial(_matched, take_apart, layout, ranks))
    for_comparison = preprocess_common_before_consistency_check or (lambda common: common)
    writes, shards = agree(ranks, "save: choose main replicas", partial(_main_replicas, prepared, ranks))
    if validate_access_integrity or layout is not None:
        compared = for_comparison if validate_access_integrity else None
        writes, shards = _shared_out(ranks, prepared, known, compared, allow_pickle=allow_pickle)
    choices = (sharded_strategy, common_strategy)
    whole = validate_access_integrity if fingerprint else None
    choose = partial(_backends, ranks, checkpoint_dir, choices, strategies, fingerprint_of_whole=whole)
    backends = agree(ranks, "save: find the format", choose)
    draft = replace(begin(ranks, checkpoint_dir, options, backends, strategies, overwrite=overwrite), layout=shards)
    keep = snapshot_shards if async_sharded_save and snapshot else tuple

    def plan() -> AsyncRequest[Any]:
        taken = (keep(writes[0]), writes[1])
        return save_request(draft, taken, prepared.common, choices, backends, strategies)

    try:
        request = agree(ranks, "save: plan", plan)
    except BaseException:
        end(draft)  # still empty: nothing is written before all ranks can
        raise
    if async_sharded_save:
        return request
    request.execute_sync()
    return None


def _matched(
    take_apart: Callable[[], Prepared], layout: ShardColumns | None, world: World
) -> tuple[Prepared, KnownLayout | None]:
    prepared = take_apart()
    return prepared, known_layout("save", layout, prepared.tensors, world.rank, world.size)


def _backends(
    world: World,
    directory: Directory,
    choices: tuple[Choice, Choice],
    strategies: Strategies,
    *,
    fingerprint_of_whole: bool | None,
) -> Backends:
    refuse_overlap(directory, world.rank)
    backends = backends_of(*choices, strategies)
    if fingerprint_of_whole is not None:
        check_can_hold(backends[0][0], whole=fingerprint_of_whole)
    return backends


def _main_replicas(prepared: Prepared, world: World) -> tuple[Writes, ShardColumns | None]:
    """Return what a rank writes that knows nothing of the others, and all ranks' shards if there are no others."""
    tensors = tuple(shard for shard in prepared.tensors if is_main_replica(shard.replica_id))
    objects = tuple(item for item in prepared.objects if is_main_replica(item.replica_id))
    return (tensors, objects), shard_columns(prepared.tensors) if world.size == 1 else None


def _shared_out(
    world: World,
    prepared: Prepared,
    known: KnownLayout | None,
    for_comparison: Callable[[Any], Any] | None,
    *,
    allow_pickle: bool,
) -> tuple[Writes, ShardColumns]:
    """Return what this rank writes, and all ranks' shards, after they told each other what they don't know.

    Unless there is nothing `for_comparison`, it is checked that shards, objects and common states fit.
    """

    def common() -> Any:
        return None if for_comparison is None else for_comparison(comparable(prepared.common))

    def encode_own() -> bytes:
        return encode_tree(common(), allow_pickle=allow_pickle)

    def decoded(encoded: Sequence[bytes]) -> list[Any]:
        return [decode_tree(data, allow_pickle=allow_pickle) for data in encoded]

    def describe_own() -> Description:
        hashed = common_digest(common(), allow_pickle=allow_pickle)
        return describe(prepared.tensors, prepared.objects, world.rank, hashed, known)

    descriptions = gather(world, "save: describe shards", describe_own)
    if len({part.common for part in descriptions}) > 1:
        # Not pickled: ranks may hold instances of classes that others can't import.
        encoded = gather(world, "save: compare common states", encode_own)
        agree(world, "save: check common states", lambda: check_common(decoded(encoded)))
    check = partial(check_together, "save", descriptions, known, tiling=for_comparison is not None)
    columns = agree(world, "save: check integrity", check)
    tensors = agree(world, "save: share out", partial(_own_tensors, prepared, known, columns, world))
    return (tensors, _main_replicas(prepared, world)[0][1]), columns


def _own_tensors(
    prepared: Prepared, known: KnownLayout | None, columns: ShardColumns, world: World
) -> tuple[ShardedTensor, ...]:
    own = np.flatnonzero(columns.rank == world.rank)
    writes = level_writes(columns, world.size)[own]
    chosen = np.flatnonzero(writes) if known is None else np.sort(known.order[writes])
    return tuple(prepared.tensors[number] for number in chosen.tolist())
