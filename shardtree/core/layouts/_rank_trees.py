"""Trees of several ranks, by rank, and their tensor shards as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ...errors import TreeError, error_text
from ..geometry import as_int
from ..mapping import ShardedTensor
from ..trees import apply_factories, build_factories, leaves_with_paths, refuse_hidden, unwrap
from ._columns import ShardColumns, shard_columns
from ._integrity import join_columns

RankTrees: TypeAlias = Sequence[Any] | Mapping[int, Any]
"""The tree of each rank: a sequence that begins with rank 0's, or a mapping by rank."""


def tree_columns(trees: RankTrees) -> ShardColumns:
    """Return the tensor shards of several ranks' trees, factories applied, as columns.

    Args:
        trees: Tree of each rank: a mapping by rank, or a sequence that begins with rank 0. A rank's rows are in the
            order of its tree's leaves.

    Raises:
        TreeError: There is no tree, or a single tree instead of one for each rank; or a leaf is a DTensor.
        IntegrityError: Shards of one key differ in global shape, dtype or prepended axes.

    Examples:
        >>> import torch
        >>> trees = [{"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, rank, 2))} for rank in range(2)]
        >>> columns = tree_columns(trees)
        >>> columns.rank.tolist(), columns.offset.tolist()
        ([0, 1], [[0], [2]])
    """
    built = {rank: build_factories(tree, is_target=True)[0] for rank, tree in trees_by_rank(trees).items()}
    return join_columns([shard_columns(tensor_shards(tree), rank) for rank, tree in built.items()])


def trees_by_rank(trees: RankTrees, doing: str = "trees by rank") -> dict[int, Any]:
    """Return the ranks' trees in a dict by rank, ascending.

    Args:
        trees: Tree of each rank.
        doing: Name of the operation, for the message.

    Raises:
        TreeError: There is no tree, or a single tree instead of one for each rank.

    Examples:
        >>> trees_by_rank([{"step": 3}, {"step": 4}])
        {0: {'step': 3}, 1: {'step': 4}}
    """
    heading = f"{doing}: not a list or dict of the ranks' trees"
    fix = "Pass a list that begins with rank 0's tree, or a dict from ranks to trees; for a single tree, [tree]."
    if not isinstance(trees, (list, tuple, Mapping)) or not trees:
        found = "no tree" if isinstance(trees, (list, tuple, Mapping)) else type(trees).__name__
        raise TreeError(error_text(heading, found=found, fix=fix))
    by_rank = trees if isinstance(trees, Mapping) else dict(enumerate(trees))
    wrong = [repr(rank)[:100] for rank in by_rank if not _is_rank(rank)]
    if wrong:
        raise TreeError(error_text(f"{heading}; these keys are not ranks", offenders=wrong, fix=fix))
    return {int(rank): by_rank[rank] for rank in sorted(by_rank)}


def _is_rank(rank: Any) -> bool:
    number = as_int(rank)
    return number is not None and number >= 0


def tensor_shards(tree: Any) -> list[ShardedTensor]:
    """Return a tree's tensor shards, factories applied, in the order of its leaves.

    Raises:
        TreeError: A leaf is a DTensor, which is a part of a tensor and would count as a plain value.

    Examples:
        >>> import torch
        >>> tensor_shards({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2)), "step": 3})[0].key
        'w'
    """
    pairs = leaves_with_paths(apply_factories(unwrap(tree)))
    refuse_hidden("layout", pairs)
    return [leaf for _, leaf in pairs if isinstance(leaf, ShardedTensor)]
