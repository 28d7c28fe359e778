"""Step 4 of a load: all checks before a tensor is read. `explain` calls the same functions, and records errors."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...table import fetch_checked, unless_replaced
from ...world import share, step
from .._consistency import check_together
from ._ask import LoadRequest, LocalLoad, Message
from ._choice import bytes_wanted_twice, exchange_choice
from ._fit import fit_target, unexpected_keys
from ._omissions import (
    RANK_VALUES,
    STORED_VALUES,
    Omissions,
    join_common,
    leave_out,
    log_of_ranks,
    log_omissions,
    refuse_omissions,
)
from ._plain import asking_whole
from ._read import Destination, Reading, destination_of
from ._stored import Stored
from ._strict import LOGGING, settle_keys
from ._targets import Target

_STEPS = (
    "load: check integrity",
    "load: strict",
    "load: leave out",
    "load: check the target",
    "load: common state",
    "load: choose to exchange",
    "load: make memory",
)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedLoad:
    """A load that has passed all checks, with everything that reading needs.

    Attributes:
        target: The target, split into leaves, without values that aren't stored.
        common: The part of the stored common tree that this rank loads.
        reading: The parameters of the read.
        destination: The memory to fill.
        omissions: Stored values that aren't returned, and values of the target that aren't filled.
    """

    target: Target
    common: Any
    reading: Reading
    destination: Destination
    omissions: Omissions


def check_ranks(
    request: LoadRequest, local: LocalLoad, messages: Sequence[Message], missing: Set[str], unexpected: set[str]
) -> CheckedLoad:
    """Run `check` on every rank, and return this rank's result once all have succeeded; one all-gather.

    The arguments are those of `check`.
    """

    def fits() -> CheckedLoad:
        with unless_replaced(local.checkpoint):
            return check(request, local, messages, missing, unexpected)

    world = local.checkpoint.world
    load, omissions_of_ranks = share(world, "load: check", fits, lambda load: load.omissions.shared, steps=_STEPS)
    omissions = load.omissions
    unfilled, kept, bits = map(chain.from_iterable, zip(*omissions_of_ranks, strict=True))
    unasked_paths = omissions.unasked_paths([*bits])
    if world.rank == 0:
        log_of_ranks(local.mode, unfilled, kept, unasked_paths)
    refuse_omissions(local.mode, RANK_VALUES, unasked_paths)  # raises on every rank alike
    return replace(load, omissions=replace(omissions, left_out=(*omissions.left_out, *unasked_paths)))


def check(
    request: LoadRequest, local: LocalLoad, messages: Sequence[Message], missing: Set[str], unexpected: set[str]
) -> CheckedLoad:
    """Check a rank's load, and return it with everything that reading needs; not collective.

    Args:
        request: The caller's request.
        local: The rank's prepared load.
        messages: The messages of all ranks, by rank.
        missing: Stored keys that no rank requests (a term of Megatron-Core); empty if the strict mode doesn't use them.
        unexpected: Keys that this rank requests and that aren't stored; empty if the strict mode doesn't use them.

    Raises:
        KeyMismatch, TreeError, UnsupportedValue, ShapeError, IntegrityError, UnsafeFile: as `load`.
    """
    mode, (sharded, _, strategies) = local.mode, request.choices
    stored = Stored(fetch_checked(local.checkpoint, "index", "common"), request.choices)
    with step("load: check integrity"):
        # This is the same check as in a save: a rank should learn at once that its target lacks a tensor or object.
        descriptions = [description for _, description, _ in messages if description is not None]
        columns = check_together("load", descriptions, local.layout, tiling=request.validate) if descriptions else None
    # Keys come first, since the other checks are about the target without unexpected keys. A mode that raises does so
    # in this phase, on every rank: Megatron-Core raises on one rank, and the others wait in the next collective.
    with step("load: strict"):
        settle_keys(mode, missing, unexpected_keys(stored, local.target, unexpected))
    with step("load: leave out"):
        target = leave_out(local.target, request.tree, unexpected, mode)
    with step("load: check the target"):
        if target.plain:
            target = asking_whole(target, stored.kinds(target.plain_keys))
        kinds, objects = fit_target(stored, target, request, unexpected)
    with step("load: common state"):
        common, omissions = join_common(stored, local.target, target, mode)
    if mode in LOGGING:
        log_omissions(STORED_VALUES, omissions.left_out)
    with step("load: choose to exchange"):
        is_known = len(messages) > 1 and not callable(sharded)
        saved_bytes = None if columns is None or not is_known else bytes_wanted_twice([columns])
        exchange = exchange_choice(request.options.exchange, [place for _, _, place in messages], saved_bytes)
    reading = Reading(
        replace(stored.checkpoint, fetched={}),  # the fetched files are parsed by now
        sharded,
        strategies,
        request.donate,
        exchange,
        kinds,
        objects,
        local.layout,
        local.device,
    )
    with step("load: make memory"):
        return CheckedLoad(target, common, reading, destination_of(reading, target.leaves), omissions)
