"""reshard: trees of all ranks from one layout into another, in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...layouts import RankTrees, ShardColumns, tree_columns, trees_by_rank
from ...layouts.objects import ObjectRule, reshard_objects
from ...mapping import ShardedTensor
from ...mapping.memory import given_tensor
from ...trees import HOLE
from ..resharding import ReshardPlan, plan_reshard
from ._copy import copy_transfers
from ._ends import SourceTree, TargetTree, agreed_common, complete, take_source, take_target


def reshard(
    trees: RankTrees,
    targets: RankTrees,
    *,
    rules: Mapping[str, ObjectRule] | None = None,
    empty: Callable[..., torch.Tensor] = torch.empty,
    cast: bool = False,
) -> Any:
    """Return the targets filled from the trees of all ranks: what saving those and loading these would give.

    Each byte is copied once, straight from the source's tensor into new memory. Nothing that is given is changed, and
    nothing that can change is shared.

    Args:
        trees: each rank's tree, by rank: a mapping, or a list that begins with rank 0. Tensors may be strided in any
            way, on any device. Plain values must be the same on all ranks, but those whose tree is empty.
        targets: likewise the trees that are wanted, on as many ranks as there are then. Shards say what they want;
            their data may be a tensor, whose device the new one gets, or None or a meta tensor: then it gets the
            device of a shard that it comes from. Plain values are ignored, as in `load`.
        rules: what becomes of arrays of objects that change their shape, by patterns of keys; see `reshard_objects`.
        empty: makes a tensor that will be filled, called as `empty(shape, dtype=..., device=...)`: pinned, or shared
            between processes, if it says so.
        cast: whether tensors get the targets' dtypes, as `load` converts them.

    Returns:
        A tree for each rank of the targets, in a container like theirs: the target's structure, shards and factories
        with their data, nonpersistent objects as they are, joined by the plain values.

    Raises:
        TreeError: there is no tree, or a target doesn't fit the plain values.
        IntegrityError: source ranks disagree, targets ask for more than is there, or objects need a rule.
        KeyMismatch: a target asks for a key that isn't there.
        ShapeError: a tensor's global shape differs, or its dtype, and it isn't or can't be cast; or a shard's tensor
            was changed.
        UnsupportedValue: a tensor isn't dense, or quantised, or a plain value or object can't be copied.
        CheckpointingException: a source shard has no tensor.

    Examples:
        >>> whole = torch.arange(12.0).view(4, 3)
        >>> def cut(axis, parts):
        ...     pieces = enumerate(whole.chunk(parts, axis))
        ...     return [{"w": ShardedTensor.from_rank_offsets("w", piece, (axis, n, parts))} for n, piece in pieces]
        >>> columns = reshard(cut(0, 4), cut(1, 3))
        >>> [tree["w"].data.flatten().tolist() for tree in columns]
        [[0.0, 3.0, 6.0, 9.0], [1.0, 4.0, 7.0, 10.0], [2.0, 5.0, 8.0, 11.0]]
    """
    given = {rank: take_source(tree) for rank, tree in trees_by_rank(trees, "reshard").items()}
    wanted = {rank: take_target(tree) for rank, tree in trees_by_rank(targets, "reshard").items()}
    # A rank with an empty tree gives nothing, plain values neither.
    common = agreed_common({rank: one.common or HOLE for rank, one in given.items()})
    plan = plan_reshard(_columns(given), _columns(wanted), cast=cast)
    tensors = iter(_moved(plan, _tensors(given.values()), _tensors(wanted.values()), empty))
    listed = [item for one in wanted.values() for item in one.objects]
    objects = iter(reshard_objects((item for one in given.values() for item in one.objects), listed, rules))
    done = {
        rank: complete(one, common, list(islice(tensors, len(one.tensors))), list(islice(objects, len(one.objects))))
        for rank, one in wanted.items()
    }
    return {rank: done[rank] for rank in targets} if isinstance(targets, Mapping) else list(done.values())


def _columns(trees: Mapping[int, SourceTree | TargetTree]) -> ShardColumns:
    return tree_columns({rank: list(one.tensors) for rank, one in trees.items()})


def _tensors(trees: Iterable[SourceTree | TargetTree]) -> list[ShardedTensor]:
    return [shard for one in trees for shard in one.tensors]


def _moved(
    plan: ReshardPlan,
    sources: Sequence[ShardedTensor],
    targets: Sequence[ShardedTensor],
    empty: Callable[..., torch.Tensor],
) -> list[torch.Tensor]:
    """Return new tensors for the targets, with what the plan moves from the sources."""
    first = first_sources(plan)
    new = []
    for row, shard in enumerate(targets):
        own = given_tensor(shard)
        near = own if own is not None else sources[first[row]].data if row in first else None
        device = torch.device("cpu") if near is None else near.device
        new.append(empty(shard.data_shape, dtype=shard.dtype, device=device))
    held, filled = dict(enumerate(shard.data for shard in sources)), dict(enumerate(new))
    moved = plan.transfers
    # All that comes from one shard in a row: it is still in the processor's cache when other columns of it are read.
    order = np.lexsort((moved.target, moved.source, moved.key))
    for hop in np.unique(moved.hop).tolist():
        copy_transfers(plan, order[moved.hop[order] == hop], held, filled)
    return new


def first_sources(plan: ReshardPlan) -> dict[int, int]:
    """Return, for each target shard that something comes to from a source shard, the row of the first of these."""
    rows = np.flatnonzero(plan.transfers.hop == 0)[::-1]
    return dict(zip(plan.transfers.target[rows].tolist(), plan.transfers.source[rows].tolist(), strict=True))
