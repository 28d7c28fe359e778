"""reshard: trees of all ranks from one layout into another, in one process's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from ...core.ambient import shielded
from ...core.layouts import (
    ObjectRule,
    RankTrees,
    ShardColumns,
    common_problems,
    own_copy,
    reshard_objects,
    tree_columns,
    trees_by_rank,
)
from ...core.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, given_tensor
from ...core.mapping.memory import check_unchanged
from ...core.trees import (
    HOLE,
    MergeOne,
    apply_factories,
    build_factories,
    check_is_tree,
    common_with_holes,
    comparable,
    factory_of,
    flatten_with_paths,
    is_plain_tensor,
    join,
    leaves_with_paths,
    map_shards,
    merge_anew,
    merge_into_held,
    refuse_hidden,
    refuse_too_deep,
    refuse_without_elements,
    unfilled,
    unwrap,
    with_data,
)
from ...errors import CheckpointingException, IntegrityError, TreeError, TreePath, error_text, render_path
from . import ReshardPlan, copy_transfers, plan_reshard

# The source and target trees of a reshard: flattened into shards and plain values, and rebuilt.


@dataclass(frozen=True, slots=True, eq=False)
class SourceTree:
    """A rank's source tree, flattened.

    Attributes:
        tensors: Shards of the tree with factories applied, in the order of its leaves.
        objects: Sharded objects of the tree, in the order of its leaves.
        common: All other leaves, with holes in place of shards and nonpersistent objects.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any


@dataclass(frozen=True, slots=True, eq=False)
class TargetTree:
    """A rank's target tree, flattened, with the functions that rebuild it.

    Attributes:
        leaves: Leaves of the tree with factories applied.
        inner: Whether each leaf was built by a factory.
        rebuild: Function from new leaves to a tree of the same structure.
        merge: Function that takes the joined tree and puts each factory, with its merged tensor as data, in the place
            of the leaves that it built.
        plain: Path and leaf of each plain tensor among the leaves.
    """

    leaves: tuple[Any, ...]
    inner: tuple[bool, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    merge: Callable[[Any], Any]
    plain: tuple[tuple[TreePath, Any], ...]

    @property
    def tensors(self) -> tuple[ShardedTensor, ...]:
        """Tensor shards of the tree, in the order of its leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, ShardedTensor))

    @property
    def objects(self) -> tuple[ShardedObject, ...]:
        """Sharded objects of the tree, in the order of its leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, ShardedObject))


def take_source(tree: Any, doing: str = "reshard") -> SourceTree:
    """Return a rank's source tree, flattened.

    Args:
        tree: Tree of shards with tensors.
        doing: Name of the operation in error messages.

    Raises:
        TreeError: The argument isn't a tree, or is too deep.
        CheckpointingException: A shard has no tensor.
        ShapeError: A shard's tensor was changed after the shard was built.
        UnsupportedValue: A shard is hidden in a value that tree maps don't enter.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> take_source({"w": shard, "step": 3}).common
        {'w': HOLE, 'step': 3}
    """
    check_is_tree(doing, tree)
    with refuse_too_deep(doing):
        tree = apply_factories(unwrap(tree))
        pairs = leaves_with_paths(tree)
    refuse_hidden(doing, pairs)
    shards = [(path, leaf) for path, leaf in pairs if isinstance(leaf, ShardedTensor)]
    refuse_without_elements(doing, [(path, leaf) for path, leaf in pairs if not isinstance(leaf, ShardedTensor)])
    _check_tensors(shards, doing)
    objects = tuple(leaf for _, leaf in pairs if isinstance(leaf, ShardedObject))
    return SourceTree(tuple(shard for _, shard in shards), objects, common_with_holes(tree))


def _check_tensors(shards: Sequence[tuple[TreePath, ShardedTensor]], doing: str) -> None:
    empty = [f"{shard.key!r} at {render_path(path)}" for path, shard in shards if given_tensor(shard) is None]
    if empty:
        heading, fix = f"{doing}: source shards without a tensor", "Pass each with its tensor; read lazy ones first."
        raise CheckpointingException(error_text(heading, offenders=empty, fix=fix))
    for _, shard in shards:
        check_unchanged(doing, shard, shard.data)


def agreed_common(commons: Mapping[int, Any], doing: str = "reshard") -> Any:
    """Return the plain values that all ranks share, as a tree with `HOLE` (no value) at the first rank's shards.

    Args:
        commons: Plain values of each rank, by rank; `HOLE` for a rank with an empty tree.
        doing: Name of the operation in error messages.

    Returns:
        Tree of plain values; `HOLE` if all ranks' trees are empty.

    Raises:
        IntegrityError: Common trees differ; the error names every such path with the ranks and all values.

    Examples:
        >>> agreed_common({4: {"w": HOLE, "step": 3}, 5: {"step": 3}, 6: HOLE})
        {'w': HOLE, 'step': 3}
    """
    commons = {rank: common for rank, common in sorted(commons.items()) if common is not HOLE}
    # Values are compared as a format would store them: two ranks may hold equal values in different containers.
    problems = common_problems({rank: comparable(common) for rank, common in commons.items()})
    if problems:
        fix = "Wrap a rank's own values in a ShardedObject or LocalNonpersistentObject."
        heading = f"{doing}: the ranks' plain values differ"
        raise IntegrityError(error_text(heading, offenders=map(str, problems), fix=fix))
    return next(iter(commons.values()), HOLE)


def take_target(tree: Any, doing: str = "reshard", *, donate: bool = False) -> TargetTree:
    """Return a rank's target tree, flattened.

    Args:
        tree: Tree of shards, with or without tensors.
        doing: Name of the operation in error messages.
        donate: Whether the tree's tensors, including those of factories, are memory into which the result is written.

    Raises:
        TreeError: The argument isn't a tree, or is too deep.
        UnsupportedValue: A shard is hidden in a value that tree maps don't enter.
        ShapeError: The tensor of a donated factory shares memory with others, or isn't writable.

    Examples:
        >>> [shard.key for shard in take_target({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}).tensors]
        ['w']
    """
    check_is_tree(doing, tree)
    with refuse_too_deep(doing):
        factories = {path for path, leaf in leaves_with_paths(tree) if factory_of(leaf) is not None}
        merge_one = merge_into_held(doing, tree) if donate and factories else merge_anew
        tree, merge = build_factories(map_shards(partial(_keep_factory, merge_one), tree), is_target=True)
        pairs, rebuild = flatten_with_paths(tree)
    refuse_hidden(doing, pairs)
    inner = tuple(any(path[:length] in factories for length in range(len(path) + 1)) for path, _ in pairs)
    plain = tuple((path, leaf) for path, leaf in pairs if is_plain_tensor(leaf))
    return TargetTree(tuple(leaf for _, leaf in pairs), inner, rebuild, merge, plain)


def _keep_factory(merge_one: MergeOne, leaf: Any) -> Any:
    """Return the factory of a leaf, with a merge function that returns the leaf with merged data.

    Args:
        merge_one: Function that merges the parts that a factory built, called with the factory and the parts.
        leaf: Factory, or shard of a tensor subclass that is stored as several tensors; another leaf is unchanged.
    """
    if (factory := factory_of(leaf)) is None:
        return leaf
    return replace(factory, merge_fn=lambda data: replace(leaf, data=merge_one(factory, data)))


def complete(
    target: TargetTree,
    common: Any,
    tensors: Sequence[torch.Tensor],
    objects: Sequence[ShardedObject],
    doing: str = "reshard",
) -> Any:
    """Return the result of a rank: its target with data, joined with copies of the plain values.

    Args:
        target: Target tree of the rank.
        common: Plain values that all source ranks share; `HOLE` if there are none.
        tensors: Tensor of each shard in `target.tensors`.
        objects: Object with data for each of `target.objects`.
        doing: Name of the operation in error messages.

    Raises:
        TreeError: The target doesn't fit the common state.
        UnsupportedValue: A plain value can't be copied.

    Examples:
        >>> target = take_target({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))})
        >>> tree = complete(target, {"w": HOLE, "step": 3}, [torch.ones(2)], [])
        >>> tree["w"].data, tree["step"]
        (tensor([1., 1.]), 3)
    """
    data, items = iter(tensors), iter(objects)
    pairs = zip(target.leaves, target.inner, strict=True)
    tree = target.rebuild([_leaf_with_data(leaf, data, items, inner=inner) for leaf, inner in pairs])
    copied = HOLE if common is HOLE else own_copy(common, f"{doing}: a plain value")
    with refuse_too_deep(doing):
        return target.merge(join_filled(copied, tree, target.plain, doing))


def join_filled(common: Any, tree: Any, plain: Sequence[tuple[TreePath, Any]], doing: str) -> Any:
    """Return a target tree joined with the plain values of the sources.

    Args:
        common: Plain values of the sources; `HOLE` (no value) if there are none.
        tree: Filled target tree, with `HOLE` in place of its plain values.
        plain: Path and leaf of each plain tensor of the target; the sources must have a value at each path.
        doing: Name of the operation in error messages.

    Raises:
        TreeError: The target doesn't fit the plain values, or the sources lack a plain tensor of the target.
    """
    tree = join(common, tree)
    lacking = [render_path(path) for path in unfilled(tree, plain)]
    if lacking:
        heading = f"{doing}: the target has plain tensors at paths where the source has no plain value"
        fix = "Pass shards there, as from `shard_at`; or, to keep these tensors, wrap them in LocalNonpersistentObject."
        raise TreeError(error_text(heading, offenders=lacking, fix=fix))
    return tree


def _leaf_with_data(leaf: Any, data: Iterator[torch.Tensor], items: Iterator[ShardedObject], *, inner: bool) -> Any:
    """Return a target's leaf, filled with the next tensor or object; `HOLE` for a plain value.

    Args:
        leaf: Leaf of the target, with factories applied.
        data: Tensors of the target's shards, in order.
        items: Objects with data for the target's objects, in order.
        inner: Whether a factory built the leaf. Its merge function takes bare data, so no shard or object is returned.
    """
    if isinstance(leaf, ShardedTensor):
        return next(data) if inner else with_data(leaf, next(data))
    if isinstance(leaf, ShardedObject):
        return LocalNonpersistentObject(next(items).data) if inner else next(items)
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf if inner else LocalNonpersistentObject(leaf)  # joining unwraps once
    return HOLE


@shielded
def reshard(
    trees: RankTrees,
    targets: RankTrees,
    *,
    rules: Mapping[str, ObjectRule] | None = None,
    empty: Callable[..., torch.Tensor] = torch.empty,
    cast: bool = False,
    plain: Sequence[str] = (),
) -> Any:
    """Return the targets filled from the trees of all ranks, as if `trees` were saved and `targets` loaded.

    Each byte is copied once, directly from the source's tensor into new memory. The arguments aren't changed, and the
    result shares nothing mutable with them.

    Args:
        trees: Source tree of each rank: a mapping by rank, or a list that begins with rank 0. Tensors may have any
            strides, on any device. Plain values must be the same on all ranks, except on ranks whose tree is empty.
        targets: Target tree of each rank after resharding, in the same form. A shard's data may be a tensor, whose
            device the new tensor gets, or None or a meta tensor: then the new tensor gets the device of a source shard.
            The sources must have a plain value at the path of each plain tensor; other plain values are ignored.
        rules: Rules for arrays of objects that change their shape, by key pattern; see `reshard_objects`.
        empty: Allocator of a tensor that will be filled, called as `empty(shape, dtype=..., device=...)`; it may return
            pinned memory, or memory shared between processes.
        cast: Whether tensors are converted to the targets' dtypes, as `load` does.
        plain: Patterns of keys whose values may be converted without their stored scales, as for `load`.

    Returns:
        Result tree of each target rank, as a mapping or list like `targets`. It is the target with data in its shards,
        objects and factories, joined with the plain values of the sources. Nonpersistent objects stay unchanged.

    Raises:
        TreeError: There is no tree, a target doesn't fit the plain values, or no source has a plain tensor of a target.
        IntegrityError: Source ranks disagree, targets ask for elements that no rank has, or objects need a rule.
        KeyMismatch: A target asks for a key that no source has, or a pattern matches nothing.
        ShapeError: A tensor's global shape differs; or its dtype differs and isn't cast, can't be cast, or needs its
            scales; or a source tensor no longer fits its shard.
        UnsupportedValue: A tensor isn't dense, or is quantised; or a plain value or object can't be copied.
        CheckpointingException: A source shard has no tensor.

    Examples:
        >>> whole = torch.arange(12.0).view(4, 3)
        >>> def cut(axis, parts):
        ...     pieces = enumerate(whole.chunk(parts, axis))
        ...     return [{"w": ShardedTensor.from_rank_offsets("w", piece, (axis, n, parts))} for n, piece in pieces]
        >>> columns = reshard(cut(0, 4), cut(1, 3))
        >>> [tree["w"].data.flatten().tolist() for tree in columns]
        [[0.0, 3.0, 6.0, 9.0], [1.0, 4.0, 7.0, 10.0], [2.0, 5.0, 8.0, 11.0]]
    """
    source_trees = {rank: take_source(tree) for rank, tree in trees_by_rank(trees, "reshard").items()}
    target_trees = {rank: take_target(tree) for rank, tree in trees_by_rank(targets, "reshard").items()}
    # A rank with an empty tree, such as an engine beside trainers, needn't agree about plain values.
    common = agreed_common({rank: flat.common or HOLE for rank, flat in source_trees.items()})
    plan = plan_reshard(_columns(source_trees), _columns(target_trees), cast=cast, plain=plain)
    tensors = iter(_copy_into_new(plan, _tensors(source_trees.values()), _tensors(target_trees.values()), empty))
    items = [item for flat in target_trees.values() for item in flat.objects]
    objects = iter(reshard_objects((item for flat in source_trees.values() for item in flat.objects), items, rules))
    results = {
        rank: complete(flat, common, list(islice(tensors, len(flat.tensors))), list(islice(objects, len(flat.objects))))
        for rank, flat in target_trees.items()
    }
    return {rank: results[rank] for rank in targets} if isinstance(targets, Mapping) else list(results.values())


def _columns(trees: Mapping[int, SourceTree | TargetTree]) -> ShardColumns:
    return tree_columns({rank: list(one.tensors) for rank, one in trees.items()})


def _tensors(trees: Iterable[SourceTree | TargetTree]) -> list[ShardedTensor]:
    return [shard for one in trees for shard in one.tensors]


def _copy_into_new(
    plan: ReshardPlan,
    sources: Sequence[ShardedTensor],
    targets: Sequence[ShardedTensor],
    empty: Callable[..., torch.Tensor],
) -> list[torch.Tensor]:
    """Return new tensors for the targets, filled by the plan from the sources."""
    first = first_sources(plan)
    new = []
    for row, shard in enumerate(targets):
        given_data = given_tensor(shard)
        # A target without a tensor gets the device of its first source, so that data on an accelerator stays there.
        model = given_data if given_data is not None else sources[first[row]].data if row in first else None
        device = torch.device("cpu") if model is None else model.device
        new.append(empty(shard.data_shape, dtype=shard.dtype, device=device))
    before, after = dict(enumerate(shard.data for shard in sources)), dict(enumerate(new))
    transfers = plan.transfers
    # All copies out of one shard follow each other, while it is in the processor's cache: this is a quarter faster from
    # rows to columns.
    copy_transfers(plan, np.lexsort((transfers.target, transfers.source, transfers.key)), before, after)
    return new


def first_sources(plan: ReshardPlan) -> dict[int, int]:
    """Return the first source shard from which each target shard receives elements: its row, by the target's row."""
    # Rows are reversed, so that of several sources the first one stays in the dict.
    rows = np.flatnonzero(plan.transfers.hop == 0)[::-1]
    return dict(zip(plan.transfers.target[rows].tolist(), plan.transfers.source[rows].tolist(), strict=True))
