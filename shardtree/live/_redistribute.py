"""redistribute: a sharded tree gets into another layout, or to other ranks, straight from memory to memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..errors import MetadataError
from ..geometry import integer, refuse
from ..mapping import ShardedObject
from ..plans import ReshardPlan, Schedule, relayed
from ..world import agree, current_world, gather
from ._describe import Options, agreed_plan, describe
from ._ends import DOING, Ends, check_joins, finished, take_ends
from ._exchange import Exchange
from ._memory import Empty, make_buffers, target_memories
from ._move import Route, move
from ._rows import own_rows
from ._states import Rules, resharded_objects, shared_common

BYTES_IN_FLIGHT = 32 * 1024 * 1024
"""What a rank sends and gets in one step, unless said otherwise; over gloo, larger buffers were slower."""


def redistribute(
    tree: Any,
    target: Any,
    *,
    plan: ReshardPlan | None = None,
    relay: bool = False,
    cast: bool = False,
    world: Any = None,
    max_bytes_in_flight: int = BYTES_IN_FLIGHT,
    donate: bool = False,
    rules: Rules = None,
    exchange: Exchange | None = None,
    device: torch.device | str = "cpu",
    empty: Empty = torch.empty,
) -> Any:
    """Return the target with the tensors of all ranks' trees in its own layout; every rank of the world calls it.

    The world holds those that give and those that take; they may be the same ranks, others, or partly so. Each element
    of a target comes from one rank that holds it, in steps, through buffers of bounded size; sources aren't copied.
    All that can fail before the first byte moves fails on every rank.

    Args:
        tree: what this rank gives; None, or an empty tree, if it only takes. It isn't changed.
        target: what this rank wants, as for `load`; None if it only gives.
        plan: of all ranks' layouts, which then aren't exchanged, only compared by a hash. Its ranks are the world's.
        relay: whether ranks that want the same elements get them once and pass them on among themselves: for trainers
            that feed several engines, whose links are the narrow ones.
        cast: whether tensors get the targets' dtypes, as `load` converts them: before they are sent, straight into the
            buffers. A plan says that itself.
        world: the ranks that take part; torch.distributed's default group, or else this process alone.
        max_bytes_in_flight: what a rank sends and gets in one step; the memory that its buffers take.
        donate: whether the target's tensors are given away: they are filled where they are, on any device, and
            returned. If it fails, their content is lost.
        rules: what becomes of sharded objects whose global shape changes, by key pattern.
        exchange: moves the buffers, in place of the world.
        device: where the buffers for it are. The world's own have to be in the CPU's memory.
        empty: makes new tensors and the buffers, called as ``empty(shape, dtype=..., device=...)``: pinned memory, say.

    Returns:
        The sources' common state joined by the target, whose shards and objects have their data and whose factories
        have merged theirs, on the devices of the target's tensors; it can be saved or redistributed again. None where
        the target is.

    Raises:
        IntegrityError: a target asks for elements that no source has, sources differ about their common state, or a
            rank's tree isn't what the plan says.
        WorldError: ranks were given other plans or options, or a peer is silent.
        ShapeError: a tensor isn't its shard's any more, donated tensors share memory, or a dtype differs that isn't or
            can't be cast.
        CheckpointingException: a source shard has no data, or there is no memory.
        TreeError: a target doesn't fit the common state.
        RemoteError: on every rank where one of several failed; also of the class above that the failures share.

    Examples:
        >>> import shardtree as st
        >>> whole = torch.arange(8).view(4, 2)
        >>> def rows_to_columns(world):
        ...     mine = whole.chunk(2)[world.rank]
        ...     rows = st.ShardedTensor.from_rank_offsets("w", mine, (0, world.rank, 2))
        ...     column = st.ShardedTensor.from_rank_offsets("w", torch.empty(4, 1).long(), (1, world.rank, 2))
        ...     return redistribute({"w": rows, "step": 3}, {"w": column}, world=world)
        >>> left, right = st.simulate(2, rows_to_columns)
        >>> right["w"].data.tolist(), right["step"]
        ([[1], [3], [5], [7]], 3)
    """
    ranks = current_world(world)
    prepare = partial(_prepared, tree, target, plan, max_bytes_in_flight, relay=relay, cast=cast)
    ends, options, own = agree(ranks, "redistribute: prepare", prepare)
    said = gather(ranks, "redistribute: describe", partial(describe, ends, own, options, ranks.rank))
    full, schedule = agree(ranks, "redistribute: plan", partial(agreed_plan, said, own))
    common = shared_common(ranks, said, ends.given.common)
    objects = resharded_objects(ranks, said, ends, rules)
    lay = partial(_laid, ends, common, full, schedule, ranks.rank, donate=donate, device=device, empty=empty)
    route, filled = agree(ranks, "redistribute: make memory", lay)
    failure = move(route, ranks.exchange if exchange is None else exchange)
    return agree(ranks, "redistribute: join", partial(_joined, failure, ends, common, filled, objects))


def _prepared(
    tree: Any, target: Any, plan: Any, max_bytes_in_flight: Any, *, relay: bool, cast: bool
) -> tuple[Ends, Options, ReshardPlan | None]:
    most = integer(DOING, "max_bytes_in_flight", max_bytes_in_flight)
    if plan is not None and not isinstance(plan, ReshardPlan):
        fix = "Pass what plan_reshard gives."
        refuse(DOING, "plan", type(plan).__name__, "a ReshardPlan", fix, error=MetadataError)
    own = relayed(plan) if relay and plan is not None else plan
    return take_ends(tree, target), Options(most, relay, cast), own


def _laid(
    ends: Ends,
    common: Any,
    plan: ReshardPlan,
    schedule: Schedule,
    rank: int,
    *,
    donate: bool,
    device: torch.device | str,
    empty: Empty,
) -> tuple[Route, list[torch.Tensor]]:
    """Return what this rank needs to take part, and the tensors that will be filled, in the order of its shards."""
    check_joins(ends, common)
    given = own_rows("source", plan.source, ends.given.tensors, rank)
    wanted = own_rows("target", plan.target, ends.tensors, rank)
    filled = target_memories(ends.tensors, ends.given.tensors, donate=donate, empty=empty)
    sources = {row: shard.data for row, shard in zip(given, ends.given.tensors, strict=True)}
    targets = dict(zip(wanted, filled, strict=True))
    return Route(plan, schedule, rank, sources, targets, make_buffers(schedule, rank, device, empty)), filled


def _joined(
    failure: Exception | None, ends: Ends, common: Any, filled: Sequence[torch.Tensor], objects: Sequence[ShardedObject]
) -> Any:
    if failure is not None:
        raise failure
    return finished(ends, common, filled, objects)
