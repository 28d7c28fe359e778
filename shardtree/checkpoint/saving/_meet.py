"""Steps 2 to 4 of a save: ranks meet, compare what they hold, and share out who writes what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codec import decode_tree, encode_tree
from ...errors import IntegrityError, error_text
from ...fingerprints import replica_problems, shard_totals
from ...layouts import ShardColumns, shard_columns
from ...mapping import is_main_replica
from ...plans import held_places, level_writes
from ...storage import Directory, Storage, storage_at
from ...strategies import PendingSave
from ...trees import comparable
from ...world import agree, gather, share, step
from .._consistency import Description, KnownLayout, check_common, check_together, common_digest, describe, known_layout
from .._dispatch import Backends, backends_of
from .._fingerprint import check_can_hold, in_usual_threads
from ..async_saves import refuse_overlap
from ._commit import Writes
from ._parts import TreeParts
from ._start import SaveCall, SaveStart, begin, start_of

Sums = NDArray[np.uint64]
"""What shards add to their tensors' fingerprints, uint64 (shards,)."""

_STEPS = (
    "save: prepare",
    "save: find the format",
    "save: find the folder",
    "save: look at the folder",
    "save: make the folder",
)


Message = tuple[Description | None, SaveStart | None]
"""What a rank sends the others: its shards, None where ranks don't compare them; where the save goes, from rank 0."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalSave:
    """What a rank knows of a save by itself.

    Attributes:
        parts: its tree, taken apart.
        known: all ranks' shards, where the caller gave them.
        backends: of the shards and of the common state.
        storage: where to.
        description: of its shards, None where ranks don't compare them.
        pending: the save that rank 0 began; there alone.
    """

    parts: TreeParts
    known: KnownLayout | None
    backends: Backends
    storage: Storage
    description: Description | None
    pending: PendingSave | None


def meet(
    call: SaveCall, parts_of: Callable[[], TreeParts], directory: Directory, undo: ExitStack
) -> tuple[LocalSave, list[Message]]:
    """Return what a rank knows by itself, and each rank's message, by rank; one all-gather.

    Args:
        call: the call of `save`.
        parts_of: takes this rank's tree apart.
        directory: where to.
        undo: gets a callback that removes the folder that rank 0 makes.
    """

    def alone() -> LocalSave:
        parts, known = step("save: prepare", matched_parts)
        backends = step("save: find the format", partial(_backends, call, directory))
        storage = step("save: find the folder", partial(storage_at, directory))
        description = _describe(call, parts, known) if call.describes else None
        # Last: of the steps that can fail before ranks meet, only this one changes anything on the storage.
        pending = begin(call, storage, backends, undo) if call.world.rank == 0 else None
        return LocalSave(parts, known, backends, storage, description, pending)

    def matched_parts() -> tuple[TreeParts, KnownLayout | None]:
        parts = parts_of()
        return parts, known_layout("save", call.layout, parts.tensors, call.world.rank, call.world.size)

    # Two names for the phase, so that a mix of ranks that compare and ranks that don't is an error that says so.
    return share(
        call.world, "save: describe shards" if call.describes else "save: get ready", alone, _message, steps=_STEPS
    )


def _message(local: LocalSave) -> Message:
    return local.description, None if local.pending is None else start_of(local.pending)


def _backends(call: SaveCall, directory: Directory) -> Backends:
    refuse_overlap(directory, call.world.rank)
    backends = backends_of(*call.choices, call.strategies)
    if call.options.fingerprint:
        check_can_hold(backends[0][0], whole=call.tiling)
    return backends


def _describe(call: SaveCall, parts: TreeParts, known: KnownLayout | None) -> Description:
    hashed = common_digest(_compared(call, parts), allow_pickle=call.options.allow_pickle)
    return describe(parts.tensors, parts.objects, call.world.rank, hashed, known)


def _compared(call: SaveCall, parts: TreeParts) -> Any:
    """Return what must be the same on all ranks."""
    # `comparable` drops empty containers: a list of shards is empty on a rank that holds none of them.
    return call.common_view(comparable(parts.common)) if call.tiling else None


def compare_common(call: SaveCall, local: LocalSave, messages: Sequence[Message]) -> None:
    """Raise where ranks' common states differ, with what the difference is; two all-gathers where they do, else none.

    Args:
        call: the call of `save`.
        local: what this rank knows by itself.
        messages: each rank's, by rank.

    Raises:
        IntegrityError: common states differ.
    """
    if len({description.common for description, _ in messages if description is not None}) < 2:
        return
    # Hashes were compared first; whole states travel only in this case, to name what differs.
    allow_pickle = call.options.allow_pickle
    # Encoded, not pickled: ranks may hold instances of classes that others can't import.
    encode = partial(encode_tree, allow_pickle=allow_pickle)
    encoded = gather(call.world, "save: compare common states", lambda: encode(_compared(call, local.parts)))
    decode = partial(decode_tree, allow_pickle=allow_pickle)
    agree(call.world, "save: check common states", lambda: check_common([decode(data) for data in encoded]))


def sum_replicas(call: SaveCall, local: LocalSave, messages: Sequence[Message]) -> list[Sums]:
    """Return what each rank's shards add to their tensors' fingerprints; one all-gather with `check_replicas`.

    Args:
        call: the call of `save`.
        local: what this rank knows by itself.
        messages: each rank's, by rank.

    Returns:
        By rank, in the order of all ranks' columns, 0 for a shard that no other rank has; nothing where replicas
        aren't compared.

    Raises:
        IntegrityError: shards don't fit together.
    """
    if not call.options.check_replicas:
        return []

    def own_sums() -> Sums:
        columns = _checked_columns(call, local, messages)
        own = np.flatnonzero(columns.rank == call.world.rank)
        place, places = held_places(columns)
        # A shard that no other rank holds has nothing to be compared with: no pass over its memory.
        shared = np.flatnonzero(np.bincount(place, minlength=places)[place[own]] > 1)
        order = np.arange(own.size) if local.known is None else local.known.order
        sums = np.zeros(own.size, dtype=np.uint64)
        sums[shared] = shard_totals([local.parts.tensors[number] for number in order[shared]], in_usual_threads)
        return sums

    return gather(call.world, "save: compare replicas", own_sums)


def share_out(
    call: SaveCall, local: LocalSave, messages: Sequence[Message], sums: Sequence[Sums]
) -> tuple[Writes, ShardColumns | None]:
    """Return what this rank writes, and all ranks' shards if it has them.

    Args:
        call: the call of `save`.
        local: what this rank knows by itself.
        messages: each rank's, by rank.
        sums: as `sum_replicas` returned them.

    Raises:
        IntegrityError: shards or objects don't fit together, or replicas differ.
    """
    parts = local.parts
    objects = tuple(item for item in parts.objects if is_main_replica(item.replica_id))
    tensors = tuple(shard for shard in parts.tensors if is_main_replica(shard.replica_id))
    if not call.describes:
        return (tensors, objects), shard_columns(parts.tensors) if call.world.size == 1 else None
    columns = _checked_columns(call, local, messages)
    problems = replica_problems(columns, np.concatenate(sums)) if sums else ()
    if problems:
        fix = "If each rank has a part of the tensor, cut it in its spec; else copy the main replica to the others."
        raise IntegrityError(error_text("save: replicas differ", offenders=problems, fix=fix))
    if call.tiling and call.world.size == 1:  # each main replica is the only one, and no other rank could write it
        return (tensors, objects), columns
    own = np.flatnonzero(columns.rank == call.world.rank)
    # Each rank computes all ranks' shares alike, from the same columns, so that no further exchange is needed.
    writes = level_writes(columns, call.world.size)[own]
    chosen = np.flatnonzero(writes) if local.known is None else np.sort(local.known.order[writes])
    return (tuple(parts.tensors[number] for number in chosen.tolist()), objects), columns


def _checked_columns(call: SaveCall, local: LocalSave, messages: Sequence[Message]) -> ShardColumns:
    descriptions = [description for description, _ in messages if description is not None]
    return check_together("save", descriptions, local.known, tiling=call.tiling)
