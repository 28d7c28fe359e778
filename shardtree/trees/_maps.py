"""Maps over a tree in its two views: shards as leaves, and through shards to their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import optree

from ..errors import TreeError, error_text, plural
from ..mapping import ShardedTensor, ShardedTensorFactory
from ._nodes import SameTree, Tree, call_on_leaves, check_function, flatten
from ._registry import with_data

_Key = TypeVar("_Key")


@overload
def map_shards(f: Callable[..., Any], tree: dict[_Key, Any], *rest: Tree) -> dict[_Key, Any]: ...
@overload
def map_shards(f: Callable[..., Any], tree: list[Any], *rest: Tree) -> list[Any]: ...
@overload
def map_shards(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree: ...
def map_shards(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Return a tree of f's values, where each shard is one leaf.

    f is called in the order of sorted dict keys; the result keeps each dict's own order. Every container is new.

    Args:
        f: takes one leaf of each tree. What it returns is put in the leaf's place.
        tree: any tree; None is a leaf.
        rest: trees with the first one's structure; where the first has a leaf, theirs may have a subtree.

    Raises:
        TreeError: a tree of `rest` doesn't have the first one's structure.
        MetadataError: f isn't a function.
        Exception: what f raises, with a note of the leaf's path.

    Examples:
        >>> map_shards(lambda leaf: leaf is None, {"b": None, "a": [1, 2]})
        {'b': True, 'a': [False, False]}
        >>> map_shards(lambda x, y: x + y, {"a": 1}, {"a": 10})
        {'a': 11}
    """
    check_function("map_shards", "f", f)
    leaves, spec = flatten(tree)
    columns = [leaves, *(_aligned(spec, other, number) for number, other in enumerate(rest, 2))]
    return spec.unflatten(call_on_leaves(f, spec, *columns))


def _aligned(spec: optree.PyTreeSpec, other: Tree, number: int) -> list[Any]:
    """Return what another tree has at each leaf of a structure."""
    leaves, other_spec = flatten(other)
    if other_spec == spec:
        return leaves
    try:
        return spec.flatten_up_to(other_spec.unflatten(leaves))
    except ValueError as error:
        what = f"map_shards: tree {number} doesn't have the structure of the first tree"
        fix = "Give trees of one structure, or join them first with `merge` or `combine`."
        found, expected = plural(len(leaves), "value"), plural(spec.num_leaves, "value")
        offenders = [str(error).splitlines()[0][:200]]
        raise TreeError(error_text(what, found=found, expected=expected, fix=fix, offenders=offenders)) from None


def map_data(f: Callable[[Any], Any], tree: SameTree) -> SameTree:
    """Return a tree where the tensors of shards and factories are f's values, and their metadata is untouched.

    f isn't called on absent data (None); plain values, `ShardedObject` and `LocalNonpersistentObject` are left alone.

    Args:
        f: takes a shard's or factory's data. It returns a tensor of the same dtype and shape, or anything that isn't
            a tensor (None, a shape, a lazy tensor).
        tree: any tree.

    Raises:
        ShapeError: f returned a tensor of another dtype or shape.
        Exception: what f raises, with a note of the leaf's path.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> w = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        >>> map_data(torch.neg, {"w": w, "step": 3})["w"].data
        tensor([-1., -1.])
    """
    check_function("map_data", "f", f)

    def on_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) or leaf.data is None:
            return leaf
        data = f(leaf.data)
        return leaf if data is leaf.data else with_data(leaf, data)

    mapped: SameTree = map_shards(on_leaf, tree)
    return mapped
