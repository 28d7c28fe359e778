"""save: write a sharded tree as a checkpoint, from all ranks, and commit it by a single file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....core.ambient import shielded
from ....core.codec import encode_tree
from ....core.deferred import leaf
from ....core.layouts import ShardColumns, shard_columns
from ....core.mapping import ShardedTensor, is_main_replica
from ....core.plans import level_writes
from ....errors import IntegrityError, error_text
from ...storage import Directory, background_threads, digest
from ...table import AsyncRequest, SaveOptions, Strategies
from ...world import World, agree, current_world, share, step, tried
from .._consistency import LayoutDescription, brief, check_together, complete, describe, known_layout
from .._dispatch import Choice, alike, alike_choices, backends_of, check_options
from ..async_saves import refuse_overlap, snapshot_shards
from ._formats import Formats, Writes, check_can_fingerprint, steps_of_formats
from ._parts import check_union, common_part, common_to_store, take_apart, take_apart_for_later
from ._saver import Saver, warns_unused
from ._start import begin, folder_at, pending_here
from ._values import Save, Start, TreeParts


@shielded
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

    A save takes six steps. The last one makes the folder a checkpoint, by writing metadata.json or the format's own
    file. Until then, an existing checkpoint stays unchanged.

    1. Take the tree apart: shards, objects, common state. Factories build their shards; an asynchronous save copies
       the common state. Ranks learn of a failure in the next step.
    2. Meet: ranks describe their shards to each other, and rank 0 makes the save's own folder, in `checkpoint_dir` or
       beside it. One collective, two for many ranks.
    3. Compare: common states if their hashes differ (`options` may unite them); with `check_replicas`, fingerprints of
       replicas. Usually no collective.
    4. Plan: check that shards tile their tensors, assign replicas to ranks, lay out this rank's files; an asynchronous
       save copies its tensors, unless `options` exclude it. Nothing is written. One collective.
    5. Write this rank's files. No collective; an asynchronous save returns the request that does this and step 6.
    6. Commit: rank 0 gathers lengths and hashes, writes the index and the common state, publishes the checkpoint by
       metadata.json, and removes the replaced one. Two collectives.

    A signal handler that may interrupt another save must not call it.

    Args:
        sharded_state_dict: Dicts, lists and tuples of shards, objects, factories and plain values. It isn't changed.
        checkpoint_dir: Path or URL that all ranks see, created if missing, or a `Storage`.
        sharded_strategy: Format of the shards: a backend's name for its latest version, a (backend, version) pair, or a
            function; the native format by default.
        common_strategy: Format of the common state, given like `sharded_strategy`. By default, the shards' format, or
            the native format if that one can't store a common state.
        validate_access_integrity: Whether ranks exchange their layouts, check that every element has exactly one main
            replica, and balance the writes of replicas: since these hold equal values, the rank with the least other
            data writes them. Otherwise each main replica is written by its own rank.
        async_sharded_save: Whether to return the request instead of running it, for an `AsyncCallsQueue`. The request
            keeps the present values: the caller may change the tree at once.
        preprocess_common_before_consistancy_check: Function that is applied to the common state before ranks compare
            theirs. Values that it leaves out may differ: rank 0's are stored, and other ranks' are lost.
        content_metadata: Metadata that is stored with the common state, for `load_content_metadata`.
        world: The ranks that take part; torch.distributed's default group, or else this process alone.
        overwrite: Whether an existing checkpoint may be replaced.
        layout: The tensor shards of all ranks, computed by every rank from a mesh and specs, or from DTensors. Then no
            layouts are exchanged, only a hash of this one. It is checked like exchanged layouts, and writes are
            balanced by it even if `validate_access_integrity` is False.
        strategies: The dispatch table; None for the process's.
        options: Durability, checksums, fingerprints, snapshots, progress, and the union of ranks' common states.

    Returns:
        None; with `async_sharded_save` the request, to be scheduled, executed or abandoned on every rank. If a request
        is dropped instead, there is a ResourceWarning, and the next save to the folder removes its files.

    Raises:
        CheckpointReplaced: a save to the same folder is in progress.
        AlreadyACheckpoint: the folder holds a checkpoint, and `overwrite` is False.
        IntegrityError: the ranks' shards don't tile their tensors, common states differ, compared replicas differ, or
            `layout` differs from the ranks' shards or between ranks.
        UnsupportedValue: a value can't be stored, or a shard lies inside a value that tree maps do not enter.
        StorageError: files can't be written, ranks don't see the same folder, or its name is that of a file.
        RemoteError: on every rank, if one of several failed. If all failures have the same class among those above,
            the error is an instance of that class too.

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
    argument = options  # checked in step 1, so that all ranks learn of an error
    options = options if isinstance(options, SaveOptions) else SaveOptions()
    validate, is_async = validate_access_integrity, async_sharded_save
    if is_async and options.threads is None:
        options = replace(options, threads=background_threads())
    ranks = current_world(world)
    formats, view = Formats((sharded_strategy, common_strategy), strategies), preprocess_common_before_consistancy_check
    saving = Save(ranks, checkpoint_dir, formats, validate, view, options, overwrite, layout, is_async)

    parts_or_error = tried(partial(_parts, saving, argument, sharded_state_dict, content_metadata))  # 1: runs now
    with ExitStack() as undo_folder:
        saving = meet(saving, parts_or_error, undo_folder)  # 2: all ranks wait
        saving = compare_common(saving, sharded_state_dict)  # 3: all wait if common states differ
        if options.check_replicas:
            check_replicas(saving)  # 3: all wait
        # An asynchronous save has its own process group, so that its commit never pairs with a collective of a training
        # step. It is made after step 2, in which ranks that don't save asynchronously are refused.
        writing = current_world(world, purpose="async save") if is_async else ranks
        request = plan(saving, writing)  # 4: nothing is written; all wait
        undo_folder.pop_all()  # from here on, abandoning the request removes the save's own folder
    if is_async:
        return warns_unused(request)
    results_or_error = tried(request.async_fn)  # 5: runs now
    request.finish(results_or_error)  # 6: all wait; rank 0 indexes and publishes
    return None


# Steps 1 to 4: the tree is taken apart; ranks meet, compare their states, and divide the writes.


def _parts(save: Save, options: Any, tree: Any, content_metadata: Mapping[str, Any] | None) -> TreeParts:
    check_options("save", options, SaveOptions)
    check_union(save)
    return (take_apart_for_later if save.is_async else take_apart)(tree, content_metadata)


_STEPS = (
    "save: prepare",
    "save: find the format",
    "save: find the folder",
    "save: look at the folder",
    "save: make the folder",
)

Message = tuple[LayoutDescription | None, Start | None]
"""A rank's message to the others: the description of its shards, if ranks compare them, and rank 0's destination."""


def meet(save: Save, parts: Callable[[], TreeParts], undo: ExitStack) -> Save:
    """Exchange the ranks' descriptions of their shards, make the save's folder on rank 0, and tell all ranks its name.

    This takes one all-gather, or two for many ranks.

    Args:
        save: The arguments of `save`.
        parts: Function that returns this rank's tree, split into parts, or raises the error of splitting it.
        undo: Stack for the callbacks that remove the folder that rank 0 makes, if the save fails.

    Returns:
        The save with more fields set, such as this rank's `parts`, all ranks' `descriptions`, and rank 0's `start`.
    """
    world = save.world
    describes = save.validate or save.options.check_replicas or save.layout is not None

    def alone() -> Save:
        with step("save: prepare"):
            local_parts, known = parts(), None
            if save.layout is not None:
                known = known_layout("save", save.layout, local_parts.tensors, world.rank, world.size)
        with step("save: find the format"):
            refuse_overlap(save.where, world.rank)
            backends = backends_of(*save.formats.choices, save.formats.strategies)
            if save.options.fingerprint:
                check_can_fingerprint(backends[0][0], whole=save.validate)
        with step("save: find the folder"):
            storage = folder_at(save.where)
        descriptions: tuple[LayoutDescription, ...] = ()
        if describes:
            compared, shards = common_part(save, local_parts.common), (local_parts.tensors, local_parts.objects)
            common = digest(encode_tree(compared, allow_pickle=save.options.allow_pickle))
            descriptions = (describe(*shards, world.rank, common, known, ranks=world.size),)
        formats = replace(save.formats, backends=backends)
        local = replace(save, where=storage, formats=formats, parts=local_parts, known=known, descriptions=descriptions)
        # This comes last, as the only step before ranks meet that changes the storage.
        return begin(local, storage, undo) if world.rank == 0 else local

    def message(local: Save) -> Message:
        return brief(next(iter(local.descriptions), None), world.size), local.start

    # The phase has two names, so that a mix of ranks that compare shards and ranks that don't is a clear error.
    local, messages = share(
        world,
        "save: describe shards" if describes else "save: get ready",
        alone,
        message,
        steps=_STEPS,
        given=_alike_arguments(save),
    )
    descriptions = complete(world, next(iter(local.descriptions), None), [description for description, _ in messages])
    return replace(local, descriptions=tuple(filter(None, descriptions)), start=messages[0][1])


def _alike_arguments(save: Save) -> dict[str, object]:
    """Return the arguments that must be equal on all ranks, by name; those with their default value are omitted."""
    if save.world.size == 1:
        return {}
    flags = {"overwrite": save.overwrite, "async_sharded_save": save.is_async}
    unusual = {name: flag for name, flag in flags.items() if flag}
    return alike(save.options) | unusual | alike_choices(*save.formats.choices)


def compare_common(save: Save, tree: Any) -> Save:
    """Compare the ranks' common states, and return the save with the state to store: their union if they are united.

    This takes two all-gathers if the hashes of the states differ, otherwise none.

    Args:
        save: The save.
        tree: This rank's tree.

    Raises:
        IntegrityError: common states differ, or, if a union is requested, have different values under one key.
    """
    hashes = [description.common for description in save.descriptions]
    if len(set(hashes)) < 2:
        return save
    return replace(save, parts=common_to_store(save, tree, hashes))


def check_replicas(save: Save) -> None:
    """Raise if replicas differ.

    This is collective; it takes one all-gather if the replicas are equal.

    Raises:
        IntegrityError: shards don't fit together, or replicas differ.
    """

    def join() -> tuple[ShardColumns, Sequence[ShardedTensor]]:
        tensors = save.parts.tensors
        order = range(len(tensors)) if save.known is None else save.known.order.tolist()
        columns = check_together("save", save.descriptions, save.known, tiling=save.validate)
        return columns, [tensors[number] for number in order]

    problems = leaf("differing_replicas")(save.world, join)
    if problems:  # the same on every rank
        fix = "If ranks hold different parts of the tensor, correct the spec; else copy the main replica to the others."
        raise IntegrityError(error_text("save: replicas differ", offenders=map(str, problems), fix=fix))


_PLAN_STEPS = ("save: check integrity", "save: see the folder")


def plan(save: Save, writing: World) -> AsyncRequest[Any]:
    """Return the request that writes this rank's part of the checkpoint, and then commits the save.

    The call is collective: it returns once all ranks have planned. Nothing is written yet.

    Args:
        save: The save, as `meet` returns it.
        writing: World for the write and the commit. It has the same ranks as the save's world, but an asynchronous save
            has its own process group.
    """
    return agree(save.world, "save: plan", partial(_plan, save, writing), steps=_PLAN_STEPS)


def _plan(save: Save, writing: World) -> AsyncRequest[Any]:
    with step("save: check integrity"):
        (tensors, objects), columns = share_out(save)
    with step("save: see the folder"):
        pending = save.pending or pending_here(save)
    if save.is_async and save.options.snapshot:
        tensors = snapshot_shards(tensors)
    pending = replace(pending, layout=columns, world=writing, common=save.parts.common)
    steps = steps_of_formats(pending, (tensors, objects), save.formats, save.parts.unions)
    return Saver(pending, save.formats, steps, save.claim, save.folder).request()


def share_out(save: Save) -> tuple[Writes, ShardColumns | None]:
    """Return the shards and objects that this rank writes, and the columns of all ranks' shards.

    The columns are None if several ranks save without describing their shards to each other.

    Raises:
        IntegrityError: the ranks' shards or objects don't fit together.
    """
    parts, world = save.parts, save.world
    objects = tuple(item for item in parts.objects if is_main_replica(item.replica_id))
    tensors = tuple(shard for shard in parts.tensors if is_main_replica(shard.replica_id))
    if not save.descriptions:
        return (tensors, objects), shard_columns(parts.tensors) if world.size == 1 else None
    columns = check_together("save", save.descriptions, save.known, tiling=save.validate)
    if save.validate and world.size == 1:  # no other rank could write the main replicas
        return (tensors, objects), columns
    own_rows = np.flatnonzero(columns.rank == world.rank)
    # Every rank computes the same shares from the same columns, so that no further exchange is needed.
    writes = level_writes(columns, world.size)[own_rows]
    numbers = np.flatnonzero(writes) if save.known is None else np.sort(save.known.order[writes])
    return (tuple(parts.tensors[number] for number in numbers.tolist()), objects), columns
