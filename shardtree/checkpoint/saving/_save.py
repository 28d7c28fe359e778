"""save: a sharded tree becomes a checkpoint, written by all ranks and committed by one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

from ...layouts import ShardColumns
from ...storage import Directory, background_threads
from ...strategies import AsyncRequest, PendingSave, SaveOptions, Strategies
from ...world import World, agree, current_world, step
from .._dispatch import Backends, Choice, backends_of
from .._fingerprint import check_can_hold
from ..async_saves import refuse_overlap, snapshot_shards
from ._begin import begin, check_seen, draft_of
from ._prepare import prepare, prepare_for_later
from ._ready import Comparison, Ready, Sums, Told, compare_common, get_ready, replica_sums, shares
from ._request import save_request, warns_unused


class _Options(TypedDict, total=False):
    """What `save` takes by name alone, for type checkers."""

    world: Any
    overwrite: bool
    snapshot: bool
    durable: bool
    allow_pickle: bool
    stale_after: float
    strategies: Strategies | None
    progress: Callable[[int], None] | None
    fingerprint: bool
    checksums: bool
    check_replicas: bool
    layout: ShardColumns | None


# In this order: a call that doesn't say async_sharded_save fits the first two.
@overload
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    async_sharded_save: Literal[False] = ...,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = ...,
    content_metadata: Mapping[str, Any] | None = ...,
    **options: Unpack[_Options],
) -> None: ...
@overload
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    async_sharded_save: Literal[True] = ...,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = ...,
    content_metadata: Mapping[str, Any] | None = ...,
    **options: Unpack[_Options],
) -> AsyncRequest[Any]: ...
@overload
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = ...,
    common_strategy: Choice = ...,
    validate_access_integrity: bool = ...,
    async_sharded_save: bool = ...,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = ...,
    content_metadata: Mapping[str, Any] | None = ...,
    **options: Unpack[_Options],
) -> AsyncRequest[Any] | None: ...
def save(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    world: Any = None,
    overwrite: bool = False,
    snapshot: bool = True,
    durable: bool = True,
    allow_pickle: bool = False,
    stale_after: float = 3600.0,
    strategies: Strategies | None = None,
    progress: Callable[[int], None] | None = None,
    fingerprint: bool = False,
    checksums: bool = True,
    check_replicas: bool = False,
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
        preprocess_common_before_consistancy_check: applied to the common state before ranks compare theirs.
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
        strategies: the dispatch table; None for the process's.
        progress: is told, now and then, how many bytes this rank wrote since the last time; by the threads that
            write, never two at once.
        fingerprint: whether each tensor's `fingerprint` is stored with it, added up from the bytes as they are written;
            `verify` then reads the tensors back and compares. Only our own format has a place for that.
        checksums: whether the hash of each block of 256 KiB is stored, so that loads and `verify` find what was
            changed. Without, a save is a little faster, and such checkpoints are taken on trust. The common state, the
            index and what a format's own files carry are hashed all the same.
        check_replicas: whether replicas of tensors that are cut alike are compared, by `fingerprint`, before anything
            is written: a spec that forgets a cut makes every rank call its own part the whole. Each rank then looks at
            all that it shares with another one. Objects aren't compared.
        layout: the tensor shards of all ranks, as every rank computed them by itself from a mesh and specs, or from
            DTensors: then no layouts are exchanged, only a hash of this one. It is checked as exchanged ones are, and
            replicas are shared out by it also where `validate_access_integrity` is False.

    Returns:
        None; with `async_sharded_save` the request, to be scheduled, executed or abandoned on every rank. One that is
        dropped instead warns (ResourceWarning), and what it made in the folder goes with the next save there.

    Raises:
        CheckpointReplaced: a save to the same folder is on its way.
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        IntegrityError: the ranks' shards don't tile their tensors, common states differ, replicas do and were to be
            compared, or `layout` isn't what the ranks hold, or not the same on all.
        UnsupportedValue: a value can't be stored, or a shard is hidden in one.
        StorageError: files can't be written, or ranks don't see the same folder.
        RemoteError: on every rank where one of several failed; also of the class above that the failures share.

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
    tell = progress or SaveOptions().progress
    threads = background_threads() if async_sharded_save else None
    options = SaveOptions(durable, allow_pickle, stale_after, tell, fingerprint, checksums, threads)
    take_apart = partial(prepare_for_later if async_sharded_save else prepare, sharded_state_dict, content_metadata)
    checked = preprocess_common_before_consistancy_check or _as_it_is if validate_access_integrity else None
    comparison = Comparison(
        layouts=validate_access_integrity or check_replicas or layout is not None,
        replicas=check_replicas,
        common=checked,
        allow_pickle=allow_pickle,
    )
    choices = (sharded_strategy, common_strategy)
    whole = validate_access_integrity if fingerprint else None
    choose = partial(_backends, ranks, checkpoint_dir, choices, strategies, fingerprint_of_whole=whole)
    keep = snapshot_shards if async_sharded_save and snapshot else tuple

    def plan(ready: Ready, told: Sequence[Told], sums: Sequence[Sums]) -> AsyncRequest[Any]:
        (tensors, objects), columns = step(
            "save: check integrity", partial(shares, ranks, ready, told, comparison, sums)
        )
        pending = step("save: see the folder", partial(_draft, ranks, ready, told[0], options))
        known, writes = replace(pending, layout=columns), (keep(tensors), objects)
        return save_request(known, writes, ready.prepared.common, choices, ready.backends, strategies)

    with ExitStack() as undo:
        make_folder = partial(begin, ranks, options, strategies, undo, overwrite=overwrite)
        ready, told = get_ready(ranks, take_apart, layout, comparison, choose, checkpoint_dir, make_folder)
        compare_common(ranks, ready, told, comparison)
        sums = replica_sums(ranks, ready, told, comparison)
        request = agree(ranks, "save: plan", partial(plan, ready, told, sums), steps=_PLAN_STEPS)
        undo.pop_all()
    if async_sharded_save:
        return warns_unused(request)
    request.execute_sync()
    return None


_PLAN_STEPS = ("save: check integrity", "save: see the folder")


def _draft(world: World, ready: Ready, first: Told, options: SaveOptions) -> PendingSave:
    """Return the pending save of what rank 0 began."""
    if ready.pending is not None:
        return ready.pending
    if first.begun is None:
        raise TypeError("rank 0 hasn't told where the save goes")
    pending = draft_of(first.begun, ready.storage, world, options)
    check_seen(pending)
    return pending


def _as_it_is(common: Any) -> Any:
    return common


def _backends(
    world: World,
    directory: Directory,
    choices: tuple[Choice, Choice],
    strategies: Strategies | None,
    *,
    fingerprint_of_whole: bool | None,
) -> Backends:
    refuse_overlap(directory, world.rank)
    backends = backends_of(*choices, strategies)
    if fingerprint_of_whole is not None:
        check_can_hold(backends[0][0], whole=fingerprint_of_whole)
    return backends
