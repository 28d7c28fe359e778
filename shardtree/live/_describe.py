"""What the ranks of a redistribution tell each other before a byte moves, and the plan that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codec import encode_tree
from ..errors import WorldError, error_text
from ..layouts import ShardColumns, join_columns, shard_columns
from ..plans import ReshardPlan, Schedule, plan_reshard, relayed
from ..trees import HOLE, comparable
from ._digest import value_digest
from ._ends import Ends


@dataclass(frozen=True, slots=True)
class Options:
    """What has to be the same on every rank.

    Attributes:
        max_bytes_in_flight: what a rank sends and gets in one step.
        relay: whether ranks that want the same pass it on.
        cast: whether tensors get the targets' dtypes.
    """

    max_bytes_in_flight: int
    relay: bool
    cast: bool


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """What one rank tells the others.

    Attributes:
        options: its own.
        plan: the hash of the plan that it was given; None without one.
        source: the shards that it gives; None where a plan says so.
        target: the shards that it wants, likewise.
        common: the hash of its common state; None from a rank that gives nothing.
        wants_objects: whether its target has sharded objects.
    """

    options: Options
    plan: str | None
    source: ShardColumns | None
    target: ShardColumns | None
    common: str | None
    wants_objects: bool


def describe(ends: Ends, plan: ReshardPlan | None, options: Options, rank: int) -> Description:
    """Return what a rank tells the others: of constant size where it has a plan."""
    given, wanted = ends.given.tensors, () if ends.wanted is None else ends.wanted.tensors
    return Description(
        options,
        None if plan is None else value_digest(plan),
        shard_columns(given, rank) if plan is None else None,
        shard_columns(wanted, rank) if plan is None else None,
        None if ends.given.common is HOLE else _common_digest(ends.given.common),
        bool(ends.objects),
    )


def _common_digest(common: Any) -> str:
    return value_digest(encode_tree(comparable(common), allow_pickle=True))


def agreed_plan(said: Sequence[Description], plan: ReshardPlan | None) -> tuple[ReshardPlan, Schedule]:
    """Return the plan of all ranks and its schedule, once they were asked for the same.

    Args:
        said: every rank's description, by rank.
        plan: this rank's own, if it was given one.

    Raises:
        WorldError: the ranks have other options or other plans, or a plan is for ranks that there aren't.
        CheckpointingException: there is no plan between these layouts.
    """
    _check_alike("options", [str(each.options) for each in said])
    _check_alike("plans", ["none given" if each.plan is None else f"hash {each.plan}" for each in said])
    options = said[0].options
    if plan is None:
        sources = [each.source for each in said if each.source is not None]
        targets = [each.target for each in said if each.target is not None]
        plan = plan_reshard(join_columns(sources), join_columns(targets), cast=options.cast)
        plan = relayed(plan) if options.relay else plan
    _check_ranks(plan.ranks, len(said))
    return plan, plan.schedule(max_bytes_in_flight=options.max_bytes_in_flight)


def _check_ranks(ranks: Sequence[int], size: int) -> None:
    strangers = [f"rank {rank}" for rank in ranks if rank >= size]
    if strangers:
        what = f"redistribute: the plan has ranks that the world, of {size}, hasn't"
        fix = "Number the plan's ranks as in the world, and let all of them call this."
        raise WorldError(error_text(what, offenders=strangers, fix=fix))


def _check_alike(what: str, texts: Sequence[str]) -> None:
    if len(set(texts)) > 1:
        told = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
        fix = "Make the same call on every rank, with plans of the same layouts."
        raise WorldError(error_text(f"redistribute: the ranks have other {what}", offenders=told, fix=fix))
