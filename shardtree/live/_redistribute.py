"""redistribute: a sharded tree moved into another layout, or to other ranks, from memory to memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core import limits
from ..core.ambient import shielded
from ..core.geometry import Column, integer, refuse, widen
from ..core.layouts import ShardColumns, shard_columns
from ..core.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from ..core.trees import (
    Transform,
    checked_patterns,
    flatten_with_paths,
    is_plain_tensor,
    leaves_with_paths,
    target_through,
    with_data,
)
from ..errors import IntegrityError, MetadataError, TreePath, error_text
from ..shell.world import agree, current_world, gather, share
from ._describe import Options, Rules, agreed_device, agreed_plan, describe, resharded_objects, shared_common
from ._memory import (
    DOING,
    Empty,
    Ends,
    check_joins,
    device_of_tensors,
    donated_once,
    joined_target,
    make_buffers,
    take_ends,
    target_memories,
)
from ._move import Route, Transport, move
from ._proof import HashingTransport, hash_for, join_with_proof
from .resharding import ReshardPlan, Schedule, with_relays

# A rank's rows in a plan, matched by the shards' positions in their tensors.


def own_rows(side: str, columns: ShardColumns, shards: Sequence[ShardedTensor], rank: int) -> list[int]:
    """Return the row of each of a rank's shards in a plan's table of all ranks' shards.

    Args:
        side: "source" or "target", for error messages.
        columns: Table of all ranks' shards.
        shards: The rank's shards, in any order.
        rank: Number of the rank.

    Raises:
        IntegrityError: The table has other shards for the rank.

    Examples:
        >>> import torch, shardtree as st
        >>> shards = [ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, part, 2)) for part in range(2)]
        >>> own_rows("source", st.layouts.shard_columns(shards[::-1], 3), shards, 3)
        [1, 0]
    """
    rows = np.flatnonzero(columns.rank == rank)
    held_columns = shard_columns(shards, rank)
    number = {key: position for position, key in enumerate(columns.keys)}
    kinds = dict(zip(columns.keys, columns.kinds, strict=True))
    unlike = [
        f"{key!r}: the tree has {kind}, the plan {kinds.get(key, 'none')}"
        for key, kind in zip(held_columns.keys, held_columns.kinds, strict=True)
        if kinds.get(key) != kind
    ]
    if unlike:
        _refuse(side, rank, unlike)
    axes = max(columns.offset.shape[1], held_columns.offset.shape[1])
    mine = _places(
        held_columns, np.array([number[key] for key in held_columns.keys], dtype=np.int64)[held_columns.key], axes
    )
    plan_places = _places(columns, columns.key, axes)[rows]
    # Both sides are sorted by position, so that leaves may have any order and several shards at one position match.
    order, plan_order = _order(mine), _order(plan_places)
    if not np.array_equal(mine[order], plan_places[plan_order]):
        _refuse(side, rank, _differences(columns.keys, mine, plan_places, axes))
    own_row = np.empty(len(mine), dtype=np.int64)
    own_row[order] = rows[plan_order]
    return list(map(int, own_row))


def _places(columns: ShardColumns, key: Column, axes: int) -> Column:
    """Return a row of numbers for each shard: key, offset, shape, flat start, flat stop, int64 (shards, 2 * axes + 3).

    Args:
        columns: Table of the shards.
        key: Number of each shard's key, int64 (shards,).
        axes: Number of axes; shorter offsets and shapes are padded on the left with 0 and 1.
    """
    offset, shape = widen(columns.offset, axes, 0), widen(columns.shape, axes, 1)
    return np.column_stack([key, offset, shape, columns.start, columns.stop])


def _order(places: Column) -> Column:
    return np.lexsort(places.T[::-1])


def _differences(keys: Sequence[str], mine: Column, plan_places: Column, axes: int) -> list[str]:
    own, other = ({tuple(place) for place in places.tolist()} for places in (mine, plan_places))
    lines = [f"only in the tree: {_text(keys, place, axes)}" for place in sorted(own - other)]
    lines += [f"only in the plan: {_text(keys, place, axes)}" for place in sorted(other - own)]
    return lines or ["some shards occur more often on one side than on the other"]


def _text(keys: Sequence[str], place: tuple[int, ...], axes: int) -> str:
    key, offset, shape, (start, stop) = place[0], place[1 : 1 + axes], place[1 + axes : 1 + 2 * axes], place[-2:]
    flat = f", elements {start} to {stop}" if start >= 0 else ""
    return f"{keys[key]!r} at {offset} of {shape}{flat}"


def _refuse(side: str, rank: int, lines: Sequence[str]) -> None:
    heading = f"redistribute: the {side} tree of rank {rank} differs from the plan"
    fix = "Make the plan from the trees that ranks have now, and give each tree the number of its rank in the world."
    raise IntegrityError(error_text(heading, offenders=lines, fix=fix))


@shielded
def redistribute(
    tree: Any,
    target: Any,
    *,
    plan: ReshardPlan | None = None,
    relay: bool = False,
    cast: bool = False,
    plain: Sequence[str] = (),
    transform: Transform | None = None,
    world: Any = None,
    max_bytes_in_flight: int = limits.REDISTRIBUTE_BYTES,
    donate: bool = False,
    rules: Rules = None,
    transport: Transport | None = None,
    device: torch.device | str | None = None,
    empty: Empty = torch.empty,
    verify: bool = False,
) -> Any:
    """Return the target with the tensors of all ranks' trees in its own layout; every rank of the world calls it.

    The world contains source and target ranks, which may be the same, disjoint, or overlap. Each element
    of a target comes from one rank that holds it, in steps, through buffers of bounded size; sources aren't copied.
    Errors found before tensors move are raised on every rank.

    Args:
        tree: Source tree of this rank; None, or an empty tree, if it only receives. It isn't changed.
        target: Target tree of this rank, as for `load`; None if it only sends.
        plan: Plan for the layouts of all ranks, numbered as in the world. Ranks then compare its hash instead of
            exchanging layouts.
        relay: Whether ranks that want the same elements receive them once and pass them on among themselves: for
            trainers that feed several engines over narrow links.
        cast: Whether tensors are converted to the targets' dtypes, as `load` does: before they are sent, directly into
            the buffers. A plan that is passed determines the dtypes itself.
        plain: Key patterns of values that may be cast without their scales, as for `load`.
        transform: Trace of the function that makes targets from the sources, by key, such as an engine's own loader:
            each rank receives only the elements that its targets are made of. Plain tensors are targets too, keyed by
            their paths. A plan passed with it must be made from the sources and the result of `lenses.through_trace` on
            the targets.
        world: World of the ranks that take part; by default torch.distributed's default group, or else this process
            alone.
        max_bytes_in_flight: Upper bound of the bytes that a rank sends and receives in one step, and so of its buffers.
        donate: Whether the target's tensors are donated: they are filled in place, on any device, and returned, as
            `load` does. If the call fails, their content is lost.
        rules: Rules for sharded objects whose array shape changes, by key pattern.
        transport: Function that moves the buffers instead of the world.
        device: Device of the transport's buffers, by default the CPU. Without a transport, buffers are on the CPU,
            unless the tensors of all ranks are on one other kind of device, and the process group has a backend for it
            (nccl for CUDA).
        empty: Allocator of new tensors and buffers, called as ``empty(shape, dtype=..., device=...)``; it may return
            pinned memory, for example.
        verify: Whether ranks prove that received data equals sent data, for any transport: they hash each message as it
            leaves and as it arrives, and exchange the hashes.

    Returns:
        The sources' common state joined with the target, whose shards and objects have their data and whose factories
        have merged theirs, on the devices of the target's tensors; it can be saved or redistributed again. None if the
        target is None.

    Raises:
        IntegrityError: A target asks for elements that no source has, the sources' common states differ, or a rank's
            tree differs from the plan; with `verify`, some data arrived changed.
        WorldError: Ranks passed different plans or options, or a peer doesn't answer.
        ShapeError: A tensor no longer fits its shard, donated tensors share memory or aren't writable, or dtypes
            differ without `cast`, can't be cast, or need their scales.
        KeyMismatch: A target asks for a key that no source has, or a pattern matches nothing.
        CheckpointingException: A source shard has no data, or memory can't be allocated.
        TreeError: A target doesn't fit the common state, or has a plain tensor that no source has.
        RemoteError: Some ranks failed; raised on every rank. The error is also an instance of the class that the
            failures share.

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
    prepare = partial(
        _prepare,
        tree,
        target,
        plan,
        max_bytes_in_flight,
        device,
        transform,
        relay=relay,
        cast=cast,
        plain=plain,
        donate=donate,
        verify=verify,
    )
    ends, options, own, place = agree(ranks, "redistribute: prepare", prepare)
    descriptions = gather(ranks, "redistribute: describe", partial(describe, ends, own, options, place, ranks))
    full, schedule = agree(ranks, "redistribute: plan", partial(agreed_plan, descriptions, own))
    common = shared_common(ranks, descriptions, ends.source.common)
    objects = resharded_objects(ranks, descriptions, ends, rules)
    is_direct = transport is None  # a caller's transport may need buffers in a kind of memory of its own
    if transport is None:
        kind = agreed_device(descriptions)
        if device is None:
            # A rank without tensors takes part on torch's current device.
            device = place if place is not None and place.type == kind else kind
        transport = ranks.device_exchange(kind) or ranks.exchange
    allocate = partial(
        _allocate,
        ends,
        common,
        full,
        schedule,
        ranks.rank,
        donate=donate,
        is_direct=is_direct,
        device=device,
        empty=empty,
    )
    (route, memories), devices = share(
        ranks, "redistribute: make memory", allocate, lambda both: both[0].buffers.memory.device.type
    )
    # Failures of the steps are raised by the agreement below: raised here, they would leave the other ranks waiting
    # in their next step.
    hashing = HashingTransport(transport, hash_for(devices)) if verify else None
    failure = move(route, hashing or transport)
    original_target = None if transform is None else target
    join = partial(_join, failure, ends, common, memories, objects, original_target, donate=donate)
    return join_with_proof(ranks, route, hashing, join) if hashing else agree(ranks, "redistribute: join", join)


def _prepare(
    tree: Any,
    target: Any,
    plan: Any,
    max_bytes_in_flight: Any,
    device: Any,
    transform: Transform | None,
    *,
    relay: bool,
    cast: bool,
    plain: Sequence[str],
    donate: bool,
    verify: bool,
) -> tuple[Ends, Options, ReshardPlan | None, torch.device | None]:
    most = integer(DOING, "max_bytes_in_flight", max_bytes_in_flight)
    if plan is not None and not isinstance(plan, ReshardPlan):
        fix = "Pass the result of plan_reshard."
        refuse(DOING, "plan", type(plan).__name__, "a ReshardPlan", fix, error=MetadataError)
    # Relays are added before descriptions are exchanged, so that ranks compare hashes of the plan that is executed.
    relayed = with_relays(plan) if relay and plan is not None else plan
    own_target = target if transform is None else target_through(target, transform, cast=cast, plain=plain)
    ends = take_ends(tree, own_target, donate=donate)
    try:
        place = device_of_tensors(ends) if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        refuse(DOING, "device", device, "a torch device", "Leave it out, or pass 'cuda'.", error=MetadataError)
    return (
        ends,
        Options(most, relay, cast, tuple(checked_patterns(f"{DOING}: plain", plain)), bool(verify)),
        relayed,
        place,
    )


def _allocate(
    ends: Ends,
    common: Any,
    plan: ReshardPlan,
    schedule: Schedule,
    rank: int,
    *,
    donate: bool,
    is_direct: bool,
    device: torch.device | str | None,
    empty: Empty,
) -> tuple[Route, list[torch.Tensor]]:
    """Return this rank's `Route` (plan, memory and buffers), and a list of the tensors that it fills.

    Args:
        ends: Source and target trees of this rank, flattened.
        common: Common state of all sources.
        plan: Plan of all ranks.
        schedule: Schedule of `plan`.
        rank: Number of this rank.
        donate: Argument of `redistribute`.
        is_direct: Whether a message may be a part of a shard's memory, instead of a buffer.
        device: Device of the buffers; None for the CPU.
        empty: Argument of `redistribute`.

    Returns:
        The route; and the tensor for each target shard of this rank, in the order of ``ends.tensors``.
    """
    check_joins(ends, common)
    source_rows = own_rows("source", plan.source, ends.source.tensors, rank)
    target_rows = own_rows("target", plan.target, ends.tensors, rank)
    memories = target_memories(ends.tensors, ends.source.tensors, donate=donate, empty=empty)
    sources = {row: shard.data for row, shard in zip(source_rows, ends.source.tensors, strict=True)}
    targets = dict(zip(target_rows, memories, strict=True))
    buffers = make_buffers(schedule, rank, device or "cpu", empty)
    return Route(plan, schedule, rank, sources, targets, buffers, is_direct), memories


def _join(
    failure: Exception | None,
    ends: Ends,
    common: Any,
    memories: Sequence[torch.Tensor],
    objects: Sequence[ShardedObject],
    target: Any,
    *,
    donate: bool,
) -> Any:
    if failure is not None:
        raise failure
    result = joined_target(ends, common, donated_once(ends.tensors, memories) if donate else memories, objects)
    return result if target is None else _with_own_leaves(result, target)


def _with_own_leaves(tree: Any, target: Any) -> Any:
    """Return a result in which the target's own leaves, filled, replace the factories that a trace has added.

    A trace puts a factory in place of a shard or plain tensor of the target.

    Args:
        tree: Result of the redistribution; the added factories have their merged tensors as data.
        target: Target as the caller passed it.
    """
    own = dict(leaves_with_paths(target))

    def leaf_of(path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensorFactory) or isinstance(own[path], ShardedTensorFactory):
            return leaf
        return leaf.data if is_plain_tensor(own[path]) else with_data(own[path], leaf.data)

    pairs, rebuild = flatten_with_paths(tree)
    return rebuild([leaf_of(path, leaf) for path, leaf in pairs])
