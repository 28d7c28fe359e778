"""Specs for all tensors of a tree, given in any form: the spec of each tensor, by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..core.mapping import ShardedTensor
from ..core.trees import Field, call_at, entries, leaves_with_paths
from ..errors import MetadataError, TreePath, error_text, render_path
from ._specs import PartitionSpec, Specs, checked_spec


def specs_by_path(specs: Specs, tree: Any, tensors: Mapping[TreePath, ShardedTensor]) -> dict[TreePath, PartitionSpec]:
    """Return the spec of each tensor of a tree, by path.

    Args:
        specs: Specs of any form.
        tree: The tree that the tensors are in.
        tensors: The tree's tensors, by path.

    Raises:
        MetadataError: a tree of specs holds something else, has a place that the tree hasn't, or none for a tensor.

    Examples:
        >>> import torch
        >>> tensors = {(0,): ShardedTensor.from_rank_offsets("w", torch.zeros(2))}
        >>> specs_by_path((PartitionSpec("tp"), None), [torch.zeros(2), 3], tensors)
        {(0,): PartitionSpec('tp')}
    """
    if isinstance(specs, PartitionSpec):
        return dict.fromkeys(tensors, specs)
    given = leaves_with_paths(specs)
    # An instance of a registered class is a tree, even if it can be called, as Equinox's modules can.
    if callable(specs) and given and given[0][1] is specs:
        leaves = dict(leaves_with_paths(tree))
        calls = {path: (shard.key, call_at(path, specs, shard.key, leaves[path])) for path, shard in tensors.items()}
        return {path: checked_spec(repr(key), spec) for path, (key, spec) in calls.items()}
    for path, spec in given:
        if spec is not None:
            checked_spec(f"spec at {render_path(path, 'specs')}", spec)
    found = [each for each in _placed_specs(specs, tree, (), ()) if each[2] is not None]
    beyond = [render_path(path, "specs") for path, place, _ in found if place is None]
    if beyond:
        fix = "Give specs at places that the tree has."
        raise MetadataError(error_text("specs for what isn't in the tree", offenders=beyond, fix=fix))
    return _nearest({place: spec for _, place, spec in found if place is not None}, tensors)


def _nearest(
    specs: Mapping[TreePath, PartitionSpec], tensors: Mapping[TreePath, ShardedTensor]
) -> dict[TreePath, PartitionSpec]:
    """Return the spec at each tensor's path or above it."""
    # Specs don't nest, since a spec is a leaf: at most one place on a path has one.
    places = {path: [path[:depth] for depth in range(len(path) + 1) if path[:depth] in specs] for path in tensors}
    lacking = [path for path in tensors if not places[path]]
    if lacking:
        missing = [f"{tensors[path].key!r}: no spec at {render_path(path, 'specs')}" for path in lacking]
        fix = "Give a PartitionSpec at its place, or at one above it; PartitionSpec() where it isn't cut."
        raise MetadataError(error_text("tensors without a spec", offenders=missing, fix=fix))
    return {path: specs[place] for path, (place,) in places.items()}


def _placed_specs(
    specs: Any, tree: Any, path: TreePath, place: TreePath | None
) -> Iterator[tuple[TreePath, TreePath | None, Any]]:
    """Yield each leaf of a tree of specs with its path, and the path of its place in the other tree, None without one.

    Containers may be of other classes than the tree's: their entries count, and named tuples' fields have names too.
    """
    children = entries(specs)
    if children is None:
        yield path, place, specs
        return
    own = {} if place is None else dict(entries(tree) or {})
    fields = {entry.name: entry for entry in own if isinstance(entry, Field)}
    for entry, child in children.items():
        name = entry.name if isinstance(entry, Field) else entry
        key = entry if entry in own else fields.get(name, name)
        below = (*place, key) if place is not None and key in own else None
        # Taken out, so that a position and a name aren't both the place of a spec.
        yield from _placed_specs(child, own.pop(key, None), (*path, entry), below)
