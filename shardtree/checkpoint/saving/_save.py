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
from ...world import agree, current_world, step
from .._dispatch import Choice
from ..async_saves import snapshot_shards
from ._commit import save_request, warns_unused
from ._meet import LocalSave, Message, Sums, compare_common, meet, share_out, sum_replicas
from ._parts import take_apart, take_apart_for_later
from ._start import SaveCall, check_seen, pending_save


class _Keywords(TypedDict, total=False):
    """What `save` takes by name alone, for type checkers."""

    world: Any
    overwrite: bool
    layout: ShardColumns | None
    strategies: Strategies | None
    options: SaveOptions | None


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
    **keywords: Unpack[_Keywords],
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
    **keywords: Unpack[_Keywords],
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
    **keywords: Unpack[_Keywords],
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
    layout: ShardColumns | None = None,
    strategies: Strategies | None = None,
    options: SaveOptions | None = None,
) -> AsyncRequest[Any] | None:
    """Save a sharded tree; every rank of the world calls it with its own tree.

    Until metadata.json is written, as the last step, the folder holds what it held before. The steps:

    1. Take the tree apart: shards, objects, common state. Pure.
    2. Meet: ranks describe their shards to each other, and rank 0 makes the folder. One collective.
    3. Compare: common states where their hashes differ, replicas with `check_replicas`. Usually no collective.
    4. Check that shards tile their tensors, share out replicas, and plan this rank's files. One collective.
    5. Write them. No collective; an asynchronous save returns the request that does this and the next step.
    6. Commit: lengths and hashes meet on rank 0, which writes the index and metadata.json. Three collectives.

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
        layout: the tensor shards of all ranks, as every rank computed them by itself from a mesh and specs, or from
            DTensors: then no layouts are exchanged, only a hash of this one. It is checked as exchanged ones are, and
            replicas are shared out by it also where `validate_access_integrity` is False.
        strategies: the dispatch table; None for the process's.
        options: how it is written: durability, checksums, fingerprints, snapshots, progress.

    Returns:
        None; with `async_sharded_save` the request, to be scheduled, executed or abandoned on every rank. One that is
        dropped instead warns (ResourceWarning), and what it made in the folder goes with the next save there.

    Raises:
        CheckpointReplaced: a save to the same folder is in progress.
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
    options = SaveOptions() if options is None else options
    tiling, later = validate_access_integrity, async_sharded_save
    if later and options.threads is None:
        options = replace(options, threads=background_threads())
    # A process group of its own: a commit at the end of one process can't be paired with a collective of another rank's
    # training step.
    ranks = current_world(world, purpose="async save" if later else None)
    view = preprocess_common_before_consistancy_check or _unchanged
    choices = (sharded_strategy, common_strategy)
    call = SaveCall(ranks, choices, tiling, view, options, overwrite, layout, strategies, later)
    parts_of = partial(take_apart_for_later if later else take_apart, sharded_state_dict, content_metadata)
    with ExitStack() as undo:
        local, messages = meet(call, parts_of, checkpoint_dir, undo)
        compare_common(call, local, messages)
        sums = sum_replicas(call, local, messages)
        request = agree(ranks, "save: plan", partial(_plan, call, local, messages, sums), steps=_PLAN_STEPS)
        undo.pop_all()  # from here on the request removes the folder if it is abandoned
    if later:
        return warns_unused(request)
    request.execute_sync()
    return None


_PLAN_STEPS = ("save: check integrity", "save: see the folder")


def _plan(call: SaveCall, local: LocalSave, messages: Sequence[Message], sums: Sequence[Sums]) -> AsyncRequest[Any]:
    """Return the request that writes and commits: what this rank writes, to the folder that rank 0 made."""
    checked = partial(share_out, call, local, messages, sums)
    (tensors, objects), columns = step("save: check integrity", checked)
    pending = step("save: see the folder", partial(_pending, call, local, messages[0]))
    if call.later and call.options.snapshot:
        tensors = snapshot_shards(tensors)
    known = replace(pending, layout=columns)
    return save_request(known, (tensors, objects), local.parts.common, call.choices, local.backends, call.strategies)


def _pending(call: SaveCall, local: LocalSave, first: Message) -> PendingSave:
    """Return the pending save that rank 0 began, as this rank sees it."""
    if local.pending is not None:
        return local.pending
    _, start = first
    if start is None:
        raise TypeError("rank 0 sent no place for the save")
    pending = pending_save(start, local.storage, call.world, call.options)
    check_seen(pending)
    return pending


def _unchanged(common: Any) -> Any:
    return common
