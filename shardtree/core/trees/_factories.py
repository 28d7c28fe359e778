"""Factories in trees: their application before a save, merges of loaded subtrees, and the resulting metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...errors import IntegrityError, TreeError, TreePath, error_text, render_path
from ..mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, given_tensor, has_elements
from ..mapping.memory import check_no_aliases, check_writable, is_all_of, overwrite
from ._edit import without_data
from ._maps import call_at, map_sharing
from ._nodes import Tree, describe, entries, is_dict, is_sequence, leaves_with_paths, like, refusing_depth

# A factory is a lens: it converts a tensor to the stored subtree, and a loaded subtree to the tensor.
#
# `apply_factories` builds, `apply_factory_merges` merges, and `build_factories` gives both directions at once.

_MAX_CHAIN = 32

_Inner = Callable[[ShardedTensorFactory], Tree]
MergeOne = Callable[[ShardedTensorFactory, Tree], Any]


def apply_factories(sharded_state_dict: Tree) -> Tree:
    """Return the tree with each factory replaced by the subtree that it builds; other subtrees are shared.

    Factories in a built subtree are applied too.

    Raises:
        TreeError: Factories build factories more than 32 deep.
        Exception: An error of a build function, with a note that names the factory's path.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor, ShardedTensorFactory
        >>> def halves(key, data, replica_id, flattened_range):
        ...     return [ShardedTensor.from_rank_offsets(key, half, (0, i, 2)) for i, half in enumerate(data.chunk(2))]
        >>> tree = {"w": ShardedTensorFactory("w", torch.arange(4), halves, torch.cat), "step": 3}
        >>> [shard.global_offset for shard in apply_factories(tree)["w"]]
        [(0,), (2,)]
    """
    return build_factories(sharded_state_dict)[0]


def merge_anew(factory: ShardedTensorFactory, parts: Tree) -> Any:
    """Merge a factory's loaded subtree by its merge function, without filling existing memory."""
    return factory.merge_fn(parts)


def build_factories(
    tree: Tree, merge_one: MergeOne = merge_anew, *, is_target: bool = False
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """Return `apply_factories(tree)`, and a function that merges a loaded tree of that structure.

    The function returns ``apply_factory_merges(loaded, tree)``, but builds nothing again, since it keeps the built
    subtrees.

    Args:
        tree: Tree with factories.
        merge_one: Function from a factory and its loaded subtree to the merged value.
        is_target: Whether the tensors of factories are only memory to fill, so that their elements must not be read. If
            so, `for_target` is called instead of a build function that has this attribute; those of lenses have it.
    """
    trees: dict[int, Tree] = {}
    shards = _build(tree, trees, 0, is_target=is_target)
    return shards, lambda data: _merge_from_root(data, tree, (), lambda factory: trees[id(factory)], merge_one)


def _build(tree: Tree, trees: dict[int, Tree], depth: int, *, is_target: bool) -> Tree:
    """Return the tree with its factories applied, and add each built subtree to `trees`, by the factory's id.

    Args:
        tree: Tree, or subtree that a factory has built.
        trees: Built subtrees, which this function adds to.
        depth: Number of nested factories that built the tree; 0 for the whole tree.
        is_target: Whether the tensors of factories are only memory to fill.
    """

    def on_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensorFactory):
            return leaf
        if depth == _MAX_CHAIN:
            raise TreeError(
                error_text(
                    f"apply_factories: factory {leaf.key!r} came out of a chain of {depth} factories",
                    fix="Let build_fn return shards in the end; it seems to return its own factory again.",
                )
            )
        # The id is the key, since equal factories may be at several paths. The tree keeps them alive: ids stay unique.
        trees[id(leaf)] = _built_target(leaf) if is_target else leaf.build()
        return _build(trees[id(leaf)], trees, depth + 1, is_target=is_target)

    return map_sharing(on_leaf, tree)


def _built_target(factory: ShardedTensorFactory) -> Tree:
    build = getattr(factory.build_fn, "for_target", factory.build_fn)
    return build(factory.key, factory.data, factory.replica_id, factory.flattened_range)


def apply_factory_merges(x1: Tree, x2: Tree, key: TreePath = ()) -> Tree:
    """Return a loaded tree in which each factory's merged tensor replaces the subtree that was loaded for it.

    Args:
        x1: Loaded tree, in the structure of `apply_factories`. The result shares subtrees with nothing to merge.
        x2: Tree that has the factories at the same paths. Its other leaves are ignored. Where `x1` has a list or
            tuple, `x2` may have a dict whose keys are positions.
        key: Path of both trees in a larger one, for errors.

    Returns:
        A new tree. A subtree that a factory builds may contain further factories. To find and merge these, a factory
        with data builds its subtree again. A factory without data is assumed to build none.

    Raises:
        TreeError: `x1` has no subtree for a factory; the error names the factory's path.
        Exception: An error of a merge function, with a note that names the factory's path.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensorFactory
        >>> factory = ShardedTensorFactory("w", None, list, torch.cat)
        >>> apply_factory_merges({"w": [torch.zeros(1), torch.ones(1)], "step": 3}, {"w": factory})
        {'w': tensor([0., 1.]), 'step': 3}
    """
    return _merge_from_root(
        x1, x2, tuple(key), lambda factory: None if factory.data is None else _built_target(factory), merge_anew
    )


def held_tensors(tree: Tree) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a tree's factories as (key, tensor) pairs, without those that have no elements.

    Examples:
        >>> import torch
        >>> held_tensors({"w": ShardedTensorFactory("w", torch.zeros(2), list, torch.cat)})
        [('w', tensor([0., 0.]))]
    """
    factories = [leaf for _, leaf in leaves_with_paths(tree) if isinstance(leaf, ShardedTensorFactory)]
    return [
        (leaf.key, leaf.data) for leaf in factories if isinstance(leaf.data, torch.Tensor) and has_elements(leaf.data)
    ]


def merge_into_held(doing: str, tree: Tree) -> MergeOne:
    """Return a function that merges a factory's loaded subtree into the factory's own tensor, which is donated.

    The function is the argument `merge_one` of `build_factories`. If the loaded tensors are views that together make up
    the factory's tensor, it is filled already, and is returned. Otherwise the merged value is copied into the tensor,
    provided that the shapes and dtypes are equal, and that no other factory has the same tensor. If not, nothing is
    copied, and the merged value itself is returned.

    Args:
        doing: Name of the operation, for messages.
        tree: Target, whose factories' tensors may be written.

    Raises:
        ShapeError: A factory's tensor shares memory with another leaf's, or its own elements share memory.

    Examples:
        >>> import torch
        >>> fused = torch.zeros(4)
        >>> factory = ShardedTensorFactory("w", fused, list, torch.cat)
        >>> merge = merge_into_held("load", {"w": factory})
        >>> merge(factory, [torch.zeros(2), torch.ones(2)]) is fused, fused.tolist()
        (True, [0.0, 0.0, 1.0, 1.0])
    """
    leaves = [leaf for _, leaf in leaves_with_paths(tree)]
    targets = [(ShardedTensor.from_rank_offsets(key, data), data) for key, data in held_tensors(tree)]
    for shard, data in targets:
        check_writable(doing, shard, data)
    others = [(leaf, given_tensor(leaf)) for leaf in leaves if isinstance(leaf, ShardedTensor)]
    tensors = [(leaf, data) for leaf, data in others if data is not None and data.layout is torch.strided]
    check_no_aliases(doing, targets, tensors)
    times = Counter(data.data_ptr() for _, data in targets)
    may_write = {id(data): times[data.data_ptr()] == 1 for _, data in targets}

    def merge(factory: ShardedTensorFactory, data: Tree) -> Any:
        tensor = factory.data
        parts = [leaf for _, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
        if id(tensor) in may_write and is_all_of(parts, tensor):
            return tensor
        result = factory.merge_fn(data)
        fits = isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
        if not may_write.get(id(tensor)) or not fits:
            return result
        overwrite(tensor, result)
        return tensor

    return merge


@refusing_depth
def _merge_from_root(data: Tree, tree: Tree, path: TreePath, inner: _Inner, merge_one: MergeOne) -> Tree:
    return _merge(data, tree, path, inner, merge_one)


def _merge(data: Tree, tree: Tree, path: TreePath, inner: _Inner, merge_one: MergeOne) -> Tree:
    if isinstance(tree, ShardedTensorFactory):
        parts = _merge(data, call_at(path, inner, tree), path, inner, merge_one)
        return call_at(path, partial(merge_one, tree), parts)
    children = {entry: child for entry, child in (entries(tree) or {}).items() if _holds_factory(child)}
    if not children:
        return data
    places = _checked_entries(data, tree, children, path)
    new = {entry: _merge(places[entry], child, (*path, entry), inner, merge_one) for entry, child in children.items()}
    return like(data, {**places, **new})


def _holds_factory(tree: Tree) -> bool:
    if isinstance(tree, ShardedTensorFactory):
        return True
    children = entries(tree)
    return children is not None and any(map(_holds_factory, children.values()))


def _checked_entries(data: Tree, tree: Tree, children: Mapping[Any, Tree], path: TreePath) -> Mapping[Any, Tree]:
    """Return the children of a loaded container by entry: key, position or field.

    Args:
        data: Loaded container.
        tree: Container at the same path in the tree with factories.
        children: Children of `tree` that are factories or contain some, by entry.
        path: Path of both containers.

    Raises:
        TreeError: The containers have different types or lengths, or `data` lacks an entry of `children`.
    """
    places = entries(data)
    # Dicts have keys as entries, sequences positions.
    fits = is_dict(tree) if is_dict(data) else is_sequence(tree) or is_dict(tree) or type(data) is type(tree)
    if places is None or not fits:
        raise _misfit("has another structure", path, describe(data), describe(tree))
    if is_sequence(data) and is_sequence(tree) and len(data) != len(tree):
        raise _misfit("has another length", path, describe(data), describe(tree))
    missing = [entry for entry in children if entry not in places]
    if missing:
        names = [f"missing {render_path((*path, entry))}" for entry in missing]
        raise _misfit("lacks entries that factories merge", path, describe(data), None, names)
    return places


def _misfit(
    what: str, path: TreePath, found: str, expected: str | None, offenders: list[str] | tuple[str, ...] = ()
) -> TreeError:
    text = f"apply_factory_merges: the loaded tree {what} at {render_path(path)}"
    fix = "Load into the result of apply_factories, and merge with the tree that apply_factories got."
    return TreeError(error_text(text, found=found, expected=expected, fix=fix, offenders=offenders))


# Metadata by key.


def extract_metadata(tree: Tree) -> dict[str, ShardedTensor | ShardedObject]:
    """Return the metadata of a tree by key: the first shard of each tensor, and every sharded object, without data.

    Factories are applied first. Sharded objects have their `unique_key` as key.

    Raises:
        IntegrityError: Two shards of one key have different global shapes or dtypes; the error names all such shards.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> w = ShardedTensor.from_rank_offsets("layers.0.w", torch.ones(2), (0, 1, 2))
        >>> metadata = extract_metadata({"model": {"w": w}, "step": 3})
        >>> metadata["layers.0.w"].global_shape, metadata["layers.0.w"].data
        ((4,), None)
    """
    metadata: dict[str, ShardedTensor | ShardedObject] = {}
    conflicts: list[str] = []
    for path, leaf in leaves_with_paths(build_factories(tree, is_target=True)[0]):
        if not isinstance(leaf, (ShardedTensor, ShardedObject)):
            continue
        key = leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key
        first = metadata.setdefault(key, leaf)
        if _global_kind(first) != _global_kind(leaf):
            conflicts.append(f"{key!r} at {render_path(path)}: {_kind_text(leaf)}, but earlier {_kind_text(first)}")
    if conflicts:
        fix = "Give each global tensor a key of its own."
        raise IntegrityError(error_text("shards of one key describe different tensors", offenders=conflicts, fix=fix))
    return dict(without_data(metadata))


def _global_kind(leaf: ShardedTensor | ShardedObject) -> tuple[Any, ...]:
    return leaf.global_shape, leaf.dtype if isinstance(leaf, ShardedTensor) else None


def _kind_text(leaf: ShardedTensor | ShardedObject) -> str:
    shape, dtype = _global_kind(leaf)
    return f"{shape} {dtype or 'object'}"
