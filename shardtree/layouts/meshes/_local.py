"""from_local: the tensors that a rank holds, described as parts of global ones by a mesh and specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...errors import MetadataError, ShapeError, TreePath, error_text, render_path
from ...geometry import integers
from ...trees import refuse_dtensors, shard_leaves
from .._columns import TensorKind
from ._keyed import KeyFunction, copies_by_path, keyed_tensors
from ._mesh import Mesh, check_mesh
from ._part import Part, mesh_part
from ._shards import part_shard
from ._spec import PartitionSpec, check_spec, splits
from ._specs import Specs, spec_finder


def from_local(
    tree: Any,
    mesh: Mesh,
    specs: Specs,
    rank: int,
    *,
    key: KeyFunction | None = None,
    global_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Any:
    """Return a rank's sharded tree of the tensors that it holds; `shard_at` is the same for whole tensors.

    The shards' data are the very tensors, parameters too, so that optimizer states find them. Nothing is communicated:
    an axis that is cut is taken to be as long as all parts of this rank's size together. Where that isn't so, ranks
    don't agree on the global shape, and `save` and `load` raise an error that says so and names `global_shapes`, which
    such tensors need.

    Args:
        tree: its tensors are what this rank holds, lazy ones too; shards and other values stay as they are.
        mesh: the ranks.
        specs: how the global tensors are cut, as for `shard`.
        rank: one that is on the mesh.
        key: names a tensor by its path; by default the path's entries are joined by dots. A tensor that is there twice
            may have one key; then the first is the main one.
        global_shapes: by key, those of tensors that aren't cut into equal parts.

    Raises:
        MetadataError: a tensor has no spec, or one that doesn't fit it or the mesh; or the rank isn't there.
        ShapeError: a tensor isn't of the shape that the rank has of the global one, or the rank has nothing of it.
        IntegrityError: different tensors have one key.
        TreeError: the tree holds DTensors, which know their own layout, or tensors that aren't dense; or two paths
            have one key, and no `key` says so.

    Examples:
        >>> import torch
        >>> from shardtree.layouts import PartitionSpec
        >>> tree = from_local({"w": torch.zeros(2, 3)}, Mesh(dp=2, tp=2), PartitionSpec("tp"), 3)
        >>> tree["w"].global_shape, tree["w"].global_offset, tree["w"].replica_id
        ((4, 3), (2, 0), 1)

    References:
        torch.distributed.tensor.DTensor.from_local; jax.make_array_from_process_local_data.
    """
    check_mesh(mesh)
    mesh.coordinates(rank)
    pairs, rebuild = shard_leaves(tree)
    refuse_dtensors("from_local", pairs)
    tensors = keyed_tensors("from_local", pairs, key)
    copies = copies_by_path("from_local", tensors.items(), dict(pairs), key)
    spec_of = spec_finder(specs, tree)
    shapes = _checked_shapes(global_shapes)
    leaves = []
    for path, leaf in pairs:
        if path not in tensors:
            leaves.append(leaf)
            continue
        name, local = tensors[path].key, tensors[path].local_shape
        spec = spec_of(path, name, leaf)
        check_spec(name, TensorKind(leaf.dtype, local, 0), mesh, spec)
        part = _part(name, path, local, mesh, spec, rank, shapes.get(name))
        replica = part.replica_id + copies[path] * mesh.size
        leaves.append(part_shard(name, leaf, leaf.dtype, replace(part, replica_id=replica)))
    return rebuild(leaves)


def _checked_shapes(shapes: Any) -> dict[str, tuple[int, ...]]:
    if shapes is not None and not isinstance(shapes, Mapping):
        found, fix = type(shapes).__name__, "Pass {key: global shape}."
        raise MetadataError(error_text("from_local: global_shapes isn't a dict", found=found, fix=fix))
    return {name: integers(f"from_local: {name!r}", "global_shapes", shape) for name, shape in (shapes or {}).items()}


def _part(
    name: str,
    path: TreePath,
    local: tuple[int, ...],
    mesh: Mesh,
    spec: PartitionSpec,
    rank: int,
    given: tuple[int, ...] | None,
) -> Part:
    """Return what the rank has of the global tensor, once it is known that it is of the tensor's shape."""
    entries = (*spec.entries, *(None,) * (len(local) - len(spec.entries)))
    counts = (prod(mesh.shape[split.axis] for split in splits(entry)) for entry in entries)
    whole = tuple(size * count for size, count in zip(local, counts, strict=True)) if given is None else given
    part = mesh_part(whole, mesh, spec, rank)
    if part is None or part.shape != local:
        expected = "nothing" if part is None else part.shape
        fix = "Correct the spec, or pass global_shapes={key: shape} for a tensor that isn't cut into equal parts."
        what = f"from_local: {name!r} at {render_path(path)} isn't what rank {rank} has of {whole} by {spec}"
        raise ShapeError(error_text(what, found=local, expected=expected, fix=fix))
    return part
