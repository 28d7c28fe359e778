"""save: a sharded tree becomes a checkpoint, written by all ranks and committed by one file."""

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

    Step 6 makes it a checkpoint, by metadata.json or the format's own file. Until then, a checkpoint that was there
    stays as it was. The steps:

    1. Take the tree apart: shards, objects, common state. Factories build; an asynchronous save copies the common
       state. If it fails, ranks learn of it in the next step.
    2. Meet: ranks describe their shards to each other, and rank 0 makes the save's own folder, in `checkpoint_dir` or
       beside it. One collective, two for many ranks.
    3. Compare: common states where their hashes differ, which `options` may unite; with `check_replicas`, sums of what
       replicas hold. Usually no collective.
    4. Plan: check that shards tile their tensors, share out replicas, lay out this rank's files; an asynchronous save
       copies its tensors, unless `options` say that they stay. Nothing is written. One collective.
    5. Write this rank's files. No collective; an asynchronous save returns the request that does this and step 6.
    6. Commit: lengths and hashes meet on rank 0, which writes the index and the common state, publishes the checkpoint
       by metadata.json, and removes what was replaced. Two collectives.

    Args:
        sharded_state_dict: dicts, lists and tuples of shards, objects, factories and plain values. It isn't changed.
        checkpoint_dir: a path or URL that all ranks see, made if it isn't there, or a `Storage`.
        sharded_strategy: the format of the shards: a backend's name, which means its latest version, (backend, version)
            or a function; the native format by default.
        common_strategy: the format of everything else, likewise.
        validate_access_integrity: whether ranks exchange their layouts, check that every element has exactly one
            main replica, and share out the writing of replicas: since these hold equal values, the rank that has least
            else to write does it. Otherwise each main replica is written where it is.
        async_sharded_save: whether to return the request instead of running it, for an `AsyncCallsQueue`.
            Everything is taken as it is now: the caller may go on changing it at once.
        preprocess_common_before_consistancy_check: applied to the common state before ranks compare theirs. What it
            leaves out may differ: then rank 0's is stored, and the other ranks' isn't.
        content_metadata: stored with the common state, for `load_content_metadata`.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        overwrite: whether a checkpoint that is already there may be replaced.
        layout: the tensor shards of all ranks, as every rank computed them by itself from a mesh and specs, or from
            DTensors: then no layouts are exchanged, only a hash of this one. It is checked as exchanged ones are, and
            replicas are shared out by it also where `validate_access_integrity` is False.
        strategies: the dispatch table; None for the process's.
        options: durability, checksums, fingerprints, snapshots, progress; whether ranks' common states are united.

    Returns:
        None; with `async_sharded_save` the request, to be scheduled, executed or abandoned on every rank. One that is
        dropped instead warns (ResourceWarning), and what it made in the folder goes with the next save there.

    Raises:
        CheckpointReplaced: a save to the same folder is in progress.
        AlreadyACheckpoint: there is a checkpoint already, and `overwrite` isn't given.
        IntegrityError: the ranks' shards don't tile their tensors, common states differ, replicas do and were to be
            compared, or `layout` isn't what the ranks hold, or not the same on all.
        UnsupportedValue: a value can't be stored, or a shard is hidden in one.
        StorageError: files can't be written, ranks don't see the same folder, or it would have a file's name.
        RemoteError: on every rank, if one of several failed; also an instance of the class above that all failures
            share.

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
    argument = options  # checked in step 1, so that all ranks learn what is wrong with it
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
        # A process group of its own, so that an asynchronous commit never pairs with a collective of a training step.
        # Not before step 2, in which ranks that aren't asynchronous would be waited for in vain.
        writing = current_world(world, purpose="async save") if is_async else ranks
        request = plan(saving, writing)  # 4: nothing is written; all wait
        undo_folder.pop_all()  # from here on the request, if it is abandoned, removes the save's own folder
    if is_async:
        return warns_unused(request)
    results_or_error = tried(request.async_fn)  # 5: runs now
    request.finish(results_or_error)  # 6: all wait; rank 0 indexes and publishes
    return None


# Steps 1 to 4: the tree is taken apart; ranks meet, compare what they hold, and share out who writes what


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
"""A rank's message to the others: its shards, None where ranks don't compare them; where the save goes, from rank 0."""


def meet(save: Save, parts: Callable[[], TreeParts], undo: ExitStack) -> Save:
    """Return the save as all ranks begin it; one all-gather, two for many ranks.

    Args:
        save: The arguments of `save`.
        parts: Function that returns this rank's tree, taken apart, or raises why it isn't.
        undo: Stack that gets callbacks which remove the folder that rank 0 makes.
    """
    world = save.world
    describes = save.validate or save.options.check_replicas or save.layout is not None

    def alone() -> Save:
        with step("save: prepare"):
            own, known = parts(), None
            if save.layout is not None:
                known = known_layout("save", save.layout, own.tensors, world.rank, world.size)
        with step("save: find the format"):
            refuse_overlap(save.where, world.rank)
            backends = backends_of(*save.formats.choices, save.formats.strategies)
            if save.options.fingerprint:
                check_can_fingerprint(backends[0][0], whole=save.validate)
        with step("save: find the folder"):
            storage = folder_at(save.where)
        descriptions: tuple[LayoutDescription, ...] = ()
        if describes:
            own_hash = digest(encode_tree(common_part(save, own.common), allow_pickle=save.options.allow_pickle))
            descriptions = (describe(own.tensors, own.objects, world.rank, own_hash, known, ranks=world.size),)
        formats = replace(save.formats, backends=backends)
        local = replace(save, where=storage, formats=formats, parts=own, known=known, descriptions=descriptions)
        # Last: of the steps that can fail before ranks meet, only this one changes anything on the storage.
        return begin(local, storage, undo) if world.rank == 0 else local

    def message(local: Save) -> Message:
        return brief(next(iter(local.descriptions), None), world.size), local.start

    # Two names for the phase, so that a mix of ranks that compare and ranks that don't is an error that says so.
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
    """Return the arguments that have to be the same on all ranks, where they aren't the usual ones."""
    if save.world.size == 1:
        return {}
    flags = {"overwrite": save.overwrite, "async_sharded_save": save.is_async}
    unusual = {name: flag for name, flag in flags.items() if flag}
    return alike(save.options) | unusual | alike_choices(*save.formats.choices)


def compare_common(save: Save, tree: Any) -> Save:
    """Return the save with the common state that is stored; two all-gathers where ranks' differ, else none.

    Args:
        save: The save.
        tree: This rank's tree.

    Raises:
        IntegrityError: common states differ; where their union is stored, under the same keys.
    """
    hashes = [description.common for description in save.descriptions]
    if len(set(hashes)) < 2:
        return save
    return replace(save, parts=common_to_store(save, tree, hashes))


def check_replicas(save: Save) -> None:
    """Raise if replicas differ; one all-gather if they don't.

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
        fix = "If each rank has a part of the tensor, cut it in its spec; else copy the main replica to the others."
        raise IntegrityError(error_text("save: replicas differ", offenders=map(str, problems), fix=fix))


_PLAN_STEPS = ("save: check integrity", "save: see the folder")


def plan(save: Save, writing: World) -> AsyncRequest[Any]:
    """Return the request that writes this rank's part to the folder that rank 0 made, and then commits; a barrier.

    Args:
        save: The save, whose ranks have met.
        writing: The ranks as they write and commit.
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
    """Return the shards that this rank writes, and all ranks' shards if it has them.

    Raises:
        IntegrityError: shards or objects don't fit together.
    """
    parts, world = save.parts, save.world
    objects = tuple(item for item in parts.objects if is_main_replica(item.replica_id))
    tensors = tuple(shard for shard in parts.tensors if is_main_replica(shard.replica_id))
    if not save.descriptions:
        return (tensors, objects), shard_columns(parts.tensors) if world.size == 1 else None
    columns = check_together("save", save.descriptions, save.known, tiling=save.validate)
    if save.validate and world.size == 1:  # each main replica is the only one, and no other rank could write it
        return (tensors, objects), columns
    own = np.flatnonzero(columns.rank == world.rank)
    # Each rank computes all ranks' shares alike, from the same columns, so that no further exchange is needed.
    writes = level_writes(columns, world.size)[own]
    numbers = np.flatnonzero(writes) if save.known is None else np.sort(save.known.order[writes])
    return (tuple(parts.tensors[number] for number in numbers.tolist()), objects), columns
