"""The spec of each tensor of a tree by path, from specs in any form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.mapping import ShardedTensor
from ..core.trees import call_at, leaves_with_paths, place_above, prefix_places
from ..errors import MetadataError, TreePath, error_text, render_path
from ._specs import PartitionSpec, Specs, checked_spec


def specs_by_path(specs: Specs, tree: Any, tensors: Mapping[TreePath, ShardedTensor]) -> dict[TreePath, PartitionSpec]:
    """Return the spec of each tensor of a tree, by path.

    Args:
        specs: Specs in any form that `shard` takes.
        tree: The tree that the tensors are in.
        tensors: The tree's tensors, by path.

    Raises:
        MetadataError: A tree of specs holds a value that isn't a spec, has an entry that `tree` lacks, or has no spec
            for a tensor.

    Examples:
        >>> import torch
        >>> tensors = {(0,): ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
        >>> specs_by_path((PartitionSpec("tp"), None), [torch.zeros(2), 3], tensors)
        {(0,): PartitionSpec('tp')}
    """
    if isinstance(specs, PartitionSpec):
        return dict.fromkeys(tensors, specs)
    spec_leaves = leaves_with_paths(specs)
    # An instance of a registered class is a tree, even if it can be called, as Equinox's modules can.
    if callable(specs) and spec_leaves and spec_leaves[0][1] is specs:
        leaves = dict(leaves_with_paths(tree))
        calls = {path: (shard.key, call_at(path, specs, shard.key, leaves[path])) for path, shard in tensors.items()}
        return {path: checked_spec(repr(key), spec) for path, (key, spec) in calls.items()}
    for path, spec in spec_leaves:
        if spec is not None:
            checked_spec(f"spec at {render_path(path, 'specs')}", spec)
    placed = [(path, place, spec) for path, place, spec in prefix_places(specs, tree) if spec is not None]
    beyond = [render_path(path, "specs") for path, place, _ in placed if place is None]
    if beyond:
        fix = "Move these specs to paths that exist in the tree, or leave them out."
        raise MetadataError(error_text("specs have entries that the tree does not have", offenders=beyond, fix=fix))
    return _nearest({place: spec for _, place, spec in placed if place is not None}, tensors)


def _nearest(
    specs: Mapping[TreePath, PartitionSpec], tensors: Mapping[TreePath, ShardedTensor]
) -> dict[TreePath, PartitionSpec]:
    """Return the spec of each tensor: the one at its path, or the nearest above it."""
    places = {path: place_above(path, specs) for path in tensors}
    lacking = [path for path, place in places.items() if place is None]
    if lacking:
        missing = [f"{tensors[path].key!r}: no spec at {render_path(path, 'specs')}" for path in lacking]
        fix = "Put a PartitionSpec at its path or above it; PartitionSpec() for a tensor that is not cut."
        raise MetadataError(error_text("tensors without a spec", offenders=missing, fix=fix))
    return {path: specs[place] for path, place in places.items() if place is not None}
