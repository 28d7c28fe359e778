"""The messages that ranks of a redistribution exchange before tensors move, and the plan that follows from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core.codec import encode_tree, row_major_bits
from ..core.layouts import ObjectRule, ShardColumns, join_columns, reshard_objects, shard_columns
from ..core.mapping import ShardedObject
from ..core.trees import HOLE, comparable, map_shards
from ..errors import WorldError, error_text
from ..shell.world import World, agree, gather, on_one_rank
from ._memory import DOING, Ends
from .resharding import ReshardPlan, Schedule, plan_reshard, with_relays
from .resharding._in_memory import agreed_common

# Hashes of plans, by which ranks compare a plan that they were passed.


def value_digest(value: Any) -> str:
    """Return a hexadecimal hash of a value made of dataclasses, tuples, NumPy arrays, and leaves with an exact `repr`.

    Examples:
        >>> value_digest((1, np.arange(3))) == value_digest((1, np.arange(3)))
        True
        >>> value_digest((1, np.arange(3))) == value_digest((1, np.arange(4)))
        False
    """
    state = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        # The length of each part is hashed too, so that a different division into parts never gives the same bytes.
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype.str} {value.shape}".encode()
        yield np.ascontiguousarray(value).view(np.uint8).ravel().data
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        yield f"tuple {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `redistribute` that must be the same on every rank.

    Attributes:
        max_bytes_in_flight: Upper bound of the bytes that a rank sends and receives in one step.
        relay: Whether ranks that want the same elements pass them on to each other.
        cast: Whether tensors are converted to the targets' dtypes.
        plain: Patterns of keys whose values may be converted without their stored scales.
        verify: Whether received messages are compared with the sent ones, by their hashes.
    """

    max_bytes_in_flight: int
    relay: bool
    cast: bool
    plain: tuple[str, ...]
    verify: bool


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """One rank's description of its trees and arguments, which all ranks receive before tensors move.

    Attributes:
        options: The rank's options.
        plan: Hash of the plan that the caller passed; None without a plan.
        source: Table of the rank's source shards; None if a plan was passed, which contains them.
        target: Table of the rank's target shards; None if a plan was passed.
        common: Hash of the rank's common state; None if the rank has no source tree.
        wants_objects: Whether the rank's target has sharded objects.
        device: Kind of device for the rank's buffers; None if the rank has no tensors.
    """

    options: Options
    plan: str | None
    source: ShardColumns | None
    target: ShardColumns | None
    common: str | None
    wants_objects: bool
    device: str | None


def describe(
    ends: Ends, plan: ReshardPlan | None, options: Options, device: torch.device | None, world: World
) -> Description:
    """Return a rank's description of its trees and arguments; with a plan, its size does not grow with the trees.

    Args:
        ends: The rank's source and target trees.
        plan: The plan that the caller passed, if any.
        options: The caller's options.
        device: Device of the rank's tensors; None if the rank has none.
        world: World of the rank.
    """
    rank = world.rank
    usable = device is None or world.device_exchange(device.type) is not None
    common = ends.source.common
    return Description(
        options,
        None if plan is None else value_digest(plan),
        shard_columns(ends.source.tensors, rank) if plan is None else None,
        shard_columns(ends.tensors, rank) if plan is None else None,
        None if common is HOLE else value_digest(encode_tree(comparable(common), allow_pickle=True)),
        bool(ends.objects),
        None if device is None else device.type if usable else "cpu",
    )


def agreed_plan(descriptions: Sequence[Description], plan: ReshardPlan | None) -> tuple[ReshardPlan, Schedule]:
    """Return the plan of all ranks and its schedule, after checking that all ranks passed the same plan and options.

    Args:
        descriptions: Every rank's description, by rank.
        plan: The plan that was passed to this rank, if any.

    Raises:
        WorldError: The ranks passed different options or plans, or a plan has ranks that the world lacks.
        CheckpointingException: No plan can make the targets from the sources.
    """
    _check_equal("options", [str(description.options) for description in descriptions])
    _check_equal(
        "plans",
        ["none given" if description.plan is None else f"hash {description.plan}" for description in descriptions],
    )
    options = descriptions[0].options
    if plan is None:
        sources = [description.source for description in descriptions if description.source is not None]
        targets = [description.target for description in descriptions if description.target is not None]
        plan = plan_reshard(join_columns(sources), join_columns(targets), cast=options.cast, plain=options.plain)
        # Every rank computes the same plan from the same columns, so no plan has to be sent.
        plan = with_relays(plan) if options.relay else plan
    if unknown := [f"rank {rank}" for rank in plan.ranks if rank >= len(descriptions)]:
        heading = "redistribute: the plan has ranks that this call lacks"
        fix = "Number the plan's ranks as the calling ranks are numbered, and make this call on all of them."
        raise WorldError(error_text(heading, offenders=unknown, expected=f"ranks below {len(descriptions)}", fix=fix))
    return plan, plan.schedule(max_bytes_in_flight=options.max_bytes_in_flight)


def agreed_device(descriptions: Sequence[Description]) -> str:
    """Return the kind of device of all ranks' buffers: the CPU unless all tensors are on one other kind.

    Args:
        descriptions: Every rank's description, by rank.
    """
    kinds = {description.device for description in descriptions if description.device is not None}
    return kinds.pop() if len(kinds) == 1 else "cpu"


def _check_equal(subject: str, texts: Sequence[str]) -> None:
    if len(set(texts)) > 1:
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
        fix = "Make the same call on every rank, with plans of the same layouts."
        raise WorldError(error_text(f"redistribute: ranks disagree about {subject}", offenders=lines, fix=fix))


# Common state and sharded objects.

Rules = Mapping[str, ObjectRule] | None


def shared_common(world: World, descriptions: Sequence[Description], common: Any) -> Any:
    """Return the common state of the lowest rank with a source tree, on every rank; collective.

    Only that rank sends its common state, unless the ranks' hashes differ, so that the values must be compared.

    Args:
        world: World of the ranks.
        descriptions: Every rank's description, by rank.
        common: Common state of this rank.

    Raises:
        IntegrityError: The sources' common states differ.
    """
    source_ranks = [rank for rank, description in enumerate(descriptions) if description.common is not None]
    if len({descriptions[rank].common for rank in source_ranks}) > 1:
        # Hashes may differ although values are equal, as those of pickles do, so the values themselves are compared
        # now.
        commons = gather(world, "redistribute: compare common states", lambda: _portable(common))
        agree(
            world, "redistribute: common state", lambda: agreed_common(dict(enumerate(map(_restore, commons))), DOING)
        )
    if not source_ranks or world.size == 1:
        return common
    portable = on_one_rank(
        world, "redistribute: pass on the common state", lambda: _portable(common), rank=source_ranks[0]
    )
    return common if world.rank == source_ranks[0] else _restore(portable)


@dataclass(frozen=True, slots=True, eq=False)
class _PortableTensor:
    """A tensor as bytes, to be pickled: torch cannot pickle some dtypes, and pickles a view with its whole storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: np.ndarray[tuple[int], np.dtype[np.uint8]]


def _portable(common: Any) -> Any:
    return map_shards(_to_portable, common)


def _to_portable(leaf: Any) -> Any:
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    return _PortableTensor(leaf.dtype, tuple(leaf.shape), row_major_bits(leaf).numpy())


def _restore(common: Any) -> Any:
    return map_shards(_from_portable, common)


def _from_portable(leaf: Any) -> Any:
    if not isinstance(leaf, _PortableTensor):
        return leaf
    return torch.from_numpy(leaf.bits).view(leaf.dtype).view(leaf.shape)


def resharded_objects(
    world: World, descriptions: Sequence[Description], ends: Ends, rules: Rules
) -> list[ShardedObject]:
    """Return this rank's target objects with their data; collective. Nothing is sent if no rank wants objects.

    Args:
        world: World of the ranks.
        descriptions: Every rank's description, by rank.
        ends: The rank's source and target trees.
        rules: Rules for objects whose array shape changes, by key pattern.

    Raises:
        KeyMismatch: The sources lack an object that a target asks for.
        IntegrityError: A target's array of objects has another shape than the source's, and no rule applies.
    """
    if not any(each.wants_objects for each in descriptions):
        return []
    parts = gather(world, "redistribute: gather objects", lambda: _with_data(ends.source.objects, _portable))
    return agree(world, "redistribute: reshard objects", partial(_reshard, parts, ends.objects, rules))


def _reshard(
    parts: Sequence[Sequence[ShardedObject]], targets: Sequence[ShardedObject], rules: Rules
) -> list[ShardedObject]:
    return reshard_objects(_with_data((item for part in parts for item in part), _restore), targets, rules)


def _with_data(objects: Iterable[ShardedObject], change: Callable[[Any], Any]) -> list[ShardedObject]:
    return [replace(item, data=change(item.data)) for item in objects]
