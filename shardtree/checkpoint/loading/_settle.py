"""What ranks settle before a load reads anything: what each asks for, and that it fits together and what is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from ...codec import named_types
from ...errors import UnsafeFile, UnsupportedValue, render_path
from ...layouts import ObjectRule, ShardColumns
from ...mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ...strategies import Checkpoint, Strategies
from ...trees import HOLE, join, left_out, told_of_depth
from ...world import World, agree, gather, share, step
from .._consistency import Description, check_together, describe
from .._dispatch import Choice
from .._known_layout import KnownLayout, known_layout
from .._open import Fields, load_common, sharded_metadata, stored_keys
from .._open_together import OPEN_STEPS
from ._exchange import Exchange
from ._fit import check_target
from ._read import ROOM_STEPS, Reading, Room, make_room
from ._strict import StrictHandling, looks_beforehand, needs_all_ranks, parse_strict, report_keys, report_left_out
from ._taken_apart import Target, is_sharded, take_apart, without_unexpected

Choices = tuple[Choice, Choice, Strategies | None]
"""What the caller named as strategies for the shards and the common state, and the dispatch table."""

_ASKED_STEPS = (*OPEN_STEPS, "load: options", "load: prepare")
_CHECK_STEPS = (
    "load: check integrity",
    "load: strict",
    "load: leave out",
    "load: check the target",
    "load: common state",
    "load: join",
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
    mode = step("load: options", partial(parse_strict, wanted.strict))
    target, known = step("load: prepare", partial(_prepared, wanted, world))
    description = describe(target.tensors, target.objects, world.rank, known=known) if wanted.describes else None
    return _Asked(checkpoint, mode, target, known, _Told(checkpoint.fields, description))


def _prepared(wanted: Wanted, world: World) -> tuple[Target, KnownLayout | None]:
    target = take_apart(wanted.tree)
    return target, known_layout("load", wanted.layout, target.tensors, world.rank, world.size)


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
    step("load: strict", partial(report_keys, asked.mode, missing, unexpected))
    target = step("load: leave out", partial(without_unexpected, asked.target, wanted.tree, unexpected))
    sharded, _, strategies = choices
    fitting = partial(check_target, checkpoint, target, sharded, strategies, cast=wanted.cast)
    kinds, objects = step("load: check the target", partial(fitting, rules=wanted.object_rules, left_out=unexpected))
    reading = Reading(checkpoint, sharded, strategies, wanted.donate, wanted.exchange, kinds, objects, asked.known)
    common = step("load: common state", partial(_stored_common, checkpoint, target.types, choices))
    lost = step("load: join", partial(check_join, common, target, asked.mode))
    room = make_room(reading, target.leaves)
    return Settled(target, common, reading, room, asked.mode, missing, unexpected, lost)


def _compare_keys(
    world: World,
    checkpoint: Checkpoint,
    asked: _Asked,
    choices: Choices,
) -> tuple[set[str], set[str]]:
    """Return the missing and unexpected keys that a strict mode wants to know."""
    if not looks_beforehand(asked.mode):
        return set(), set()
    own = {leaf.key for leaf in asked.target.leaves if is_sharded(leaf)}
    sharded, common, strategies = choices
    # A function that loads shards isn't one that lists them.
    pairs = (None if callable(sharded) else sharded, None if callable(common) else common, strategies)
    stored = agree(world, "load: metadata", lambda: stored_keys(sharded_metadata(checkpoint, *pairs)))
    everywhere = stored
    if needs_all_ranks(asked.mode):
        known = set(() if asked.known is None else asked.known.columns.keys)
        everywhere = known.union(*gather(world, "load: keys", lambda: own - known))
    return stored - everywhere, own - stored


def check_join(common: Any, target: Target, mode: StrictHandling) -> tuple[str, ...]:
    """Return the paths of what the join with the common state will leave out: known before a tensor is read.

    Raises:
        TreeError: the target doesn't fit the common state.
        KeyMismatch: something is left out, and the strict mode is to raise for all that isn't loaded.
    """
    filled = (ShardedTensor, ShardedObject, LocalNonpersistentObject)
    found = joined(common, target, [leaf if isinstance(leaf, filled) else HOLE for leaf in target.leaves])
    paths = tuple(map(render_path, left_out(common, found)))
    report_left_out(mode, paths)
    return paths


def _stored_common(checkpoint: Checkpoint, types: tuple[type, ...], choices: Choices) -> Any:
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


def joined(common: Any, target: Target, loaded: Sequence[Any]) -> Any:
    """Return the stored common tree joined by what was loaded for each leaf of a target.

    Raises:
        TreeError: they don't fit.
    """
    tree = target.rebuild(loaded)
    with told_of_depth("load"):
        return join(common, tree)
