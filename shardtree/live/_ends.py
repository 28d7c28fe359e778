"""A rank's two ends of a redistribution: what it gives and what it wants, either of which may be nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from ..plans.moving import SourceTree, TargetTree, complete, take_source, take_target
from ..trees import HOLE, join, told_of_depth

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
