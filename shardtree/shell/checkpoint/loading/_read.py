"""Reading a target's shards into memory made for them: by every rank for itself, or as ranks read for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from ....core.ambient import collector_paused
from ....core.deferred import leaf
from ....core.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ....core.plans import convert, overlaps
from ....core.trees import HOLE
from ....errors import StrategyError, error_text
from ...storage import ReadReport
from ...table import Checkpoint, Strategies, StrategyAction, check_unreplaced, find_strategy, unless_replaced
from ...world import agree, step
from .._consistency import KnownLayout
from .._dispatch import DEFAULT_BACKEND, Choice, backend_of, common_backend, sharded_backend, strategy_of
from ._choice import ALONE, ExchangeChoice
from ._groups import groups_of, stored_shard, traits_of_load
from ._objects import ObjectsFit, reshaped_values
from ._targets import CPU, Kinds, deliver_all, new_memory, with_memories

# Imported now: a load of our own format imports nothing, since it may run where an import is half done.
find_strategy(StrategyAction.LOAD_SHARDED, *DEFAULT_BACKEND)

# Conversion from another dtype: read into staging memory, a bounded round at a time, and copied to the target


def as_stored(shards: Sequence[ShardedTensor], kinds: Kinds) -> list[ShardedTensor]:
    """Return shards with new memory of the dtypes that they are stored in."""
    bare = (stored_shard(shard, kinds) for shard in shards)
    return [replace(one, data=new_memory(one.key, one.data_shape, one.dtype)) for one in bare]


def convert_all(shards: Sequence[ShardedTensor], sources: Sequence[ShardedTensor], kinds: Kinds) -> None:
    """Copy what was read into shards' memory, converted to their dtype; unstored parts of a padded one stay.

    Args:
        shards: with contiguous memory, written in place.
        sources: the same shards as they are stored.
        kinds: what is stored.

    Raises:
        ShapeError: an integer doesn't fit the target's dtype.
    """
    for shard, source in zip(shards, sources, strict=True):
        for overlap in overlaps(shard, kinds[shard.key].global_shape):
            convert(shard.key, overlap.of(source.data), overlap.of(shard.data))


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
        layout: what all ranks ask for, if the caller passed it.
        device: where tensors are put whose target has none.
    """

    checkpoint: Checkpoint
    sharded_strategy: Choice
    strategies: Strategies | None
    donate: bool = False
    exchange: ExchangeChoice = ALONE
    kinds: Kinds = field(default_factory=dict)
    objects: ObjectsFit = field(default_factory=ObjectsFit)
    layout: KnownLayout | None = None
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
        together: ReadReport = leaf("read_together")(reading, destination.memories)
        return agree(world, "load: read objects", partial(_read_objects, reading, objects)), together

    def read() -> tuple[list[Any], ReadReport]:
        with step("load: read"):
            report = _read_alone(reading, destination.memories)
        return _read_objects(reading, objects), report

    return agree(world, "load: read objects", read, steps=("load: read",))


def _read_alone(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    alike, *rounds = groups_of(shards, reading.kinds)
    report = read_shards(reading, alike)
    for part in rounds:
        staging = as_stored(part, reading.kinds)
        report += read_shards(reading, staging)
        convert_all(part, staging, reading.kinds)
    return report


def read_shards(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill shards by the format's function, or the caller's, and return how much was read; not collective.

    Raises:
        StrategyError: the function returned something else.
    """
    backend = sharded_backend(reading.checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, reading.sharded_strategy, backend, reading.strategies)
    with unless_replaced(reading.checkpoint):
        report = load_sharded(reading.checkpoint, shards)
    if not isinstance(report, ReadReport):
        # A function that returns tensors, as in other libraries, has left the shards' memory unfilled.
        what = "load: not what a function that loads shards returns"
        fix = "Fill the data of each shard in place, and return how much was read."
        raise StrategyError(error_text(what, found=type(report).__name__, expected="a ReadReport", fix=fix))
    return report


def _read_objects(reading: Reading, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each object, that of arrays that change their shape by their rules."""
    fit = reading.objects
    if not fit.arrays:
        return _read_items(reading, objects) if objects else []
    same = [item for item in objects if not fit.changes(item)]
    items = [*same, *fit.cells_to_read]
    data = _read_items(reading, items) if items else []
    others = [item for item in objects if fit.changes(item)]
    plain, by_rule = iter(data), iter(reshaped_values(fit, others, data[len(same) :]))
    return [next(by_rule if fit.changes(item) else plain) for item in objects]


def _read_items(reading: Reading, objects: Sequence[ShardedObject]) -> list[Any]:
    backend = backend_of(reading.sharded_strategy, sharded_backend(reading.checkpoint.fields), reading.strategies)
    if find_strategy(StrategyAction.LOAD_OBJECTS, *backend, strategies=reading.strategies) is None:
        backend = common_backend(reading.checkpoint.fields)
    load_objects = strategy_of(StrategyAction.LOAD_OBJECTS, None, backend, reading.strategies)
    with unless_replaced(reading.checkpoint):
        data: list[Any] = load_objects(reading.checkpoint, objects)
    return data


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
    leaves: list[Any] = []
    for asked in destination.leaves:
        if isinstance(asked, ShardedTensor):
            leaves.append(next(tensors))
        elif isinstance(asked, ShardedObject):
            # Boxed: a loaded object may be a container, which the join would enter.
            leaves.append(LocalNonpersistentObject(next(rest)))
        else:
            leaves.append(asked if isinstance(asked, LocalNonpersistentObject) else HOLE)
    return leaves


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
