"""The moving itself: step after step, each rank packs, exchanges and unpacks, and nobody has to be asked in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..plans import ReshardPlan, Schedule
from ._ends import DOING
from ._exchange import Exchange
from ._memory import Buffers
from ._pack import copy_doubled, copy_own, incoming_bytes, outgoing_bytes, pack_into, unpack


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """All that one rank needs to take its part.

    Attributes:
        plan: of all ranks.
        schedule: of that plan.
        rank: which one.
        sources: the data of the rank's shards by their row in `plan.source`.
        targets: the data of its target shards by their row in `plan.target`, to be filled.
        buffers: room for one step.
    """

    plan: ReshardPlan
    schedule: Schedule
    rank: int
    sources: Mapping[int, torch.Tensor]
    targets: Mapping[int, torch.Tensor]
    buffers: Buffers


def move(route: Route, exchange: Exchange) -> Exception | None:
    """Fill a rank's target shards; every rank calls it at the same time.

    A rank on which something fails goes on to exchange what it has, so that no other waits for it.

    Returns:
        What failed first on this rank, apart from the exchange itself.

    Raises:
        Exception: what the exchange raises, with the step as a note.
    """
    failure = _tried(None, copy_own, route.plan, route.rank, route.sources, route.targets)
    for step in range(route.schedule.steps):
        place = (route.plan, route.schedule, step, route.rank)
        outgoing, incoming = route.buffers.cut(outgoing_bytes(*place), incoming_bytes(*place))
        failure = _tried(failure, pack_into, *place, route.sources, route.targets, outgoing)
        try:
            exchange(outgoing, incoming)
        except Exception as error:
            error.add_note(f"{DOING}: in the exchange of step {step + 1} of {route.schedule.steps}")
            raise
        failure = _tried(failure, unpack, *place, route.targets, incoming)
    return _tried(failure, copy_doubled, route.plan, route.rank, route.targets)


def _tried(failure: Exception | None, do: Callable[..., None], *arguments: Any) -> Exception | None:
    """Do something, unless something failed before; return what failed first."""
    if failure is None:
        try:
            do(*arguments)
        except Exception as error:
            return error
    return failure
