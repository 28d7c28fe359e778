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
    """A rank's source and target.

    Attributes:
        source: what it gives; without one, an empty source whose common state is a hole.
        target: what it wants; None without one.
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
    """Return a rank's trees, flattened.

    Args:
        tree: its source; None or an empty tree for a rank without one.
        target: its target; None for a rank without one.
        donate: whether the target's tensors are given away.

    Raises:
        CheckpointingException: as `take_source` and `take_target`.

    Examples:
        >>> ends = take_ends({}, None)
        >>> ends.source.common, ends.target
        (HOLE, None)
    """
    # An engine beside trainers has no state, and mustn't be asked for plain values that equal theirs.
    gives_nothing = tree is None or (isinstance(tree, (dict, list, tuple)) and not tree)
    source = SourceTree((), (), HOLE) if gives_nothing else take_source(tree, DOING)
    own_target = None if target is None else take_target(target, DOING, donate=donate)
    if donate and own_target is not None and any(own_target.inner):
        refuse_read_only(DOING, held_tensors(target))
    return Ends(source, own_target)


def device_of_tensors(ends: Ends) -> torch.device | None:
    """Return the device that all tensors of a rank are on, or will be: the CPU where they differ, None without any.

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
    """Raise unless a rank's target fits the common state: checked before tensors move.

    Raises:
        TreeError: it doesn't, or a plain tensor of it is no plain value of the sources.
    """
    if ends.target is None:
        return
    kinds = (ShardedTensor, ShardedObject, LocalNonpersistentObject)  # that get their data
    leaves = [leaf if isinstance(leaf, kinds) else HOLE for leaf in ends.target.leaves]
    with refuse_too_deep(DOING):
        join_filled(common, ends.target.rebuild(leaves), ends.target.plain, DOING)


def joined_target(ends: Ends, common: Any, tensors: Sequence[torch.Tensor], objects: Sequence[ShardedObject]) -> Any:
    """Return a rank's result.

    Args:
        ends: the rank's trees.
        common: the sources' common state.
        tensors: for each target shard.
        objects: for each target object.

    Raises:
        Exception: what a factory's merge raises.
    """
    return None if ends.target is None else complete(ends.target, common, tensors, objects, DOING)


_ALIGNMENT = 16  # bytes: the beginning of a buffer is aligned for elements of any dtype


Empty = Callable[..., torch.Tensor]
"""Makes a tensor that will be filled, called as ``empty(shape, dtype=..., device=...)``."""


def target_memories(
    shards: Sequence[ShardedTensor], sources: Sequence[ShardedTensor], *, donate: bool, empty: Empty = torch.empty
) -> list[torch.Tensor]:
    """Return the tensors to be filled: donated ones, or new ones on the same devices, for tied ones too.

    Args:
        shards: of the target.
        sources: this rank's source shards with data, which mustn't be written; they may alias each other.
        donate: whether shards' own tensors are filled.
        empty: makes new ones.

    Raises:
        ShapeError: a donated tensor isn't the shard's any more, can't be written, or shares memory with another.
        CheckpointingException: there is no memory.
    """
    tensors = [given_tensor(shard) for shard in shards]
    if not donate:
        return [_new(shard, data, empty) for shard, data in zip(shards, tensors, strict=True)]
    donations = [(shard, data) for shard, data in zip(shards, tensors, strict=True) if data is not None]
    for shard, data in donations:
        check_unchanged(DOING, shard, data)
        check_writable(DOING, shard, data)
        if data.is_conj() or data.is_neg():
            fix = "Donate .resolve_conj().resolve_neg() of it."
            raise ShapeError(error_text(f"{DOING}: the donated tensor of {shard.key!r} is a lazy conjugate", fix=fix))
    # Sources are read while targets are filled: an alias would be overwritten before it was sent.
    read = [(shard, shard.data) for shard in sources if shard.data.layout is torch.strided]
    check_no_aliases(DOING, donations, read)
    refuse_read_only(DOING, ((shard.key, data) for shard, data in donations))
    apart = {number for group in tied(list(zip(shards, tensors, strict=True))) for number in group}
    pairs = enumerate(zip(shards, tensors, strict=True))
    return [_new(shard, data, empty) if data is None or number in apart else data for number, (shard, data) in pairs]


def donated_once(shards: Sequence[ShardedTensor], memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return donated targets' tensors, with tied ones filled once.

    Args:
        shards: of the target.
        memories: the tensors of `target_memories`, with what came for them.

    Raises:
        ShapeError: what came for several keys of one memory differs.
    """
    once = fill_once(DOING, [(shard, given_tensor(shard)) for shard in shards], memories)
    return [once.get(number, data) for number, data in enumerate(memories)]


def _new(shard: ShardedTensor, like: torch.Tensor | None, empty: Empty) -> torch.Tensor:
    try:
        return empty(shard.data_shape, dtype=shard.dtype, device="cpu" if like is None else like.device)
    except RuntimeError as error:
        # torch raises a plain RuntimeError for this on the CPU.
        size = f"{shard.data_shape} {shard.dtype}"
        raise CheckpointingException(error_text(f"{DOING}: no memory for {shard.key!r}", found=size)) from error


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Memory for what a rank sends and receives in one step, reused in the next.

    Attributes:
        memory: uint8 (bytes,).
    """

    memory: torch.Tensor

    def cut(self, *sizes: Mapping[int, int]) -> list[dict[int, torch.Tensor]]:
        """Return buffers of the given sizes, by peer, none of which overlap."""
        messages: list[dict[int, torch.Tensor]] = []
        begin = 0
        for each in sizes:
            messages.append({})
            for peer, size in each.items():
                messages[-1][peer] = self.memory[begin : begin + size]
                begin += -(-size // _ALIGNMENT) * _ALIGNMENT
        return messages


def make_buffers(
    schedule: Schedule, rank: int, device: torch.device | str, empty: Empty = torch.empty, doing: str = DOING
) -> Buffers:
    """Return buffers large enough for each step.

    Args:
        schedule: what moves when.
        rank: whose buffers.
        device: where they are.
        empty: makes them.
        doing: for the message.

    Raises:
        CheckpointingException: there is no memory.
    """
    size = largest_step(schedule, rank)
    try:
        return Buffers(empty((size,), dtype=torch.uint8, device=device))
    except (RuntimeError, AssertionError) as error:  # the second: torch was built without that kind of device
        need, fix = f"{size} bytes on {device}", "Let fewer bytes be in flight: max_bytes_in_flight."
        raise CheckpointingException(error_text(f"{doing}: no memory for buffers", found=need, fix=fix)) from error


def largest_step(schedule: Schedule, rank: int) -> int:
    """Return how many bytes of buffers a rank needs in the step in which it needs most."""
    out, into = schedule.from_rank == rank, schedule.to_rank == rank
    rows = np.flatnonzero(out | into)
    if not rows.size:
        return 0
    peer = np.where(out, schedule.to_rank, schedule.from_rank)[rows]
    place: Column = np.column_stack([schedule.step[rows], out[rows], peer])
    # First pieces are summed to buffers, since each buffer is aligned, then buffers to steps.
    one, number = np.unique(place, axis=0, return_inverse=True)
    size = np.bincount(number.ravel(), weights=schedule.nbytes[rows]).astype(np.int64)
    return int(np.bincount(one[:, 0], weights=-(-size // _ALIGNMENT) * _ALIGNMENT).max())
