"""load: a checkpoint fills a sharded tree, in any layout, whatever layout it was saved in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...errors import UnsafeFile, UnsupportedValue
from ...layouts import ObjectRule, ShardColumns
from ...mapping import LocalNonpersistentObject
from ...storage import Directory, ReadReport, Verify
from ...strategies import Checkpoint, LoadOptions, Strategies, default_strategies
from ...trees import HOLE, join_loaded, told_of_depth
from ...world import World, agree, current_world, gather
from .._consistency import check_together, describe
from .._dispatch import Choice
from .._known_layout import KnownLayout, known_layout
from .._open import load_common, load_tensors_metadata, open_together, sharded_metadata, stored_keys
from ._exchange import Exchange
from ._fit import check_target
from ._read import Reading, read_leaves
from ._strict import StrictHandling, looks_beforehand, needs_all_ranks, parse_strict, report_keys, returns_keys
from ._taken_apart import Target, is_sharded, left_out, take_apart


def load(
    sharded_state_dict: Any,
    checkpoint_dir: Directory,
    sharded_strategy: Choice = None,
    common_strategy: Choice = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    world: Any = None,
    donate: bool = False,
    cast: bool = False,
    exchange: Exchange = "auto",
    object_rules: Mapping[str, ObjectRule] | None = None,
    verify: Verify = "whole",
    allow_pickle: bool = False,
    types: tuple[type, ...] = (),
    strategies: Strategies = default_strategies,
    progress: Callable[[int], None] | None = None,
    report: Callable[[ReadReport], None] | None = None,
    layout: ShardColumns | None = None,
) -> Any:
    """Return the stored common state joined by the loaded target; every rank of the world calls it with its own target.

    Only the bytes that the target asks for are read. Plain values in the target are ignored.

    Args:
        sharded_state_dict: the target: shards say what to load. Their data may be tensors on any device (results go
            there), None, or meta tensors. It isn't changed.
        checkpoint_dir: where the checkpoint is.
        sharded_strategy: replaces the function that its format's row has for loading shards.
        common_strategy: replaces the one for the common state.
        validate_access_integrity: whether ranks exchange their targets and check that every element is asked for
            by exactly one main replica.
        strict: what to do about keys that only the target or only the checkpoint has.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        donate: whether the target's tensors are given away: they are filled in place and returned. If the
            load fails, their content is lost.
        cast: whether what is stored in another dtype than the target's is converted, as `torch.Tensor.to` does; a
            fraction, an imaginary part or an integer that doesn't fit is an error. Without, another dtype is one.
        exchange: whether ranks that want the same shard read it once between them and pass it on: "always", "never",
            or "auto", which does so where storage is remote.
        object_rules: what becomes of arrays of objects that are stored in another shape than the target's, by patterns
            of keys (``*`` stands for one part between dots, ``**`` for any number); the first that fits a key counts.
            Without a rule, another shape is an error.
        verify: which blocks are checked against their hashes: "whole" those that are read whole or nearly (at most
            64 KiB missing), and in files of at most 4 MiB all that are touched; "all" touched; or none (None).
        allow_pickle: whether pickled values may be unpickled, which can run any code.
        types: enum, dataclass and namedtuple classes that stored records become instances of; in the common
            state, the namedtuple classes in the target count too.
        strategies: the dispatch table.
        progress: is told, now and then, how many bytes this rank read since the last time.
        report: is given what this rank read, once.
        layout: the tensor shards that all ranks ask for, as every rank computed them by itself from a mesh and specs,
            or from DTensors: then no layouts are exchanged, only a hash of this one, which is checked in any case.

    Returns:
        The tree; with a strict mode that returns keys, ``(tree, missing, unexpected)``.

    Raises:
        NotACheckpoint: there is none.
        KeyMismatch: the checkpoint lacks what the target asks for.
        TreeError: the target doesn't fit the common state, or is too deep; a rule for objects fits no key.
        UnsupportedValue: a shard is hidden in a value of the target that isn't entered; a rule can't handle an object.
        ShapeError: a tensor's global shape or dtype differs, the checkpoint doesn't cover the target, a stored value
            can't be converted, donated tensors share memory, or objects of another shape have no rule.
        IntegrityError: elements don't have one main replica each, or `layout` isn't what the ranks ask for, or not the
            same on all.
        CorruptCheckpoint: stored bytes aren't what was saved.
        UnsafeFile: it holds pickled values, and `allow_pickle` isn't given.
        RemoteError: another rank failed.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4)), "step": 7}, folder)
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, dtype=torch.int64), (0, 1, 2))
        >>> st.load({"w": half}, folder, validate_access_integrity=False)
        {'w': tensor([2, 3]), 'step': 7}

    References:
        megatron.core.dist_checkpointing.serialization.load, megatron-core 0.16.1.
    """
    ranks = current_world(world)
    options = LoadOptions(verify, allow_pickle, types, progress or LoadOptions().progress)
    mode = agree(ranks, "load: options", partial(parse_strict, strict))
    checkpoint = open_together(checkpoint_dir, ranks, options, strategies)
    target, known = agree(ranks, "load: prepare", partial(_prepared, sharded_state_dict, layout, ranks))
    if validate_access_integrity or layout is not None:
        _check_targets(ranks, target, known, tiling=validate_access_integrity)
    choices = (sharded_strategy, common_strategy, strategies)
    missing, unexpected = _compare_keys(ranks, checkpoint, target, known, mode, choices)
    target = agree(ranks, "load: leave out", partial(left_out, target, sharded_state_dict, unexpected))
    fitting = partial(check_target, checkpoint, target, sharded_strategy, strategies, cast=cast)
    kinds, objects = agree(ranks, "load: check the target", partial(fitting, rules=object_rules, left_out=unexpected))
    reading = Reading(checkpoint, sharded_strategy, strategies, donate, exchange, kinds, objects, known=known)
    common = agree(ranks, "load: common state", partial(_common, checkpoint, target, choices))
    loaded, read = read_leaves(reading, target.leaves)
    tree = agree(ranks, "load: join", partial(_joined, common, target, loaded))
    agree(ranks, "load: report", lambda: report(read) if report is not None else None)
    return (tree, missing, unexpected) if returns_keys(mode) else tree


Choices = tuple[Choice, Choice, Strategies]


def _prepared(tree: Any, layout: ShardColumns | None, world: World) -> tuple[Target, KnownLayout | None]:
    target = take_apart(tree)
    return target, known_layout("load", layout, target.tensors, world.rank, world.size)


def _check_targets(world: World, target: Target, known: KnownLayout | None, *, tiling: bool) -> None:
    own = partial(describe, target.tensors, target.objects, world.rank, known=known)
    descriptions = gather(world, "load: describe target", own)
    agree(world, "load: check integrity", partial(check_together, "load", descriptions, known, tiling=tiling))


def _compare_keys(
    world: World,
    checkpoint: Checkpoint,
    target: Target,
    known: KnownLayout | None,
    mode: StrictHandling,
    choices: Choices,
) -> tuple[set[str], set[str]]:
    """Return the missing and unexpected keys that a strict mode wants to know."""
    if not looks_beforehand(mode):
        return set(), set()
    own = {leaf.key for leaf in target.leaves if is_sharded(leaf)}
    sharded, common, strategies = choices
    # A function that loads shards isn't one that lists them.
    pairs = (None if callable(sharded) else sharded, None if callable(common) else common, strategies)
    stored = agree(world, "load: metadata", lambda: stored_keys(sharded_metadata(checkpoint, *pairs)))
    everywhere = stored
    if needs_all_ranks(mode):
        told = set(() if known is None else known.columns.keys)
        everywhere = told.union(*gather(world, "load: keys", lambda: own - told))
    missing, unexpected = stored - everywhere, own - stored
    agree(world, "load: strict", partial(report_keys, mode, missing, unexpected))
    return missing, unexpected


def _common(checkpoint: Checkpoint, target: Target, choices: Choices) -> Any:
    """Return the stored common tree, once it is known that the target fits it: before a tensor is read."""
    common = _stored_common(checkpoint, target.types, choices)
    _join(common, target, [leaf if _is_filled(leaf) else HOLE for leaf in target.leaves])
    return common


def _stored_common(checkpoint: Checkpoint, types: tuple[type, ...], choices: Choices) -> Any:
    """Return the stored common tree, with instances of the target's own namedtuple classes where they fit."""
    _, common, strategies = choices
    # The caller's types come last, where they count.
    options = replace(checkpoint.options, types=(*types, *checkpoint.options.types))
    try:
        return load_common(replace(checkpoint, options=options), common, strategies)
    except UnsupportedValue:
        # A class that is no more what was stored: its records stay records, as they do without a target.
        return load_common(checkpoint, common, strategies)
    except UnsafeFile as error:
        error.add_note("The tensors can be read without that: see load_plain_tensors and open_checkpoint.")
        raise


def _is_filled(leaf: Any) -> bool:
    return is_sharded(leaf) or isinstance(leaf, LocalNonpersistentObject)


def _joined(common: Any, target: Target, loaded: Sequence[Any]) -> Any:
    with told_of_depth("load"):
        # Factories merge last, so that they see the plain values that they built beside their shards.
        return target.merge(_join(common, target, loaded))


def _join(common: Any, target: Target, loaded: Sequence[Any]) -> Any:
    tree = target.rebuild(loaded)
    with told_of_depth("load"):
        return join_loaded(common, tree)


def load_plain_tensors(
    checkpoint_dir: Directory,
    *,
    world: Any = None,
    verify: Verify = "whole",
    strategies: Strategies = default_strategies,
) -> dict[str, torch.Tensor]:
    """Return every stored tensor whole, by key; each rank of the world reads all of them.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"model": [st.ShardedTensor.from_rank_offsets("w", torch.arange(3))], "step": 7}, folder)
        >>> st.load_plain_tensors(folder)
        {'w': tensor([0, 1, 2])}
    """
    ranks = current_world(world)
    target = agree(ranks, "load: metadata", partial(load_tensors_metadata, checkpoint_dir, strategies=strategies))
    checkpoint = open_together(checkpoint_dir, ranks, LoadOptions(verify), strategies)
    loaded, _ = read_leaves(Reading(checkpoint, None, strategies), list(target.values()))
    return dict(zip(target, loaded, strict=True))
