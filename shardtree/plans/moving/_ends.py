"""The trees at a reshard's two ends: what a rank gives and what it wants, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...errors import CheckpointingException, IntegrityError, TreePath, error_text, render_path
from ...layouts import common_problems
from ...layouts.objects import own_copy
from ...mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from ...mapping.memory import check_unchanged, given_tensor
from ...trees import (
    HOLE,
    apply_factories,
    build_factories,
    check_is_tree,
    common_with_holes,
    comparable,
    join,
    leaves_with_paths,
    map_shards,
    refuse_dtensors,
    refuse_hidden,
    shard_leaves,
    told_of_depth,
    with_data,
)


@dataclass(frozen=True, slots=True, eq=False)
class SourceTree:
    """What a rank gives.

    Attributes:
        tensors: its shards, factories applied, in the order of the tree's leaves.
        objects: its sharded objects, likewise.
        common: everything else, with holes where shards and nonpersistent objects were.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any


@dataclass(frozen=True, slots=True, eq=False)
class TargetTree:
    """What a rank wants, and the way back to a tree.

    Attributes:
        leaves: of the tree with factories applied.
        inner: for each, whether a factory built it.
        rebuild: from new leaves to a tree of the same structure.
        merge: from the joined tree to one with factories that hold their merged tensors.
    """

    leaves: tuple[Any, ...]
    inner: tuple[bool, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    merge: Callable[[Any], Any]

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """The tensor shards, in the order of the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, ShardedTensor))

    @property
    def objects(self) -> tuple[ShardedObject, ...]:
        """The sharded objects, in the order of the leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, ShardedObject))


def take_source(tree: Any, doing: str = "reshard") -> SourceTree:
    """Return what a rank gives, taken apart.

    Args:
        tree: of shards with tensors.
        doing: for messages.

    Raises:
        TreeError: it isn't a tree, or too deep.
        CheckpointingException: a shard has no tensor.
        ShapeError: a shard's tensor was changed since the shard was built.
        UnsupportedValue: a shard is hidden in a value that isn't entered.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> take_source({"w": shard, "step": 3}).common
        {'w': HOLE, 'step': 3}
    """
    check_is_tree(doing, tree)
    with told_of_depth(doing):
        built = apply_factories(tree)
        pairs = leaves_with_paths(built)
    refuse_hidden(doing, pairs)
    refuse_dtensors(doing, pairs)
    shards = [(path, leaf) for path, leaf in pairs if isinstance(leaf, ShardedTensor)]
    _check_tensors(shards, doing)
    objects = tuple(leaf for _, leaf in pairs if isinstance(leaf, ShardedObject))
    return SourceTree(tuple(shard for _, shard in shards), objects, common_with_holes(built))


def _check_tensors(shards: Sequence[tuple[TreePath, ShardedTensor]], doing: str) -> None:
    empty = [f"{shard.key!r} at {render_path(path)}" for path, shard in shards if given_tensor(shard) is None]
    if empty:
        what, fix = f"{doing}: source shards without a tensor", "Give each its tensor; read a lazy one first."
        raise CheckpointingException(error_text(what, offenders=empty, fix=fix))
    for _, shard in shards:
        check_unchanged(doing, shard, shard.data)


def agreed_common(commons: Mapping[int, Any], doing: str = "reshard") -> Any:
    """Return the plain values that all ranks have, with holes where the first one's shards were.

    Args:
        commons: each rank's common tree, by rank; a hole for one that gives nothing.
        doing: for the message.

    Returns:
        A common tree; a hole if no rank gives anything.

    Raises:
        IntegrityError: names every path at which they differ, the ranks and all values.

    Examples:
        >>> agreed_common({4: {"w": HOLE, "step": 3}, 5: {"step": 3}, 6: HOLE})
        {'w': HOLE, 'step': 3}
    """
    told = {rank: common for rank, common in sorted(commons.items()) if common is not HOLE}
    problems = common_problems({rank: comparable(common) for rank, common in told.items()})
    if problems:
        fix = "Wrap what belongs to a rank in a ShardedObject or LocalNonpersistentObject."
        what = f"{doing}: the ranks' plain values differ"
        raise IntegrityError(error_text(what, offenders=map(str, problems), fix=fix))
    return next(iter(told.values()), HOLE)


def take_target(tree: Any, doing: str = "reshard") -> TargetTree:
    """Return what a rank wants, taken apart.

    Args:
        tree: of shards, with tensors or without.
        doing: for messages.

    Raises:
        TreeError: it isn't a tree, or too deep.
        UnsupportedValue: a shard is hidden in a value that isn't entered.

    Examples:
        >>> [shard.key for shard in take_target({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}).tensors]
        ['w']
    """
    check_is_tree(doing, tree)
    with told_of_depth(doing):
        factories = {path for path, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensorFactory)}
        built, merge = build_factories(map_shards(_keeping, tree))
        pairs, rebuild = shard_leaves(built)
    refuse_hidden(doing, pairs)
    refuse_dtensors(doing, pairs)
    inner = tuple(any(path[:length] in factories for length in range(len(path) + 1)) for path, _ in pairs)
    return TargetTree(tuple(leaf for _, leaf in pairs), inner, rebuild, merge)


def _keeping(leaf: Any) -> Any:
    """Return a factory that merges to itself with the merged tensor as its data; another leaf as it is."""
    return replace(leaf, merge_fn=partial(_merged, leaf)) if isinstance(leaf, ShardedTensorFactory) else leaf


def _merged(factory: ShardedTensorFactory, loaded: Any) -> ShardedTensorFactory:
    return replace(factory, data=factory.merge_fn(loaded))


def complete(
    target: TargetTree,
    common: Any,
    tensors: Sequence[torch.Tensor],
    objects: Sequence[ShardedObject],
    doing: str = "reshard",
) -> Any:
    """Return the tree that a rank gets: its target with data, joined by own copies of the plain values.

    Args:
        target: what it wants.
        common: the plain values that all source ranks have; a hole if there are none.
        tensors: for each of `target.tensors`.
        objects: for each of `target.objects`, the object with data.
        doing: for messages.

    Raises:
        TreeError: the target doesn't fit the common state.
        UnsupportedValue: a plain value can't be copied.

    Examples:
        >>> target = take_target({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))})
        >>> tree = complete(target, {"w": HOLE, "step": 3}, [torch.ones(2)], [])
        >>> tree["w"].data, tree["step"]
        (tensor([1., 1.]), 3)
    """
    data, held = iter(tensors), iter(objects)
    pairs = zip(target.leaves, target.inner, strict=True)
    tree = target.rebuild([_filled(leaf, data, held, inner=inner) for leaf, inner in pairs])
    own = HOLE if common is HOLE else own_copy(common, f"{doing}: a plain value")
    with told_of_depth(doing):
        return target.merge(join(own, tree))


def _filled(leaf: Any, data: Iterator[torch.Tensor], held: Iterator[ShardedObject], *, inner: bool) -> Any:
    """Return what stands in a leaf's place: what `load` puts there for a factory to merge, else the leaf with data."""
    if isinstance(leaf, ShardedTensor):
        return next(data) if inner else with_data(leaf, next(data))
    if isinstance(leaf, ShardedObject):
        return LocalNonpersistentObject(next(held).data) if inner else next(held)
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf if inner else LocalNonpersistentObject(leaf)  # joining unwraps once
    return HOLE
