"""Reading a target's shards into memory: each rank for itself, or ranks for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from ....core.ambient import collector_paused
from ....core.deferred import leaf
from ....core.geometry import Column
from ....core.layouts import shard_columns
from ....core.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ....core.plans import convert, overlaps, read_rounds
from ....core.trees import HOLE
from ....errors import StrategyError, error_text
from ...storage import ReadReport
from ...table import (
    Checkpoint,
    FormatTraits,
    Strategies,
    StrategyAction,
    check_unreplaced,
    default_strategies,
    find_strategy,
    traits_of,
    unless_replaced,
)
from ...world import agree, step
from .._consistency import KnownLayout
from .._dispatch import DEFAULT_BACKEND, Choice, backend_of, common_backend, sharded_backend, strategy_of
from ._choice import ALONE, ExchangeChoice
from ._objects import ObjectsFit, reshaped_values
from ._targets import CPU, Kinds, deliver_all, new_memory, with_memories

# The row is imported now, so that a load of our own format imports nothing: it may run during another import.
find_strategy(StrategyAction.LOAD_SHARDED, *DEFAULT_BACKEND)

Shards = Sequence[ShardedTensor]

# Groups of shards that are read at once: first those stored in the target's dtype, then rounds of shards that are
# converted. A round is read into staging memory of bounded size, and copied to the target.


def by_dtype(shards: Shards, kinds: Kinds) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Return the shards that need no conversion (stored in their own or an unknown dtype), and those that need one."""
    # Shards are compared by identity, since shards of one key in a target may have different dtypes.
    others = [shard for shard in shards if shard.key in kinds and kinds[shard.key].dtype != shard.dtype]
    ids = set(map(id, others))
    return [shard for shard in shards if id(shard) not in ids], others


def stored_shard(shard: ShardedTensor, kinds: Kinds) -> ShardedTensor:
    """Return a shard without data, with the dtype in which its tensor is stored."""
    return replace(shard, data=None, dtype=kinds[shard.key].dtype)


def groups_of(shards: Shards, kinds: Kinds, rounds: Column | None = None, count: int = 0) -> list[list[ShardedTensor]]:
    """Divide a rank's shards into groups, to be read one group after another.

    The first group has the shards that need no conversion. Each further group is a round of shards that are converted;
    its size is bounded.

    Args:
        shards: The rank's shards.
        kinds: The stored kinds (dtype, shape), by key.
        rounds: Index of the round of each shard that is converted, int64 (converted shards,), as agreed by ranks that
            read for each other. None: this function divides them.
        count: Number of rounds, if `rounds` is given.
    """
    alike, others = by_dtype(shards, kinds)
    if rounds is None and others:
        rounds = read_rounds(shard_columns([stored_shard(shard, kinds) for shard in others]))
        count = int(rounds.max()) + 1
    parts: list[list[ShardedTensor]] = [[] for _ in range(count)]
    for shard, number in zip(others, [] if rounds is None else rounds.tolist(), strict=True):
        parts[number].append(shard)
    return [alike, *parts]


def as_stored(shards: Sequence[ShardedTensor], kinds: Kinds) -> list[ShardedTensor]:
    """Return the shards with new memory, in the dtypes in which their tensors are stored."""
    bare = (stored_shard(shard, kinds) for shard in shards)
    return [replace(shard, data=new_memory(shard.key, shard.data_shape, shard.dtype)) for shard in bare]


def convert_all(shards: Sequence[ShardedTensor], sources: Sequence[ShardedTensor], kinds: Kinds) -> None:
    """Convert the values that were read to the shards' dtypes, and write them into the shards' memory.

    Elements of a padded shard that aren't stored keep their values.

    Args:
        shards: Shards with contiguous memory, written in place.
        sources: The same shards in their stored dtypes, with the values that were read.
        kinds: The stored kinds (dtype, shape), by key.

    Raises:
        ShapeError: An integer doesn't fit the target's dtype.
    """
    for shard, source in zip(shards, sources, strict=True):
        for overlap in overlaps(shard, kinds[shard.key].global_shape):
            convert(shard.key, overlap.of(source.data), overlap.of(shard.data))


@dataclass(frozen=True, eq=False)
class Reading:
    """The parameters for reading a target.

    Attributes:
        checkpoint: The opened checkpoint.
        sharded_strategy: The caller's choice of a strategy for the shards.
        strategies: The dispatch table; None for the process's.
        donate: Whether the target's tensors are filled in place.
        exchange: The choice whether ranks read for each other.
        kinds: Stored dtype and shape of each tensor, by key; tensors of another dtype than the target's are converted.
        objects: The differences between the target's objects and the stored ones.
        layout: The tensor shards that all ranks request, if the caller passed them.
        device: The device of tensors that have no memory in the target.
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

    @cached_property
    def fills_devices(self) -> bool:
        """Whether memory on devices is filled directly, in parts, instead of from a whole copy in host memory."""
        if self.exchange.together:
            return False
        return traits_of_load(self.checkpoint, self.sharded_strategy, self.strategies).fills_devices


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """The memory that a load fills.

    Attributes:
        leaves: The leaves of the target.
        shards: The tensor shards among the leaves.
        memories: The same shards, with the tensors to be filled as their data.
    """

    leaves: Sequence[Any]
    shards: Sequence[ShardedTensor]
    memories: Sequence[ShardedTensor]


def destination_of(reading: Reading, leaves: Sequence[Any]) -> Destination:
    """Allocate memory for the tensor shards among a target's leaves; donated tensors are used if they fit."""
    shards = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    is_staged = partial(_is_read_to_device, reading)
    with collector_paused():
        memories = with_memories(shards, donate=reading.donate, device=reading.device, is_staged=is_staged)
    return Destination(leaves, shards, memories)


def _is_read_to_device(reading: Reading, shard: ShardedTensor) -> bool:
    """Return whether a shard on a device may be filled part by part, without a whole copy in host memory.

    The format must support this, ranks mustn't read for each other, and the dtype mustn't be converted.
    """
    is_alike = shard.key not in reading.kinds or reading.kinds[shard.key].dtype == shard.dtype
    return is_alike and reading.fills_devices


def read_into(reading: Reading, destination: Destination) -> tuple[list[Any], ReadReport]:
    """Read the target's tensors into the destination; return the data of each object, and a report. Collective."""
    world = reading.checkpoint.world
    others = (leaf for leaf in destination.leaves if type(leaf) is not ShardedTensor)
    objects = [leaf for leaf in others if isinstance(leaf, ShardedObject)]
    if reading.exchange.together:
        together: ReadReport = leaf("read_together")(reading, destination.memories)
        return agree(world, "load: read objects", partial(_read_objects, reading, objects)), together

    def read() -> tuple[list[Any], ReadReport]:
        with step("load: read"):
            report = _read_alone(reading, destination.memories)
        return _read_objects(reading, objects), report

    return agree(world, "load: read objects", read, steps=("load: read",))


def _read_alone(reading: Reading, shards: Shards) -> ReadReport:
    alike, *rounds = groups_of(shards, reading.kinds)
    report = read_shards(reading, alike)
    for part in rounds:
        staging = as_stored(part, reading.kinds)
        report += read_shards(reading, staging)
        convert_all(part, staging, reading.kinds)
    return report


def read_shards(reading: Reading, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill shards with the format's or the caller's function, and return the report of that function; not collective.

    Raises:
        StrategyError: The function didn't return a ReadReport.
    """
    backend = sharded_backend(reading.checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, reading.sharded_strategy, backend, reading.strategies)
    with unless_replaced(reading.checkpoint):
        report = load_sharded(reading.checkpoint, shards)
    if not isinstance(report, ReadReport):
        # A function that returns tensors, as in other libraries, hasn't filled the shards' memory.
        heading = f"load: invalid result of the load_sharded function for {backend!r}"
        fix = "Fill the data of each shard in place, and return a ReadReport."
        raise StrategyError(error_text(heading, found=type(report).__name__, expected="a ReadReport", fix=fix))
    return report


def _read_objects(reading: Reading, objects: Sequence[ShardedObject]) -> list[Any]:
    """Return the data of each object; rules compute the data of arrays that change their shape."""
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
    """Return the loaded value of each leaf: a tensor, or an object in a `LocalNonpersistentObject`; else `HOLE`.

    The target's own instances of `LocalNonpersistentObject` are returned unchanged.

    Args:
        reading: The parameters of the read.
        destination: The filled memory.
        objects: The data of the objects among the leaves.
    """
    data = iter(objects)
    # The check comes after all ranks have read: a save that replaced files earlier could have mixed two checkpoints.
    check_unreplaced(reading.checkpoint)
    tensors = iter(deliver_all(destination.shards, destination.memories, donate=reading.donate, device=reading.device))
    leaves: list[Any] = []
    for target in destination.leaves:
        if isinstance(target, ShardedTensor):
            leaves.append(next(tensors))
        elif isinstance(target, ShardedObject):
            # The object is boxed, since it may be a container, which the join would enter.
            leaves.append(LocalNonpersistentObject(next(data)))
        else:
            leaves.append(target if isinstance(target, LocalNonpersistentObject) else HOLE)
    return leaves


def traits_of_load(checkpoint: Checkpoint, choice: Choice, strategies: Strategies | None) -> FormatTraits:
    """Return a checkpoint format's traits; the default traits if the shards are loaded by a replacement function."""
    backend = sharded_backend(checkpoint.fields)
    load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, choice, backend, strategies)
    # The traits describe the format's own function, not a replacement for this call.
    row = find_strategy(StrategyAction.LOAD_SHARDED, *backend, strategies=strategies)
    default = default_strategies.get((StrategyAction.LOAD_SHARDED, *backend), row)
    return traits_of(*backend, strategies) if load_sharded is row is default else FormatTraits()
