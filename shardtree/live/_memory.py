"""The memory of a redistribution: what is read, what is filled, and the buffers of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointingException, ShapeError, error_text
from ..geometry import Column
from ..mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ..mapping.memory import check_apart, check_unchanged, check_writable, given_tensor
from ..plans import Schedule
from ..plans.moving import SourceTree, TargetTree, complete, take_source, take_target
from ..trees import HOLE, join, told_of_depth

# A rank's two ends of a redistribution: what it gives and what it wants, either of which may be nothing.

DOING = "redistribute"


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """What a rank gives and wants.

    Attributes:
        given: its source; the common state of one that gives nothing is a hole.
        wanted: its target; None if it only gives.
    """

    given: SourceTree
    wanted: TargetTree | None

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """The shards that it wants."""
        return () if self.wanted is None else self.wanted.tensors

    @property
    def objects(self) -> tuple[ShardedObject, ...]:
        """The objects that it wants."""
        return () if self.wanted is None else self.wanted.objects


def take_ends(tree: Any, target: Any) -> Ends:
    """Return a rank's trees taken apart.

    Args:
        tree: what it gives; None or an empty tree, if nothing.
        target: what it wants; None, if nothing.

    Raises:
        CheckpointingException: as `take_source` and `take_target`.

    Examples:
        >>> ends = take_ends({}, None)
        >>> ends.given.common, ends.wanted
        (HOLE, None)
    """
    gives_nothing = tree is None or (isinstance(tree, (dict, list, tuple)) and not tree)
    given = SourceTree((), (), HOLE) if gives_nothing else take_source(tree, DOING)
    return Ends(given, None if target is None else take_target(target, DOING))


def check_joins(ends: Ends, common: Any) -> None:
    """Raise unless what a rank wants fits the common state: found out before a byte moves.

    Raises:
        TreeError: it doesn't.
    """
    if ends.wanted is None:
        return
    filled = (ShardedTensor, ShardedObject, LocalNonpersistentObject)
    leaves = [leaf if isinstance(leaf, filled) else HOLE for leaf in ends.wanted.leaves]
    with told_of_depth(DOING):
        join(common, ends.wanted.rebuild(leaves))


def finished(ends: Ends, common: Any, tensors: Sequence[torch.Tensor], objects: Sequence[ShardedObject]) -> Any:
    """Return the tree that a rank gets.

    Args:
        ends: what it wants.
        common: the sources' common state.
        tensors: for each shard that it wants.
        objects: for each object.

    Raises:
        Exception: what a factory's merge raises.
    """
    return None if ends.wanted is None else complete(ends.wanted, common, tensors, objects, DOING)


_ALIGNMENT = 16  # bytes: an element of any dtype may stand at a buffer's beginning


Empty = Callable[..., torch.Tensor]
"""Makes a tensor that will be filled, called as ``empty(shape, dtype=..., device=...)``."""


def target_memories(
    shards: Sequence[ShardedTensor], sources: Sequence[ShardedTensor], *, donate: bool, empty: Empty = torch.empty
) -> list[torch.Tensor]:
    """Return the tensors to be filled: shards' own where they are given away, else new ones on the same devices.

    Args:
        shards: what is wanted.
        sources: what this rank gives, with data, which mustn't be written; they may share memory with each other.
        donate: whether shards' own tensors are filled.
        empty: makes new ones.

    Raises:
        ShapeError: a donated tensor isn't the shard's any more, can't be written, or shares memory with another.
        CheckpointingException: there is no memory.
    """
    given = [given_tensor(shard) for shard in shards]
    if not donate:
        return [_new(shard, data, empty) for shard, data in zip(shards, given, strict=True)]
    donated = [(shard, data) for shard, data in zip(shards, given, strict=True) if data is not None]
    for shard, data in donated:
        check_unchanged(DOING, shard, data)
        check_writable(DOING, shard, data)
        if data.is_conj() or data.is_neg():
            fix = "Donate .resolve_conj().resolve_neg() of it."
            raise ShapeError(error_text(f"{DOING}: the donated tensor of {shard.key!r} is a lazy conjugate", fix=fix))
    read = [(shard, shard.data) for shard in sources if shard.data.layout is torch.strided]
    check_apart(DOING, donated, read)
    return [_new(shard, None, empty) if data is None else data for shard, data in zip(shards, given, strict=True)]


def _new(shard: ShardedTensor, like: torch.Tensor | None, empty: Empty) -> torch.Tensor:
    try:
        return empty(shard.data_shape, dtype=shard.dtype, device="cpu" if like is None else like.device)
    except RuntimeError as error:
        # torch has no error of its own for this.
        found = f"{shard.data_shape} {shard.dtype}"
        raise CheckpointingException(error_text(f"{DOING}: no memory for {shard.key!r}", found=found)) from error


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Room for what a rank sends and gets in one step, reused in the next.

    Attributes:
        memory: uint8 (bytes,).
    """

    memory: torch.Tensor

    def cut(self, *sizes: Mapping[int, int]) -> list[dict[int, torch.Tensor]]:
        """Return buffers of the given sizes, by peer, none of which overlap."""
        found: list[dict[int, torch.Tensor]] = []
        begin = 0
        for each in sizes:
            found.append({})
            for peer, size in each.items():
                found[-1][peer] = self.memory[begin : begin + size]
                begin += -(-size // _ALIGNMENT) * _ALIGNMENT
        return found


def make_buffers(schedule: Schedule, rank: int, device: torch.device | str, empty: Empty = torch.empty) -> Buffers:
    """Return buffers for the step in which a rank has most to send and get.

    Args:
        schedule: what moves when.
        rank: whose buffers.
        device: where they are.
        empty: makes them.

    Raises:
        CheckpointingException: there is no memory.
    """
    size = most_room(schedule, rank)
    try:
        return Buffers(empty((size,), dtype=torch.uint8, device=device))
    except RuntimeError as error:
        fix = "Let fewer bytes be in flight: max_bytes_in_flight."
        raise CheckpointingException(
            error_text(f"{DOING}: no memory for buffers", found=f"{size} bytes", fix=fix)
        ) from error


def most_room(schedule: Schedule, rank: int) -> int:
    """Return how many bytes of buffers a rank needs in the step in which it needs most."""
    out, into = schedule.from_rank == rank, schedule.to_rank == rank
    chosen = np.flatnonzero(out | into)
    if not chosen.size:
        return 0
    peer = np.where(out, schedule.to_rank, schedule.from_rank)[chosen]
    place: Column = np.column_stack([schedule.step[chosen], out[chosen], peer])
    # Pieces of one buffer, then buffers of one step.
    one, number = np.unique(place, axis=0, return_inverse=True)
    size = np.bincount(number.ravel(), weights=schedule.nbytes[chosen]).astype(np.int64)
    return int(np.bincount(one[:, 0], weights=-(-size // _ALIGNMENT) * _ALIGNMENT).max())
