"""What a rank finds out by itself before a save, what it tells the others, and what it then writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codec import decode_tree, encode_tree
from ...errors import IntegrityError, error_text
from ...fingerprints import replica_problems, shard_totals
from ...layouts import ShardColumns, shard_columns
from ...mapping import ShardedTensor, is_main_replica
from ...plans import held_places, level_writes
from ...storage import Directory, Storage, storage_at
from ...strategies import PendingSave
from ...trees import comparable
from ...world import World, agree, gather, share, step
from .._consistency import Description, KnownLayout, check_common, check_together, common_digest, describe, known_layout
from .._dispatch import Backends
from .._fingerprint import in_usual_threads
from ._begin import Begun, begun_of
from ._prepare import Prepared
from ._request import Writes

Sums = NDArray[np.uint64]
"""What shards add to their tensors' fingerprints, uint64 (shards,)."""

_STEPS = (
    "save: prepare",
    "save: find the format",
    "save: find the folder",
    "save: look at the folder",
    "save: make the folder",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ranks compare before a save.

    Attributes:
        layouts: whether each gets the others' shards.
        replicas: whether shards that are cut alike must hold the same elements.
        common: what of the common state must be alike, None where it isn't checked that ranks fit together.
        allow_pickle: whether values that the format can't hold are pickled.
    """

    layouts: bool
    replicas: bool
    common: Callable[[Any], Any] | None
    allow_pickle: bool

    def of(self, prepared: Prepared) -> Any:
        """Return what must be the same on all ranks."""
        return None if self.common is None else self.common(comparable(prepared.common))


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What a rank tells the others before a save.

    Attributes:
        description: of its shards, None where ranks don't compare.
        begun: the save's beginning; from rank 0.
    """

    description: Description | None
    begun: Begun | None


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """What a rank knows before it hears of the others.

    Attributes:
        prepared: its tree, taken apart.
        known: all ranks' shards, where they were given.
        backends: of the shards and of the common state.
        storage: where to.
        told: what it tells the others.
        pending: the beginning of the save; on rank 0.
    """

    prepared: Prepared
    known: KnownLayout | None
    backends: Backends
    storage: Storage
    told: Told
    pending: PendingSave | None


def get_ready(
    world: World,
    take_apart: Callable[[], Prepared],
    layout: ShardColumns | None,
    comparison: Comparison,
    choose: Callable[[], Backends],
    directory: Directory,
    begin: Callable[[Storage, Backends], PendingSave],
) -> tuple[Ready, list[Told]]:
    """Return what a rank knows by itself, and what each tells the others; collective.

    Args:
        world: who saves together.
        take_apart: returns this rank's tree, taken apart.
        layout: all ranks' shards, where the caller gave them.
        comparison: what ranks compare.
        choose: returns the backends.
        directory: where to.
        begin: makes a folder and returns the pending save; called on rank 0, last.
    """
    alone = partial(_ready, world, take_apart, layout, comparison, choose, directory, begin)
    told = attrgetter("told")
    # By another name, so that ranks which compare and ranks which don't are told so.
    if comparison.layouts:
        return share(world, "save: describe shards", alone, told, steps=_STEPS)
    return share(world, "save: get ready", alone, told, steps=_STEPS)


def _ready(
    world: World,
    take_apart: Callable[[], Prepared],
    layout: ShardColumns | None,
    comparison: Comparison,
    choose: Callable[[], Backends],
    directory: Directory,
    begin: Callable[[Storage, Backends], PendingSave],
) -> Ready:
    prepared, known = step("save: prepare", partial(_matched, take_apart, layout, world))
    backends = step("save: find the format", choose)
    storage = step("save: find the folder", partial(storage_at, directory))
    description = _described(world, prepared, known, comparison) if comparison.layouts else None
    pending = begin(storage, backends) if world.rank == 0 else None
    begun = None if pending is None else begun_of(pending)
    return Ready(prepared, known, backends, storage, Told(description, begun), pending)


def _matched(
    take_apart: Callable[[], Prepared], layout: ShardColumns | None, world: World
) -> tuple[Prepared, KnownLayout | None]:
    prepared = take_apart()
    return prepared, known_layout("save", layout, prepared.tensors, world.rank, world.size)


def _described(world: World, prepared: Prepared, known: KnownLayout | None, comparison: Comparison) -> Description:
    hashed = common_digest(comparison.of(prepared), allow_pickle=comparison.allow_pickle)
    return describe(prepared.tensors, prepared.objects, world.rank, hashed, known)


def compare_common(world: World, ready: Ready, told: Sequence[Told], comparison: Comparison) -> None:
    """Raise where ranks' common states differ, with what the difference is; collective where they do.

    Args:
        world: who saves together.
        ready: what this rank knows by itself.
        told: what each rank told the others, by rank.
        comparison: what ranks compare.

    Raises:
        IntegrityError: common states differ.
    """
    if len({each.description.common for each in told if each.description is not None}) < 2:
        return
    allow_pickle = comparison.allow_pickle
    # Not pickled: ranks may hold instances of classes that others can't import.
    encode = partial(encode_tree, allow_pickle=allow_pickle)
    encoded = gather(world, "save: compare common states", lambda: encode(comparison.of(ready.prepared)))
    decode = partial(decode_tree, allow_pickle=allow_pickle)
    agree(world, "save: check common states", lambda: check_common([decode(data) for data in encoded]))


def replica_sums(world: World, ready: Ready, told: Sequence[Told], comparison: Comparison) -> list[Sums]:
    """Return what each rank's shards add to their tensors' fingerprints; collective where replicas are compared.

    Args:
        world: who saves together.
        ready: what this rank knows by itself.
        told: what each rank told the others, by rank.
        comparison: what ranks compare.

    Returns:
        By rank, in the order of all ranks' columns, 0 for a shard that no other rank has; nothing where replicas
        aren't compared.

    Raises:
        IntegrityError: shards don't fit together.
    """

    def own_sums() -> Sums:
        columns = _checked_columns(ready, told, comparison)
        own = np.flatnonzero(columns.rank == world.rank)
        place, places = held_places(columns)
        shared = np.flatnonzero(np.bincount(place, minlength=places)[place[own]] > 1)
        order = np.arange(own.size) if ready.known is None else ready.known.order
        sums = np.zeros(own.size, dtype=np.uint64)
        sums[shared] = shard_totals([ready.prepared.tensors[number] for number in order[shared]], in_usual_threads)
        return sums

    return gather(world, "save: compare replicas", own_sums) if comparison.replicas else []


def _check_replicas(columns: ShardColumns, sums: Sequence[Sums]) -> None:
    problems = replica_problems(columns, np.concatenate(sums)) if sums else ()
    if problems:
        fix = "If each rank has a part of the tensor, cut it in its spec; else copy the main replica to the others."
        raise IntegrityError(error_text("save: replicas differ", offenders=problems, fix=fix))


def _checked_columns(ready: Ready, told: Sequence[Told], comparison: Comparison) -> ShardColumns:
    descriptions = [each.description for each in told if each.description is not None]
    return check_together("save", descriptions, ready.known, tiling=comparison.common is not None)


def shares(
    world: World, ready: Ready, told: Sequence[Told], comparison: Comparison, sums: Sequence[Sums]
) -> tuple[Writes, ShardColumns | None]:
    """Return what this rank writes, and all ranks' shards where it knows them.

    Args:
        world: who saves together.
        ready: what this rank knows by itself.
        told: what each rank told the others, by rank.
        comparison: what ranks compare.
        sums: as `replica_sums` returned them.

    Raises:
        IntegrityError: shards or objects don't fit together, or replicas differ.
    """
    prepared = ready.prepared
    objects = tuple(item for item in prepared.objects if is_main_replica(item.replica_id))
    if not comparison.layouts:
        tensors = tuple(shard for shard in prepared.tensors if is_main_replica(shard.replica_id))
        return (tensors, objects), shard_columns(prepared.tensors) if world.size == 1 else None
    columns = _checked_columns(ready, told, comparison)
    _check_replicas(columns, sums)
    return (_own_tensors(prepared, ready.known, columns, world), objects), columns


def _own_tensors(
    prepared: Prepared, known: KnownLayout | None, columns: ShardColumns, world: World
) -> tuple[ShardedTensor, ...]:
    own = np.flatnonzero(columns.rank == world.rank)
    writes = level_writes(columns, world.size)[own]
    chosen = np.flatnonzero(writes) if known is None else np.sort(known.order[writes])
    return tuple(prepared.tensors[number] for number in chosen.tolist())
