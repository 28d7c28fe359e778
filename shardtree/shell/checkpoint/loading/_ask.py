"""Steps 1 to 4 of a load: open the checkpoint, exchange what ranks ask for, check all that can fail before reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any, Final

import torch

from ....core.codec import named_types
from ....core.layouts import ShardColumns
from ....errors import StrategyError, UnsafeFile, UnsupportedValue
from ...table import (
    Checkpoint,
    LoadOptions,
    Resolution,
    Strategies,
    StrategyAction,
    fetch_checked,
    find_strategy,
    unless_replaced,
)
from ...table.index import stored_keys, stored_kinds, untaken_of
from ...world import World, agree, gather, share, step
from .._consistency import Description, KnownLayout, brief, check_together, complete, describe, known_layout, unions_of
from .._dispatch import Choice, alike, alike_choices, sharded_backend
from .._open import (
    OPEN_STEPS,
    Metadata,
    Opening,
    load_common,
    parse_together,
    sharded_metadata,
    with_opening,
)
from ._checks import Keys, check_rank, check_target, unexpected_keys
from ._choice import Place, bytes_wanted_twice, exchange_choice, place_of
from ._objects import ObjectsFit
from ._read import Destination, Reading, destination_of
from ._strict import (
    LOGGING,
    RANK_VALUES,
    STORED_VALUES,
    WITH_MISSING,
    Omissions,
    StrictHandling,
    log_keys,
    log_of_ranks,
    log_omissions,
    mismatched_keys,
    parse_strict,
    refuse_omissions,
)
from ._targets import Kinds, Target, take_apart, usable_device

Choices = tuple[Choice, Choice, Strategies | None]
"""What the caller named as strategies for the shards and the common state, and the dispatch table."""

_ASK_STEPS = (*OPEN_STEPS, "load: options", "load: prepare")
CHECK_STEPS = (
    "load: check integrity",
    "load: strict",
    "load: leave out",
    "load: check the target",
    "load: common state",
    "load: choose to exchange",
    "load: make memory",
)


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """What a caller of `load` asks for; the attributes are its arguments.

    Attributes:
        tree: the target.
        choices: the strategies.
        layout: all ranks' targets, where the caller gave them.
        strict: what to do about keys that only one side has.
        validate: whether every element must be asked for by one main replica.
        cast: whether dtypes are converted.
        plain: patterns of keys of values that need no scales.
        donate: whether the target's tensors are filled in place.
        device: where tensors are put that have no memory in the target.
        options: how the checkpoint is read.
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
        """Whether each rank gets a description of what the others ask for."""
        return self.validate or self.layout is not None


Message = tuple[Opening, Description | None, Place]
"""What a rank sends the others: what it has opened, which counts of rank 0; what it asks for, if ranks compare that;
and from where it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalLoad:
    """What a rank knows of a load before ranks exchange anything.

    Attributes:
        checkpoint: as this rank sees it.
        mode: what is done about keys that don't match.
        device: where tensors are put that have no memory in the target.
        target: this rank's, taken apart.
        layout: what all ranks ask for, where the caller gave it.
        description: of the target, None where ranks don't compare theirs.
    """

    checkpoint: Checkpoint
    mode: StrictHandling
    device: torch.device
    target: Target
    layout: KnownLayout | None
    description: Description | None


@dataclass(frozen=True, slots=True, eq=False)
class CheckedLoad:
    """A load that is known to fit: all that reading takes.

    Attributes:
        target: taken apart, without what isn't stored.
        common: the stored common tree.
        reading: how the target is read.
        destination: the memory for it.
        omissions: what isn't returned of what is stored, and not filled of the target.
    """

    target: Target
    common: Any
    reading: Reading
    destination: Destination
    omissions: Omissions


def ask(world: World, open_here: Callable[[], Checkpoint], request: LoadRequest) -> tuple[LocalLoad, list[Message]]:
    """Return what a rank knows by itself, and each rank's message, by rank; one all-gather, two for many ranks.

    Args:
        world: who loads together.
        open_here: returns the checkpoint as this rank has opened it, or raises why it hasn't.
        request: what this rank asks for.

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

    # Two names for the phase, so that a mix of ranks that compare and ranks that don't is an error that says so.
    local, messages = share(
        world,
        "load: describe target" if request.describes else "load: ask",
        alone,
        message,
        steps=_ASK_STEPS,
        given=_alike_arguments(request) if world.size > 1 else None,
    )
    descriptions = complete(world, local.description, [description for _, description, _ in messages])
    messages = [(opening, each, place) for (opening, _, place), each in zip(messages, descriptions, strict=True)]
    # From rank 0 alone, so that all ranks load the same checkpoint even while a save replaces it.
    return replace(local, checkpoint=with_opening(local.checkpoint, messages[0][0], request.choices[2])), messages


def _alike_arguments(request: LoadRequest) -> dict[str, object]:
    """Return the arguments that have to be the same on all ranks, where they aren't the usual ones."""
    strict = getattr(request.strict, "value", request.strict)
    arguments = {} if strict == StrictHandling.ASSUME_OK_UNEXPECTED.value else {"strict": strict}
    arguments |= {"cast": request.cast} if request.cast else {}
    arguments |= {"plain": repr(request.plain)} if request.plain else {}
    return alike(request.options) | arguments | alike_choices(*request.choices[:2])


def matched_target(request: LoadRequest, rank: int, ranks: int) -> tuple[Target, KnownLayout | None]:
    """Return what a rank asks for, taken apart, and the layout that it was given, matched with that."""
    target, layout = take_apart(request.tree, donate=request.donate), request.layout
    return target, None if layout is None else known_layout("load", layout, target.tensors, rank, ranks)


def resolve(
    checkpoint: Checkpoint, sharded: Choice, strategies: Strategies | None, keys: Callable[[], tuple[Set[str], bool]]
) -> None:
    """Find out what the format's metadata doesn't say; collective, and only for formats that need it.

    Args:
        checkpoint: its fields are rank 0's; formats note what was found in what they know of it.
        sharded: the caller's choice for the shards.
        strategies: the dispatch table; None for the process's.
        keys: returns the keys of the tensors that this rank reads, and whether all that is stored is listed too.
    """
    world = checkpoint.world
    # By rank 0's fields alone, so that all ranks take the same way here.
    row = find_strategy(StrategyAction.RESOLVE, *sharded_backend(checkpoint.fields), strategies=strategies)
    if row is None:
        return

    def find_resolution() -> Resolution | None:
        resolution = None if callable(sharded) else row(checkpoint, *keys())
        return None if resolution is not None and resolution.copies is not None and world.size == 1 else resolution

    resolution, each = share(world, "load: needs resolving", find_resolution, lambda one: one is not None)
    ranks = [rank for rank, needs in enumerate(each) if needs]
    if not ranks:
        return

    def find() -> Any:
        return None if resolution is None else resolution.find(ranks.index(world.rank), len(ranks))

    results = gather(world, "load: resolve", find)

    def keep() -> None:
        if resolution is not None:
            resolution.keep([results[rank] for rank in ranks])

    # A phase of its own: what raises here does so before a given tensor is written, on all ranks.
    agree(world, "load: keep what was resolved", keep)


def with_metadata(request: LoadRequest, local: LocalLoad) -> LocalLoad:
    """Return what a rank knows once all know what takes more than a look at metadata; collective for such formats."""
    sharded, _, strategies = request.choices
    checkpoint = parse_together(local.checkpoint, sharded, strategies)
    resolve(checkpoint, sharded, strategies, partial(keys_to_resolve, local))
    return replace(local, checkpoint=checkpoint)


def keys_to_resolve(local: LocalLoad) -> tuple[Set[str], bool]:
    """Return the keys of the tensors that a rank asks for, and whether all that is stored is listed too."""
    # A mode that compares keys lists all that is stored.
    keys = local.target.plain_keys.union(shard.key for shard in local.target.tensors)
    return keys, local.mode is not StrictHandling.ASSUME_OK_UNEXPECTED


def compare_keys(world: World, request: LoadRequest, local: LocalLoad) -> tuple[set[str], set[str]]:
    """Return the missing and the unexpected keys, as far as a strict mode needs them; collective only if it does.

    Args:
        world: who loads together.
        request: what this rank asks for.
        local: what it knows by itself.
    """
    if local.mode is StrictHandling.ASSUME_OK_UNEXPECTED:
        return set(), set()
    checkpoint_keys = agree(world, "load: metadata", lambda: stored_keys(listing(local.checkpoint, request.choices)))
    own = local.target.keys_among(checkpoint_keys)
    everywhere = checkpoint_keys
    if local.mode in WITH_MISSING:
        # Only what no known layout covers travels: every rank has the keys of that already.
        known_keys = set(() if local.layout is None else local.layout.columns.keys)
        everywhere = known_keys.union(*gather(world, "load: keys", lambda: own - known_keys))
    return mismatched_keys(local.mode, own, checkpoint_keys, everywhere)


_NO_FIT: Final[tuple[Kinds, ObjectsFit]] = ({}, ObjectsFit())


def check_ranks(
    request: LoadRequest, local: LocalLoad, messages: Sequence[Message], missing: set[str], unexpected: set[str]
) -> CheckedLoad:
    """Return `check`, once all ranks' loads are known to succeed; one all-gather."""

    def fits() -> CheckedLoad:
        with unless_replaced(local.checkpoint):
            return check(request, local, messages, missing, unexpected)

    world = local.checkpoint.world
    load, each = share(world, "load: check", fits, lambda one: one.omissions.shared, steps=CHECK_STEPS)
    omissions = load.omissions
    unfilled, kept, bits = map(chain.from_iterable, zip(*each, strict=True))
    unasked_paths = omissions.unasked_paths([*bits])
    if world.rank == 0:
        log_of_ranks(local.mode, unfilled, kept, unasked_paths)
    refuse_omissions(local.mode, RANK_VALUES, unasked_paths)  # by every rank: all know the same
    return replace(load, omissions=replace(omissions, left_out=(*omissions.left_out, *unasked_paths)))


def check(
    request: LoadRequest, local: LocalLoad, messages: Sequence[Message], missing: set[str], unexpected: set[str]
) -> CheckedLoad:
    """Return all that reading takes, once it is known that the load can succeed; its steps are `CHECK_STEPS`.

    Args:
        request: what this rank asks for.
        local: what it knows by itself.
        messages: each rank's, by rank.
        missing: keys that no rank asks for, as far as the strict mode needs them.
        unexpected: keys that this rank asks for and that aren't stored, likewise.

    Raises:
        KeyMismatch, TreeError, UnsupportedValue, ShapeError, IntegrityError, UnsafeFile: as `load`.
    """
    checkpoint, (sharded, _, strategies) = fetch_checked(local.checkpoint, "index", "common"), request.choices
    descriptions = [description for _, description, _ in messages if description is not None]
    columns: ShardColumns | None = None
    if descriptions:
        # As for a save: a rank that forgot a tensor or an object should learn of it before it goes on without.
        with step("load: check integrity"):
            columns = check_together("load", descriptions, local.layout, tiling=request.validate)
    common_of = cache(partial(stored_common, checkpoint, request.choices))

    fit = partial(
        check_target,
        checkpoint,
        choice=sharded,
        strategies=strategies,
        cast=request.cast,
        plain=request.plain,
        rules=request.options.object_rules,
        left_out=unexpected,
        common_of=common_of,
    )
    metadata = partial(listing_if_any, checkpoint, request.choices)
    keys = Keys(
        local.mode,
        missing,
        unexpected,
        lambda: stored_keys(metadata()),
        lambda names: stored_kinds(metadata(), sorted(names)),
        unions_of(checkpoint.fields),
        lambda: untaken_of(metadata()),
    )
    if local.mode in LOGGING:
        with step("load: strict"):
            log_keys(missing, unexpected_keys(keys, local.target, common_of))
    target, fits, common, omissions = check_rank(step, request.tree, local.target, keys, fit, common_of, _NO_FIT)
    if local.mode in LOGGING:
        log_omissions(STORED_VALUES, omissions.left_out)
    with step("load: choose to exchange"):
        saved_bytes = None if callable(sharded) or columns is None else partial(bytes_wanted_twice, [columns])
        exchange = exchange_choice(request.options.exchange, [place for _, _, place in messages], saved_bytes)
    checkpoint = replace(checkpoint, fetched={})  # which are read by now
    reading = Reading(checkpoint, sharded, strategies, request.donate, exchange, *fits, local.layout, local.device)
    with step("load: make memory"):
        return CheckedLoad(target, common, reading, destination_of(reading, target.leaves), omissions)


def listing(checkpoint: Checkpoint, choices: Choices) -> Metadata:
    """Return the tensors and objects that a checkpoint holds.

    Raises:
        StrategyError: the format doesn't list what it holds.
    """
    sharded, common, strategies = choices
    # A caller's function loads shards and can't list them: the format's own row does.
    pair = (None if callable(sharded) else sharded, None if callable(common) else common)
    return sharded_metadata(checkpoint, *pair, strategies)


def listing_if_any(checkpoint: Checkpoint, choices: Choices) -> Metadata:
    """Return `listing`; nothing where the format doesn't list what it holds."""
    try:
        return listing(checkpoint, choices)
    except StrategyError:
        return {}


def stored_common(checkpoint: Checkpoint, choices: Choices, types: tuple[type, ...]) -> Any:
    """Return the stored common tree, with instances of the target's own namedtuple classes where they fit."""
    _, common, strategies = choices
    # The caller's types come last, so that they win over the target's of the same name.
    options = replace(checkpoint.options, types=(*types, *named_types(checkpoint.options.types).values()))
    try:
        return load_common(replace(checkpoint, options=options), common, strategies)
    except UnsupportedValue:
        # A class whose fields have changed since the save: its instances come back as plain records, as without a
        # target.
        return load_common(checkpoint, common, strategies)
    except UnsafeFile as error:
        error.add_note("The tensors can be read without that: see load_plain_tensors and open_checkpoint.")
        raise
