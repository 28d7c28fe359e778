"""A tree's whole tensors, each under its key, with how it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TreeError, TreePath, error_text, render_path
from ...mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from ...trees import refuse_dtensors, shard_leaves
from .._columns import TensorKind
from ._columns import Placement
from ._keyed import KeyFunction, copies_by_path, keyed_tensors
from ._mesh import Mesh
from ._spec import check_spec
from ._specs import Specs, spec_finder


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
    pairs, rebuild = shard_leaves(tree)
    _check_leaves(pairs)
    tensors = keyed_tensors("shard", pairs, key)
    named = [(path, tensors.get(path, leaf)) for path, leaf in pairs]
    shards = [(path, leaf) for path, leaf in named if isinstance(leaf, ShardedTensor)]
    copies = copies_by_path("shard", shards, dict(pairs), key)
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
    refuse_dtensors("shard", pairs)


def _is_part(leaf: Any) -> bool:
    if isinstance(leaf, ShardedObject):
        return any(size != 1 for size in leaf.global_shape)
    is_flat = isinstance(leaf, ShardedTensor) and leaf.flattened_range is not None
    return is_flat or (isinstance(leaf, ShardedTensor) and leaf.local_shape != leaf.global_shape)
