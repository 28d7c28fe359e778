"""Reading a target's shards: into memory made for them, by every rank for itself or once for all that want the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from ..._collector import collector_paused
from ...errors import StrategyError, error_text
from ...layouts import ShardColumns, join_columns, shard_columns
from ...live import move
from ...mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ...plans import overlaps, plan_exchange, read_rounds
from ...plans.moving import convert
from ...storage import ReadReport
from ...strategies import (
    Checkpoint,
    Strategies,
    StrategyAction,
    check_unreplaced,
    find_strategy,
    unless_replaced,
)
from ...trees import HOLE
from ...world import agree, gather, share, step
from .._consistency import KnownLayout
from .._dispatch import Choice, backend_of, common_backend, sharded_backend, strategy_of
from .._packed import PackedColumns, pack_columns, send_tables, unpack_columns, without_long_table
from ._auto import ALONE, ExchangeChoice
from ._checks import ObjectsFit, reshaped_values
from ._exchange import by_sharing, bytes_moved, cuts_shards, route_of, traits_of_load
from ._targets import CPU, Kinds, deliver_all, new_memory, with_memories

# Conversion from another dtype: read into staging memory, a bounded round at a time, and copied to the target


def by_dtype(shards: Sequence[ShardedTensor], kinds: Kinds) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that are stored in their own dtype, as far as is known, and the others."""
    # By identity: shards of one key in a target may ask for different dtypes.
    others = [shard for shard in shards if shard.key in kinds and kinds[shard.key].dtype != shard.dtype]
    chosen = set(map(id, others))
    return [shard for shard in shards if id(shard) not in chosen], others


def columns_of(shards: Sequence[ShardedTensor], kinds: Kinds, rank: int) -> ShardColumns:
    """Return shards as columns, in the dtypes that they are stored in."""
    # A shard made anew is checked anew, which takes most of the time: only those that are converted are.
    described = (one if one.dtype == kinds[one.key].dtype else _described(one, kinds) for one in shards)
    return shard_columns([*described], rank)


def own_rounds(shards: Sequence[ShardedTensor], kinds: Kinds) -> list[int]:
    """Return the round in which each shard is read where this rank reads alone."""
    rounds: list[int] = read_rounds(columns_of(shards, kinds, 0)).tolist()
    return rounds


def common_rounds(parts: Sequence[ShardColumns], rank: int) -> tuple[list[int], int]:
    """Return the round in which each of a rank's shards is read, alike on all ranks, and how many rounds there are."""
    columns = join_columns(parts)
    rounds = read_rounds(columns)
    return rounds[columns.rank == rank].tolist(), int(rounds.max(initial=-1)) + 1


def as_stored(shards: Sequence[ShardedTensor], kinds: Kinds) -> list[ShardedTensor]:
    """Return shards with new memory of the dtypes that they are stored in."""
    described = (_described(shard, kinds) for shard in shards)
    return [replace(one, data=new_memory(one.key, one.data_shape, one.dtype)) for one in described]


def _described(shard: ShardedTensor, kinds: Kinds) -> ShardedTensor:
    return replace(shard, data=None, dtype=kinds[shard.key].dtype)


def convert_all(shards: Sequence[ShardedTensor], read: Sequence[ShardedTensor], kinds: Kinds) -> None:
    """Copy what was read into shards' memory, converted to their dtype; unstored parts of a padded one stay.

    Args:
        shards: with contiguous memory, written in place.
        read: the same shards as they are stored.
        kinds: what is stored.

    Raises:
        ShapeError: an integer doesn't fit the target's dtype.
    """
    for shard, stored in zip(shards, read, strict=True):
        for overlap in overlaps(shard, kinds[shard.key].global_shape):
            convert(shard.key, overlap.of(stored.data), overlap.of(shard.data))


def may_overflow(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a conversion depends on values: some of the stored dtype's integers don't fit the target's.

    Examples:
        >>> may_overflow(torch.int64, torch.uint8), may_overflow(torch.uint8, torch.int64)
        (True, False)
    """
    if stored == target or not (_is_integer(stored) and _is_integer(target)):
        return False
    own, other = torch.iinfo(stored), torch.iinfo(target)
    return own.min < other.min or own.max > other.max


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """How a target is read.

    Attributes:
        checkpoint: what is read.
        sharded_strategy: the caller's choice.
        strategies: the dispatch table; None for the process's.
        donate: whether the target's tensors are filled in place.
        exchange: whether ranks send each other what several of them want, and why.
        kinds: what is stored of tensors, by key; of another dtype than a target's, it is converted.
        objects: how the target's objects fit those that are stored.
        known: what all ranks ask for, if the caller passed it.
        device: where tensors are put whose target has none.
    """

    checkpoint: Checkpoint
    sharded_strategy: Choice
    strategies: Strategies | None
    donate: bool = False
    exchange: ExchangeChoice = ALONE
    kinds: Kinds = field(default_factory=dict)
    objects: ObjectsFit = field(default_factory=ObjectsFit)
    known: KnownLayout | None = None
    device: torch.device = CPU


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """The memory that a load fills.

    Attributes:
        leaves: what is asked for.
        shards: the tensors among them.
        memories: the same shards with memory to be filled.
        exchange: whether ranks send each other what several of them want, and why.
    """

    leaves: Sequence[Any]
    shards: Sequence[ShardedTensor]
    memories: Sequence[ShardedTensor]
    exchange: ExchangeChoice


def destination_of(reading: Reading, leaves: Sequence[Any]) -> Destination:
    """Return memory for what a target's leaves ask for."""
    shards = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    choices = (reading.sharded_strategy, reading.strategies)
    is_staged = reads_to_device(reading.checkpoint, *choices, reading.kinds, together=reading.exchange.together)
    with collector_paused():
        memories = with_memories(shards, donate=reading.donate, device=reading.device, is_staged=is_staged)
    return Destination(leaves, shards, memories, reading.exchange)


def read_into(reading: Reading, destination: Destination) -> tuple[list[Any], ReadReport]:
    """Fill the destination, and return the data of each object and how much was read; collective."""
    world = reading.checkpoint.world
    others = (leaf for leaf in destination.leaves if type(leaf) is not ShardedTensor)
    objects = [leaf for leaf in others if isinstance(leaf, ShardedObject)]
    if destination.exchange.together:
        together = _read_together(reading, destination.memories)
        return agree(world, "load: read objects", partial(_read_objects, reading, objects)), together

    def read() -> tuple[list[Any], ReadReport]:
        with step("load: read"):
            report = _read_alone(reading, destination.memories)
        return _read_objects(reading, objects), report

    return agree(world, "load: read objects", read, steps=("load: read",))


def _read_alone(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    alike, others = by_dtype(shards, reading.kinds)
    report = _read(reading, alike)
    rounds = own_rounds(others, reading.kinds) if others else []
    for number in sorted(set(rounds)):
        part = [shard for shard, its in zip(others, rounds, strict=True) if its == number]
        staged = as_stored(part, reading.kinds)
        report += _read(reading, staged)
        convert_all(part, staged, reading.kinds)
    return report


def _read_together(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    world = reading.checkpoint.world
    choices = (reading.sharded_strategy, None, reading.strategies)
    # Ranks may check differently, or have strategies of their own; the plan has to be the same on all.
    split = partial(by_dtype, shards, reading.kinds)
    (alike, others), cuts = share(
        world, "load: compare dtypes", split, lambda _: cuts_shards(reading.checkpoint, choices)
    )
    report = _read_once(reading, alike, all(cuts), reading.known)

    def describe() -> PackedColumns:
        return pack_columns(columns_of(others, reading.kinds, world.rank), world.rank)

    brief = partial(without_long_table, ranks=world.size)
    described = send_tables(world, *share(world, "load: describe conversions", describe, brief))
    # Rounds are planned from all ranks' shards: what one rank reads for several has to be in the same round of each.
    rounds, count = agree(world, "load: plan conversions", lambda: common_rounds(unpack_columns(described), world.rank))
    for number in range(count):
        part = [shard for shard, its in zip(others, rounds, strict=True) if its == number]
        staged = agree(world, "load: make room", partial(as_stored, part, reading.kinds))
        report += _read_once(reading, staged, all(cuts))
        agree(world, "load: convert", partial(convert_all, part, staged, reading.kinds))
    return report


def _read(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    backend = sharded_backend(reading.checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, reading.sharded_strategy, backend, reading.strategies)
    with unless_replaced(reading.checkpoint):
        report = load_sharded(reading.checkpoint, shards)
    if not isinstance(report, ReadReport):
        # A function that returns tensors, as in other libraries, has left the shards' memory unfilled.
        what, found = "load: not what a function that loads shards returns", type(report).__name__
        fix = "Fill the data of each shard in place, and return how much was read."
        raise StrategyError(error_text(what, found=found, expected="a ReadReport", fix=fix))
    return report


def _read_once(
    reading: Reading, shards: Sequence[ShardedTensor], is_cut: bool, known: KnownLayout | None = None
) -> ReadReport:
    """Read this rank's share of what several ranks want, and send it to the others; collective."""
    world = reading.checkpoint.world
    own, alike = by_sharing(shards)

    def describe() -> PackedColumns:
        return pack_columns(shard_columns(alike, world.rank), world.rank)

    # A known layout saves the exchange of columns, but only if no rank has left out or converts any of it.
    if known is not None and all(gather(world, "load: compare reads", lambda: len(alike) == known.order.size)):
        columns, alike = known.columns, [alike[number] for number in known.order.tolist()]
    else:
        brief = partial(without_long_table, ranks=world.size)
        wanted = send_tables(world, *share(world, "load: describe reads", describe, brief))
        columns = agree(world, "load: join reads", lambda: join_columns(unpack_columns(wanted)))
    plan = agree(world, "load: plan exchange", partial(plan_exchange, columns, world.size, is_cut=is_cut))
    chosen, route = agree(world, "load: choose reads", partial(route_of, plan, world.rank, alike))
    report = agree(world, "load: read", partial(_read, reading, [*own, *chosen]))
    failure = move(route, world.exchange)
    return report + agree(world, "load: pass on", partial(bytes_moved, failure, plan, world.rank))


def _read_objects(reading: Reading, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each object, that of arrays that change their shape by their rules."""
    fit = reading.objects
    if not fit.reshaped:
        return _read_stored(reading, objects)
    as_stored = [item for item in objects if not fit.changes(item)]
    read = _read_stored(reading, [*as_stored, *fit.read])
    changed = [item for item in objects if fit.changes(item)]
    plain, reshaped = iter(read), iter(reshaped_values(fit, changed, read[len(as_stored) :]))
    return [next(reshaped if fit.changes(item) else plain) for item in objects]


def _read_stored(reading: Reading, objects: Sequence[ShardedObject]) -> list[Any]:
    if not objects:
        return []
    backend = backend_of(reading.sharded_strategy, sharded_backend(reading.checkpoint.fields), reading.strategies)
    if find_strategy(StrategyAction.LOAD_OBJECTS, *backend, strategies=reading.strategies) is None:
        backend = common_backend(reading.checkpoint.fields)
    load_objects = strategy_of(StrategyAction.LOAD_OBJECTS, None, backend, reading.strategies)
    with unless_replaced(reading.checkpoint):
        loaded: list[Any] = load_objects(reading.checkpoint, objects)
    return loaded


def deliver(reading: Reading, destination: Destination, objects: Sequence[Any]) -> list[Any]:
    """Return what was loaded for each leaf: a tensor, a boxed object, a local box unchanged, or a hole.

    Args:
        reading: how the target was read.
        destination: the filled memory.
        objects: the data of the objects among the leaves.
    """
    rest = iter(objects)
    # Only now, when all ranks have read: a save that replaced the files earlier would have mixed two checkpoints.
    check_unreplaced(reading.checkpoint)
    tensors = iter(deliver_all(destination.shards, destination.memories, donate=reading.donate, device=reading.device))
    return [_loaded(leaf, tensors, rest) for leaf in destination.leaves]


def _loaded(leaf: Any, tensors: Iterator[torch.Tensor], objects: Iterator[Any]) -> Any:
    if isinstance(leaf, ShardedTensor):
        return next(tensors)
    if isinstance(leaf, ShardedObject):
        # Boxed: a loaded object may be a container, which the join would enter.
        return LocalNonpersistentObject(next(objects))
    return leaf if isinstance(leaf, LocalNonpersistentObject) else HOLE


def reads_to_device(
    checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None, kinds: Kinds, *, together: bool
) -> Callable[[ShardedTensor], bool]:
    """Return a predicate: whether a shard whose target is on a device is read there part by part.

    It isn't if something needs the host's memory: a conversion, an exchange between ranks, or a load by a function that
    isn't known to do without.
    """

    @cache  # looked up only once a shard is on a device, and then once for all
    def is_possible() -> bool:
        return not together and traits_of_load(checkpoint, choice, strategies).fills_devices

    def is_direct(shard: ShardedTensor) -> bool:
        return is_possible() and (shard.key not in kinds or kinds[shard.key].dtype == shard.dtype)

    return is_direct
