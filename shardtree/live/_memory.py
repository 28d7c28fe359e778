"""The memory of a redistribution: source tensors, target tensors, and the buffers of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.geometry import Column
from ..core.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, given_tensor
from ..core.mapping.memory import (
    check_no_aliases,
    check_unchanged,
    check_writable,
    fill_once,
    refuse_read_only,
    tied,
)
from ..core.trees import HOLE, held_tensors, refuse_too_deep
from ..errors import CheckpointingException, ShapeError, error_text
from .resharding import Schedule
from .resharding._in_memory import SourceTree, TargetTree, complete, join_filled, take_source, take_target

# A rank's source and target trees, either of which may be missing.

DOING = "redistribute"


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """A rank's source and target trees, flattened.

    Attributes:
        source: The source tree; if the rank has none, an empty tree with the common state `HOLE` (no value).
        target: The target tree; None if the rank has no target.
    """

    source: SourceTree
    target: TargetTree | None

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """The target's shards."""
        return () if self.target is None else self.target.tensors

    @property
    def objects(self) -> tuple[ShardedObject, ...]:
        """The target's objects."""
        return () if self.target is None else self.target.objects


def take_ends(tree: Any, target: Any, *, donate: bool = False) -> Ends:
    """Return a rank's source and target trees, flattened.

    Args:
        tree: Source tree of the rank; None or an empty tree if it has no source.
        target: Target tree of the rank; None if it has none.
        donate: Whether the target's tensors are donated.

    Raises:
        CheckpointingException: The errors of `take_source` and `take_target`.

    Examples:
        >>> ends = take_ends({}, None)
        >>> ends.source.common, ends.target
        (HOLE, None)
    """
    # An engine beside trainers has no state, so its plain values aren't required to equal theirs.
    gives_nothing = tree is None or (isinstance(tree, (dict, list, tuple)) and not tree)
    source = SourceTree((), (), HOLE) if gives_nothing else take_source(tree, DOING)
    own_target = None if target is None else take_target(target, DOING, donate=donate)
    if donate and own_target is not None and any(own_target.inner):
        refuse_read_only(DOING, held_tensors(target))
    return Ends(source, own_target)


def device_of_tensors(ends: Ends) -> torch.device | None:
    """Return the common device of a rank's tensors: the CPU if they are on several devices, None without tensors.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> device_of_tensors(take_ends([shard], None)), device_of_tensors(take_ends({}, None))
        (device(type='cpu'), None)
    """
    sources = [shard.data for shard in ends.source.tensors]
    targets = [given_tensor(shard) for shard in ends.tensors]
    devices = {torch.device("cpu") if data is None else data.device for data in (*sources, *targets)}
    return devices.pop() if len(devices) == 1 else torch.device("cpu") if devices else None


def check_joins(ends: Ends, common: Any) -> None:
    """Raise an error unless a rank's target can be joined with the common state; called before tensors move.

    Raises:
        TreeError: The target's structure differs from the common state's, or the target has a plain tensor (not a
            shard) that the common state lacks.
    """
    if ends.target is None:
        return
    kinds = (ShardedTensor, ShardedObject, LocalNonpersistentObject)  # leaves whose data arrives later
    leaves = [leaf if isinstance(leaf, kinds) else HOLE for leaf in ends.target.leaves]
    with refuse_too_deep(DOING):
        join_filled(common, ends.target.rebuild(leaves), ends.target.plain, DOING)


def joined_target(ends: Ends, common: Any, tensors: Sequence[torch.Tensor], objects: Sequence[ShardedObject]) -> Any:
    """Return the result of a rank: its target tree with data, joined with the common state.

    Args:
        ends: The rank's trees.
        common: Common state of the sources.
        tensors: Filled tensors, one for each target shard.
        objects: The target's objects with their data.

    Raises:
        Exception: An error of a factory's merge function.
    """
    return None if ends.target is None else complete(ends.target, common, tensors, objects, DOING)


_ALIGNMENT = 16  # bytes: the beginning of a buffer is aligned for elements of any dtype


Empty = Callable[..., torch.Tensor]
"""Allocator of a tensor that will be filled, called as ``empty(shape, dtype=..., device=...)``."""


def target_memories(
    shards: Sequence[ShardedTensor], sources: Sequence[ShardedTensor], *, donate: bool, empty: Empty = torch.empty
) -> list[torch.Tensor]:
    """Return a tensor to be filled for each target shard.

    It is the shard's own tensor if that is donated and not tied to another shard's, else a new tensor on its device.

    Args:
        shards: Shards of the target.
        sources: Source shards of this rank, with data; they may alias each other and aren't written.
        donate: Whether the target shards' own tensors are filled.
        empty: Allocator of new tensors.

    Raises:
        ShapeError: A donated tensor no longer fits its shard, isn't writable, or shares memory with another.
        CheckpointingException: Memory can't be allocated.
    """
    tensors = [given_tensor(shard) for shard in shards]
    if not donate:
        return [_new(shard, data, empty) for shard, data in zip(shards, tensors, strict=True)]
    donations = [(shard, data) for shard, data in zip(shards, tensors, strict=True) if data is not None]
    for shard, data in donations:
        check_unchanged(DOING, shard, data)
        check_writable(DOING, shard, data)
        if data.is_conj() or data.is_neg():
            fix = "Donate its .resolve_conj().resolve_neg()."
            raise ShapeError(error_text(f"{DOING}: the donated tensor of {shard.key!r} is a lazy conjugate", fix=fix))
    # Sources are read while targets are filled: an alias would be overwritten before it was sent.
    read = [(shard, shard.data) for shard in sources if shard.data.layout is torch.strided]
    check_no_aliases(DOING, donations, read)
    refuse_read_only(DOING, ((shard.key, data) for shard, data in donations))
    apart = {number for group in tied(list(zip(shards, tensors, strict=True))) for number in group}
    pairs = enumerate(zip(shards, tensors, strict=True))
    return [_new(shard, data, empty) if data is None or number in apart else data for number, (shard, data) in pairs]


def donated_once(shards: Sequence[ShardedTensor], memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor with the received values for each shard of a donated target.

    Tied shards share one donated tensor, but received their values in separate memories. If these are equal, they are
    copied into the shared tensor here.

    Args:
        shards: Shards of the target.
        memories: Results of `target_memories`, after they were filled.

    Raises:
        ShapeError: Several keys share one memory, and different data arrived for them.
    """
    once = fill_once(DOING, [(shard, given_tensor(shard)) for shard in shards], memories)
    return [once.get(number, data) for number, data in enumerate(memories)]


def _new(shard: ShardedTensor, like: torch.Tensor | None, empty: Empty) -> torch.Tensor:
    try:
        return empty(shard.data_shape, dtype=shard.dtype, device="cpu" if like is None else like.device)
    except RuntimeError as error:
        # torch raises a plain RuntimeError on the CPU if memory can't be allocated.
        size = f"{shard.data_shape} {shard.dtype}"
        raise CheckpointingException(error_text(f"{DOING}: no memory for {shard.key!r}", found=size)) from error


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Memory for the messages of a rank in one step, reused in the next.

    Attributes:
        memory: Contiguous bytes, uint8 (bytes,).
    """

    memory: torch.Tensor

    def cut(self, *sizes: Mapping[int, int]) -> list[dict[int, torch.Tensor]]:
        """Return non-overlapping buffers: for each dict of sizes in bytes by peer rank, a dict of buffers by peer."""
        messages: list[dict[int, torch.Tensor]] = []
        begin = 0
        for sizes_by_peer in sizes:
            messages.append({})
            for peer, size in sizes_by_peer.items():
                messages[-1][peer] = self.memory[begin : begin + size]
                begin += -(-size // _ALIGNMENT) * _ALIGNMENT
        return messages


def make_buffers(
    schedule: Schedule, rank: int, device: torch.device | str, empty: Empty = torch.empty, doing: str = DOING
) -> Buffers:
    """Return memory that is large enough for a rank's messages in each step of a schedule.

    Args:
        schedule: Schedule of the plan.
        rank: Rank that owns the buffers.
        device: Device of the buffers.
        empty: Allocator of the buffers.
        doing: Name of the operation in error messages.

    Raises:
        CheckpointingException: Memory can't be allocated.
    """
    size = largest_step(schedule, rank)
    try:
        return Buffers(empty((size,), dtype=torch.uint8, device=device))
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without the device
        heading = f"{doing}: cannot allocate buffers of {size} bytes on {device}"
        fix = "If memory is short, free some; for `redistribute`, a smaller max_bytes_in_flight= also helps."
        raise CheckpointingException(error_text(heading, found=error, fix=fix)) from error


def largest_step(schedule: Schedule, rank: int) -> int:
    """Return the bytes that a rank's messages need in the step with the largest total, alignment included."""
    out, into = schedule.from_rank == rank, schedule.to_rank == rank
    rows = np.flatnonzero(out | into)
    if not rows.size:
        return 0
    peer = np.where(out, schedule.to_rank, schedule.from_rank)[rows]
    place: Column = np.column_stack([schedule.step[rows], out[rows], peer])
    # Pieces are summed to buffers first, since each buffer is aligned; then buffers are summed to steps.
    buffer, number = np.unique(place, axis=0, return_inverse=True)
    size = np.bincount(number.ravel(), weights=schedule.nbytes[rows]).astype(np.int64)
    return int(np.bincount(buffer[:, 0], weights=-(-size // _ALIGNMENT) * _ALIGNMENT).max())
