"""Steps 2 and 3 of a load: ranks exchange descriptions of their targets, and compare keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ....core.layouts import ShardColumns
from ...table import Checkpoint, LoadOptions, Resolution, Strategies, StrategyAction, find_strategy
from ...table.index import stored_keys
from ...world import World, agree, gather, share, step
from .._consistency import KnownLayout, LayoutDescription, brief, complete, describe, known_layout
from .._dispatch import Choice, alike, alike_choices, sharded_backend
from .._open import OPEN_STEPS, Opening, parse_together, with_opening
from ._choice import ReadPlace, place_of
from ._stored import Choices, Stored
from ._strict import WITH_MISSING, StrictHandling, mismatched_keys, parse_strict
from ._targets import Target, take_apart, usable_device

_ASK_STEPS = (*OPEN_STEPS, "load: options", "load: prepare")


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """The arguments of a call of `load`.

    Attributes:
        tree: The target.
        choices: The strategies for the shards and for the common state, and the dispatch table.
        layout: The tensor shards that all ranks request, if the caller passed them.
        strict: The mode for keys that only the target or only the checkpoint has.
        validate: Whether exactly one main replica must request each element.
        cast: Whether dtypes are converted.
        plain: Patterns of the keys that may be cast although tensors named like scales are stored beside them.
        donate: Whether the target's tensors are filled in place.
        device: The device of tensors that have no memory in the target.
        options: The options of the read.
    """

    tree: Any
    choices: Choices
    layout: ShardColumns | None
    strict: str | StrictHandling
    validate: bool
    cast: bool
    plain: Sequence[str]
    donate: bool
    device: str | torch.device | None
    options: LoadOptions

    @property
    def describes(self) -> bool:
        """Whether ranks exchange descriptions of their targets."""
        return self.validate or self.layout is not None


Message = tuple[Opening, LayoutDescription | None, ReadPlace]
"""A rank's message to the others: the checkpoint that it has opened (only rank 0's counts), the description of its
target if ranks compare them, and the place from which it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalLoad:
    """The inputs of a load on one rank, checked and prepared before ranks exchange anything.

    Attributes:
        checkpoint: The checkpoint that this rank has opened.
        mode: The strict mode.
        device: The device of tensors that have no memory in the target.
        target: This rank's target, split into leaves.
        layout: The tensor shards that all ranks request, if the caller passed them.
        description: The description of this rank's target for the others; None if ranks do not compare targets.
    """

    checkpoint: Checkpoint
    mode: StrictHandling
    device: torch.device
    target: Target
    layout: KnownLayout | None
    description: LayoutDescription | None


def ask(world: World, open_here: Callable[[], Checkpoint], request: LoadRequest) -> tuple[LocalLoad, list[Message]]:
    """Prepare a load on this rank and exchange messages; return the prepared load, and all ranks' messages by rank.

    This takes one all-gather, or two for many ranks.

    Args:
        world: The ranks that load together.
        open_here: Function that opens the checkpoint on this rank, or raises.
        request: This rank's request.

    Raises:
        NotACheckpoint, KeyMismatch, MetadataError, TreeError, UnsupportedValue, IntegrityError, RemoteError: as `load`.
    """

    def alone() -> LocalLoad:
        checkpoint = open_here()
        with step("load: options"):
            mode, device = parse_strict(request.strict), usable_device(request.device)
        with step("load: prepare"):
            target, layout = matched_target(request, world.rank, world.size)
        description = None
        if request.describes:
            description = describe(target.tensors, target.objects, world.rank, layout=layout, ranks=world.size)
        return LocalLoad(checkpoint, mode, device, target, layout, description)

    def message(local: LocalLoad) -> Message:
        opening = local.checkpoint.fields, local.checkpoint.stamp
        return opening, brief(local.description, world.size), place_of(local.checkpoint.storage, world.size)

    # The phase has two names, so that a mix of ranks that compare targets and ranks that don't is a clear error.
    local, messages = share(
        world,
        "load: describe target" if request.describes else "load: ask",
        alone,
        message,
        steps=_ASK_STEPS,
        given=_alike_arguments(request) if world.size > 1 else None,
    )
    descriptions = complete(world, local.description, [description for _, description, _ in messages])
    messages = [(opening, whole, place) for (opening, _, place), whole in zip(messages, descriptions, strict=True)]
    # Only rank 0's opening is used, so that all ranks load the same checkpoint even while a save replaces it.
    return replace(local, checkpoint=with_opening(local.checkpoint, messages[0][0], request.choices[2])), messages


def _alike_arguments(request: LoadRequest) -> dict[str, object]:
    """Return the arguments that must be equal on all ranks and that differ from their defaults, by name."""
    strict = getattr(request.strict, "value", request.strict)
    arguments = {} if strict == StrictHandling.ASSUME_OK_UNEXPECTED.value else {"strict": strict}
    arguments |= {"cast": request.cast} if request.cast else {}
    arguments |= {"plain": repr(request.plain)} if request.plain else {}
    return alike(request.options) | arguments | alike_choices(*request.choices[:2])


def matched_target(request: LoadRequest, rank: int, ranks: int) -> tuple[Target, KnownLayout | None]:
    """Return a rank's target, split into leaves, and the caller's layout of all ranks; None if no layout was passed.

    The layout is checked against the target.
    """
    target, layout = take_apart(request.tree, donate=request.donate), request.layout
    return target, None if layout is None else known_layout("load", layout, target.tensors, rank, ranks)


def resolve(
    checkpoint: Checkpoint, sharded: Choice, strategies: Strategies | None, keys: Callable[[], tuple[Set[str], bool]]
) -> None:
    """Find the facts about stored tensors that the format's metadata lacks, and keep them in the checkpoint's cache.

    Only formats with a RESOLVE row in the dispatch table need this. For them the call is collective, and ranks
    divide the search.

    Args:
        checkpoint: The checkpoint; its fields of metadata.json are rank 0's.
        sharded: The caller's choice of a strategy for the shards; if it is a function, nothing is searched.
        strategies: The dispatch table; None for the process's.
        keys: Function that returns the keys of this rank's tensors, and whether the load also lists all stored keys.
    """
    world = checkpoint.world
    # Only rank 0's fields decide, so that all ranks take the same branch.
    row = find_strategy(StrategyAction.RESOLVE, *sharded_backend(checkpoint.fields), strategies=strategies)
    if row is None:
        return

    def find_resolution() -> Resolution | None:
        resolution = None if callable(sharded) else row(checkpoint, *keys())
        return None if resolution is not None and resolution.copies is not None and world.size == 1 else resolution

    resolution, needs = share(world, "load: needs resolving", find_resolution, lambda found: found is not None)
    ranks = [rank for rank, needs_it in enumerate(needs) if needs_it]
    if not ranks:
        return

    def find() -> Any:
        return None if resolution is None else resolution.find(ranks.index(world.rank), len(ranks))

    results = gather(world, "load: resolve", find)

    def keep() -> None:
        if resolution is not None:
            resolution.keep([results[rank] for rank in ranks])

    # This is a separate phase, so that an error is raised on all ranks before any target tensor is written.
    agree(world, "load: keep what was resolved", keep)


def with_metadata(request: LoadRequest, local: LocalLoad) -> LocalLoad:
    """Return a rank's prepared load, with all facts about the stored tensors in the cache of its checkpoint.

    All ranks must call this. They communicate only for a format whose metadata rank 0 parses for all ranks, or whose
    metadata lacks some facts.
    """
    sharded, _, strategies = request.choices
    checkpoint = parse_together(local.checkpoint, sharded, strategies)
    resolve(checkpoint, sharded, strategies, partial(keys_to_resolve, local))
    return replace(local, checkpoint=checkpoint)


def keys_to_resolve(local: LocalLoad) -> tuple[Set[str], bool]:
    """Return the keys of the tensors that a rank requests, and whether the strict mode also needs all stored keys."""
    # A strict mode that compares keys lists all stored tensors.
    keys = local.target.plain_keys.union(shard.key for shard in local.target.tensors)
    return keys, local.mode is not StrictHandling.ASSUME_OK_UNEXPECTED


def compare_keys(world: World, request: LoadRequest, local: LocalLoad) -> tuple[set[str], set[str]]:
    """Return the stored keys that no rank requests, and the keys that this rank requests and that are not stored.

    A set that the load's strict mode (`StrictHandling`) doesn't need is empty. If the mode needs neither set, the call
    is not collective.

    Args:
        world: The ranks that load together.
        request: This rank's request.
        local: This rank's prepared load.
    """
    if local.mode is StrictHandling.ASSUME_OK_UNEXPECTED:
        return set(), set()
    stored = Stored(local.checkpoint, request.choices)
    checkpoint_keys = agree(world, "load: metadata", lambda: stored_keys(stored.listing))
    local_keys = local.target.keys_among(checkpoint_keys)
    everywhere = checkpoint_keys
    if local.mode in WITH_MISSING:
        # Only keys outside of a known layout are sent, since every rank has the others already.
        known_keys = set(() if local.layout is None else local.layout.columns.keys)
        everywhere = known_keys.union(*gather(world, "load: keys", lambda: local_keys - known_keys))
    return mismatched_keys(local.mode, local_keys, checkpoint_keys, everywhere)
