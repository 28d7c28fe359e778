"""A tree's whole tensors, each under its key, with how it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import IntegrityError, MetadataError, TreeError, TreePath, error_text, render_path
from ...lazy import LazyTensor
from ...mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from ...trees import call_at, diff, path_key, refuse_dtensors, shard_leaves
from .._columns import TensorKind
from ._columns import Placement
from ._mesh import Mesh
from ._spec import check_spec
from ._specs import Specs, spec_finder

KeyFunction = Callable[[TreePath], str]
"""From a leaf's path to the key of its tensor."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A leaf of a tree that is to be sharded.

    Attributes:
        leaf: a whole shard for a tensor; anything else as it was.
        placement: how the tensor is cut; None for what is no tensor.
    """

    leaf: Any
    placement: Placement | None


def placed_leaves(
    tree: Any, mesh: Mesh, specs: Specs, key: KeyFunction | None
) -> tuple[list[Placed], Callable[[Sequence[Any]], Any]]:
    """Return a tree's leaves with how they are cut, and the function that makes a tree of others in their places.

    Raises:
        TreeError: a leaf is a factory, no whole tensor, or has a key that another leaf has by its path.
        MetadataError: a tensor has no spec, or one that doesn't fit it or the mesh; or `key` isn't a function.
        IntegrityError: leaves were given one key, and aren't the same tensor.
    """
    tree = dict(tree) if isinstance(tree, Mapping) and not isinstance(tree, dict) else tree
    if key is not None and not callable(key):
        fix = "Pass a function from a leaf's path, a tuple, to its key."
        raise MetadataError(error_text("shard: key isn't a function", found=type(key).__name__, fix=fix))
    pairs, rebuild = shard_leaves(tree)
    _check_leaves(pairs)
    named = [(path, _named(path, leaf, key or path_key)) for path, leaf in pairs]
    copies = _copies([(path, leaf) for path, leaf in named if isinstance(leaf, ShardedTensor)], pairs, key)
    spec_of = spec_finder(specs, tree)
    placed = []
    for (path, leaf), (_, given) in zip(named, pairs, strict=True):
        if not isinstance(leaf, ShardedTensor):
            placed.append(Placed(leaf, None))
            continue
        kind = TensorKind(leaf.dtype, leaf.global_shape, 0)
        placement = Placement(leaf.key, kind, spec_of(path, leaf.key, given), copies[path])
        check_spec(leaf.key, kind, mesh, placement.spec)
        placed.append(Placed(leaf, placement))
    return placed, rebuild


def _check_leaves(pairs: Sequence[tuple[TreePath, Any]]) -> None:
    factories = [render_path(path) for path, leaf in pairs if isinstance(leaf, ShardedTensorFactory)]
    if factories:
        fix = "Call `apply_factories` on the tree first: specs are for the tensors that are stored."
        raise TreeError(error_text("shard: factories can't be cut", offenders=factories, fix=fix))
    parts = [f"{render_path(path)}: {leaf.key!r}" for path, leaf in pairs if _is_part(leaf)]
    if parts:
        fix = "Shard whole tensors: `unshard` puts shards together, and DTensors know their own layout."
        raise TreeError(error_text("shard: not whole", offenders=parts, fix=fix))
    strange = [f"{render_path(path)}: {leaf.layout}" for path, leaf in pairs if _is_strange(leaf)]
    if strange:
        fix = "Shard dense tensors, as .to_dense() and .dequantize() give them."
        raise TreeError(error_text("shard: not dense", offenders=strange, fix=fix))
    refuse_dtensors("shard", pairs)


def _is_part(leaf: Any) -> bool:
    if isinstance(leaf, ShardedObject):
        return any(size != 1 for size in leaf.global_shape)
    is_flat = isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None
    return is_flat or (isinstance(leaf, ShardedTensor) and leaf.local_shape != leaf.global_shape)


def _is_strange(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_quantized)


def _named(path: TreePath, leaf: Any, key: KeyFunction) -> Any:
    """Return a tensor as a whole shard under its key; any other leaf as it is."""
    if not isinstance(leaf, (torch.Tensor, LazyTensor)):
        return leaf
    data, shape = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tuple(leaf.shape)
    return ShardedTensor(call_at(path, key, path), data, leaf.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))


def _copies(
    named: Sequence[tuple[TreePath, ShardedTensor]], pairs: Sequence[tuple[TreePath, Any]], key: KeyFunction | None
) -> dict[TreePath, int]:
    """Return how many leaves with its key come before each; it is an error where nobody gave them that key."""
    given = dict(pairs)
    first: dict[str, tuple[TreePath, ShardedTensor]] = {}
    count: dict[str, int] = {}
    copies = {}
    for path, shard in named:
        other_path, other = first.setdefault(shard.key, (path, shard))
        copies[path] = count[shard.key] = count.get(shard.key, -1) + 1
        if not copies[path]:
            continue
        offenders = [render_path(other_path), render_path(path)]
        if key is None and not all(isinstance(given[each], ShardedTensor) for each in (other_path, path)):
            fix = "Pass key=, or rename one of them."
            raise TreeError(error_text(f"shard: two paths have the key {shard.key!r}", offenders=offenders, fix=fix))
        if not _same(other, shard):
            fix = "Give each tensor a key of its own; one key is for one tensor that is there twice"
            fix += ", and a lazy one, which isn't read to compare, for the same lazy tensor."
            what = f"shard: different tensors have the key {shard.key!r}"
            raise IntegrityError(error_text(what, offenders=offenders, fix=fix))
    return copies


def _same(left: ShardedTensor, right: ShardedTensor) -> bool:
    """Return whether shards are of one tensor, as far as can be told where there is nothing to compare."""
    if (left.dtype, left.global_shape) != (right.dtype, right.global_shape):
        return False
    one, other = left.data, right.data
    if one is None or other is None:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other  # lazy: what they would read may differ
    is_one_view = (one.device, one.data_ptr(), one.stride()) == (other.device, other.data_ptr(), other.stride())
    return is_one_view or not diff(one, other)
