"""What ranks settle before a load reads anything: what each asks for, and that it fits together and what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from ...codec import named_types
from ...errors import UnsafeFile, UnsupportedValue
from ...layouts import ShardColumns
from ...objects import ObjectRule
from ...strategies import Checkpoint, Strategies
from ...world import World, agree, gather, share, step
from .._consistency import Description, KnownLayout, check_together, describe, known_layout
from .._dispatch import Choice
from .._open import OPEN_STEPS, Fields, Metadata, load_common, sharded_metadata, stored_keys
from ._checks import CommonOf, Keys, Kinds, ObjectsFit, check_rank, check_target, named_unexpected
from ._read import ROOM_STEPS, Exchange, Reading, Room, make_room
from ._strict import (
    StrictHandling,
    log_keys,
    log_left_out,
    logs_keys,
    looks_beforehand,
    mismatched_keys,
    needs_all_ranks,
    parse_strict,
)
from ._targets import Target, take_apart, usable_device

T = TypeVar("T")

Choices = tuple[Choice, Choice, Strategies | None]
"""What the caller named as strategies for the shards and the common state, and the dispatch table."""

_ASKED_STEPS = (*OPEN_STEPS, "load: options", "load: prepare")
_CHECK_STEPS = (
    "load: check integrity",
    "load: strict",
    "load: leave out",
    "load: check the target",
    "load: common state",
    *ROOM_STEPS,
)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a caller of `load` asks for; the attributes are its arguments."""

    tree: Any
    layout: ShardColumns | None
    strict: str | StrictHandling
    validate: bool
    cast: bool
    object_rules: Mapping[str, ObjectRule] | None
    donate: bool
    exchange: Exchange
    device: str | torch.device | None

    @property
    def describes(self) -> bool:
        """Whether ranks tell each other what they ask for."""
        return self.validate or self.layout is not None


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """What a load knows before it reads.

    Attributes:
        target: taken apart, without what isn't stored.
        common: the stored common tree.
        reading: how the target is read.
        room: memory for it.
        mode: what is done about keys that don't match.
        missing: keys that are stored, and that no rank asks for, as far as the mode wants to know.
        unexpected: keys that this rank asks for, and that aren't stored, likewise.
        left_out: paths of the stored plain values that can't be returned, since containers around them lack shards.
    """

    target: Target
    common: Any
    reading: Reading
    room: Room
    mode: StrictHandling
    missing: set[str]
    unexpected: set[str]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """What a rank tells the others: what it asks for, where ranks compare that; rank 0, what metadata.json says."""

    fields: Fields
    description: Description | None


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What a rank finds and asks for, before it hears of the others."""

    checkpoint: Checkpoint
    mode: StrictHandling
    device: torch.device
    target: Target
    known: KnownLayout | None
    told: _Told


def settle(world: World, look: Callable[[], Checkpoint], wanted: Wanted, choices: Choices) -> Settled:
    """Return all that a load can know before it reads, once it is known that it can; collective.

    Args:
        world: who loads together.
        look: returns the checkpoint as this rank knows it alone.
        wanted: what this rank asks for.
        choices: the caller's strategies.

    Raises:
        KeyMismatch, TreeError, UnsupportedValue, ShapeError, IntegrityError, UnsafeFile, RemoteError: as `load`.
    """
    alone = partial(_asked, look, wanted, world)
    tell = attrgetter("told")
    # By another name, so that ranks which compare and ranks which don't are told so.
    if wanted.describes:
        asked, told = share(world, "load: describe target", alone, tell, steps=_ASKED_STEPS)
    else:
        asked, told = share(world, "load: ask", alone, tell, steps=_ASKED_STEPS)
    checkpoint = replace(asked.checkpoint, fields=told[0].fields)
    missing, unexpected = _compare_keys(world, checkpoint, asked, choices)
    descriptions = [each.description for each in told if each.description is not None]
    check = partial(_settled, checkpoint, wanted, choices, asked, descriptions, missing, unexpected)
    return agree(world, "load: check", check, steps=_CHECK_STEPS)


def _asked(look: Callable[[], Checkpoint], wanted: Wanted, world: World) -> _Asked:
    checkpoint = look()
    mode, device = step("load: options", lambda: (parse_strict(wanted.strict), usable_device(wanted.device)))
    target, known = step("load: prepare", partial(prepared, wanted, world.rank, world.size))
    description = describe(target.tensors, target.objects, world.rank, known=known) if wanted.describes else None
    return _Asked(checkpoint, mode, device, target, known, _Told(checkpoint.fields, description))


def prepared(wanted: Wanted, rank: int, ranks: int) -> tuple[Target, KnownLayout | None]:
    """Return what a rank asks for, taken apart, and the layout that it was given, matched with that."""
    target = take_apart(wanted.tree)
    return target, known_layout("load", wanted.layout, target.tensors, rank, ranks)


def _settled(
    checkpoint: Checkpoint,
    wanted: Wanted,
    choices: Choices,
    asked: _Asked,
    descriptions: Sequence[Description],
    missing: set[str],
    unexpected: set[str],
) -> Settled:
    if descriptions:
        check = partial(check_together, "load", descriptions, asked.known, tiling=wanted.validate)
        step("load: check integrity", check)
    sharded, _, strategies = choices
    common_of = cache(partial(stored_common, checkpoint, choices))
    fit = partial(_fit, checkpoint, wanted, choices, unexpected, common_of)
    keys = Keys(asked.mode, missing, unexpected, lambda: stored_keys(listing(checkpoint, choices)))
    if logs_keys(asked.mode):
        step("load: strict", lambda: log_keys(missing, named_unexpected(keys, asked.target, common_of)))
    unused: tuple[Kinds, ObjectsFit] = ({}, ObjectsFit())
    target, fitted, common, lost = check_rank(_or_raise, wanted.tree, asked.target, keys, fit, common_of, unused)
    if logs_keys(asked.mode):
        log_left_out(lost)
    how = (wanted.donate, wanted.exchange, *fitted, asked.known, asked.device)
    reading = Reading(checkpoint, sharded, strategies, *how)
    room = make_room(reading, target.leaves)
    return Settled(target, common, reading, room, asked.mode, missing, unexpected, lost)


def _fit(
    checkpoint: Checkpoint,
    wanted: Wanted,
    choices: Choices,
    unexpected: set[str],
    common_of: CommonOf,
    target: Target,
) -> tuple[Kinds, ObjectsFit]:
    sharded, _, strategies = choices
    rules = wanted.object_rules
    fitting = partial(check_target, checkpoint, target, sharded, strategies, cast=wanted.cast, rules=rules)
    return fitting(left_out=unexpected, common_of=common_of)


def _or_raise(check: Callable[[], T], otherwise: T) -> T:
    return check()


def _compare_keys(
    world: World,
    checkpoint: Checkpoint,
    asked: _Asked,
    choices: Choices,
) -> tuple[set[str], set[str]]:
    """Return the missing and unexpected keys that a strict mode wants to know."""
    if not looks_beforehand(asked.mode):
        return set(), set()
    own = asked.target.keys
    stored = agree(world, "load: metadata", lambda: stored_keys(listing(checkpoint, choices)))
    everywhere = stored
    if needs_all_ranks(asked.mode):
        known = set(() if asked.known is None else asked.known.columns.keys)
        everywhere = known.union(*gather(world, "load: keys", lambda: own - known))
    return mismatched_keys(asked.mode, own, stored, everywhere)


def listing(checkpoint: Checkpoint, choices: Choices) -> Metadata:
    """Return the tensors and objects that a checkpoint holds: a function that loads shards isn't one that lists them.

    Raises:
        StrategyError: the format doesn't tell what it holds.
    """
    sharded, common, strategies = choices
    pair = (None if callable(sharded) else sharded, None if callable(common) else common)
    return sharded_metadata(checkpoint, *pair, strategies)


def stored_common(checkpoint: Checkpoint, choices: Choices, types: tuple[type, ...]) -> Any:
    """Return the stored common tree, with instances of the target's own namedtuple classes where they fit."""
    _, common, strategies = choices
    # The caller's types come last, where they count.
    options = replace(checkpoint.options, types=(*types, *named_types(checkpoint.options.types).values()))
    try:
        return load_common(replace(checkpoint, options=options), common, strategies)
    except UnsupportedValue:
        # A class that is no more what was stored: its records stay records, as they do without a target.
        return load_common(checkpoint, common, strategies)
    except UnsafeFile as error:
        error.add_note("The tensors can be read without that: see load_plain_tensors and open_checkpoint.")
        raise
