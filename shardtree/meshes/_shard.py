"""shard: a tree of whole tensors, cut for the ranks of a mesh. from_local: a tree of tensors that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ..core.geometry import integers
from ..core.layouts import ShardColumns, TensorKind
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.trees import HOLE, empty_data, flatten_with_paths, prune, refuse_hidden, without_data
from ..errors import MetadataError, ShapeError, TreePath, error_text, render_path
from ._mesh import Mesh, check_mesh
from ._placement import KeyFunction, Placed, copies_by_path, keyed_tensors, placed_columns, placed_leaves
from ._shards import RankShard, mesh_shard, rank_data, rank_leaf
from ._specs import PartitionSpec, Specs, check_patterns, check_spec, splits
from ._tree_specs import specs_by_path

# shard, abstract and layout_of: from whole tensors.

_Fill = Callable[[ShardedTensor, RankShard], Any]


def shard(tree: Any, mesh: Mesh, specs: Specs, *, key: KeyFunction | None = None) -> list[Any]:
    """Return the sharded tree of each rank of a mesh, in the mesh's order.

    Shards are views of the given tensors; only a rank's part that is several boxes is a copy, see `rank_leaf`.
    `unshard` undoes it.

    Args:
        tree: its tensors are the whole ones: tensors on any device, lazy tensors, or shards that are whole (which keep
            their keys, and may have no data). A whole `ShardedObject` becomes a replica on each rank. Other values stay
            as they are, on all ranks.
        mesh: the ranks.
        specs: how tensors are cut: a PartitionSpec for all of them, a tree of specs (one holds for all tensors at
            its place and below, as in JAX), or a function ``(key, leaf) -> PartitionSpec`` as `specs_by_pattern` makes.
        key: names a tensor by its path; by default the path's entries are joined by dots. Where two tensors get one
            key they must be the same, and the first is the main one.

    Returns:
        One tree a rank. A tensor that a rank doesn't hold is left out of its tree: out of dicts, while in a list or
        tuple a `HOLE` keeps its place.

    Raises:
        MetadataError: a tensor has no spec, or one that doesn't fit it or the mesh.
        TreeError: a leaf is a factory or no whole tensor, or two paths have one key.
        KeyMismatch: a pattern of `specs_by_pattern` fits no tensor, and `unused="allow"` isn't given.
        IntegrityError: different tensors were given one key.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> left, right = shard({"w": torch.arange(4), "step": 3}, Mesh(tp=2), PartitionSpec("tp"))
        >>> right["w"].key, right["w"].global_offset, right["w"].data, right["step"]
        ('w', (2,), tensor([2, 3]), 3)
    """
    return _trees(tree, mesh, specs, (), key, _view)


def shard_at(tree: Any, mesh: Mesh, specs: Specs, rank: int, *, key: KeyFunction | None = None) -> Any:
    """Return one rank's sharded tree; see `shard`.

    Args:
        rank: one that is on the mesh.

    Raises:
        MetadataError: as `shard`, or the rank isn't on the mesh.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> shard_at({"w": torch.arange(4)}, Mesh(tp=2), PartitionSpec("tp"), 1)["w"].data
        tensor([2, 3])
    """
    return _trees(tree, mesh, specs, (rank,), key, _view)[0]


def abstract(tree: Any, mesh: Mesh, specs: Specs, *, key: KeyFunction | None = None) -> list[Any]:
    """Return what `shard` does, with meta tensors as data: targets for a load, which puts tensors on its `device`.

    Meta tensors have a shape and a dtype and hold no elements; `without_data` puts None instead.

    Args:
        tree: as for `shard`; shards without data and meta tensors do, as `load_tensors_metadata` gives them.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> trees = abstract({"w": torch.empty(4, device="meta")}, Mesh(tp=2), PartitionSpec("tp"))
        >>> [tree["w"].global_offset for tree in trees], trees[0]["w"].data
        ([(0,), (2,)], tensor(..., device='meta', size=(2,)))
    """
    return _trees(without_data(tree), mesh, specs, (), key, _meta_data)


def abstract_at(tree: Any, mesh: Mesh, specs: Specs, rank: int, *, key: KeyFunction | None = None) -> Any:
    """Return one rank's tree with meta tensors as data; see `abstract`.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> abstract_at({"w": torch.empty(5)}, Mesh(tp=2), PartitionSpec("tp"), 1)["w"].local_shape
        (2,)
    """
    return _trees(without_data(tree), mesh, specs, (rank,), key, _meta_data)[0]


def layout_of(tree: Any, mesh: Mesh, specs: Specs, *, key: KeyFunction | None = None) -> ShardColumns:
    """Return the shards that `shard` would give to all ranks, as columns; none of them is built.

    So each rank knows what every rank holds. Rows are ordered by key, then in the mesh's order.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> columns = layout_of({"w": torch.empty(4, device="meta")}, Mesh(tp=2), PartitionSpec("tp"))
        >>> columns.rank.tolist(), columns.offset.tolist()
        ([0, 1], [[0], [2]])
    """
    check_mesh(mesh)
    leaves, _ = placed_leaves(tree, mesh, specs, key)
    return placed_columns([leaf.placement for leaf in leaves if leaf.placement is not None], mesh)


def _trees(
    tree: Any, mesh: Mesh, specs: Specs, ranks: tuple[int, ...], key: KeyFunction | None, fill: _Fill
) -> list[Any]:
    """Return the trees of some ranks, of all where none is named."""
    check_mesh(mesh)
    for rank in ranks:
        mesh.coordinates(rank)
    leaves, rebuild = placed_leaves(tree, mesh, specs, key)
    parts: dict[Any, RankShard | None] = {}
    return [prune(rebuild([_leaf(leaf, mesh, rank, parts, fill) for leaf in leaves])) for rank in ranks or mesh.ranks]


def _leaf(source: Placed, mesh: Mesh, rank: int, parts: dict[Any, RankShard | None], fill: _Fill) -> Any:
    """Return a rank's leaf for a leaf of the whole tree."""
    leaf, placement = source.leaf, source.placement
    if placement is None:
        return replace(leaf, replica_id=mesh.ranks.index(rank)) if isinstance(leaf, ShardedObject) else leaf
    name = (leaf.global_shape, placement.spec, rank)
    # Computed once for all tensors of a shape and spec: layers repeat them.
    if name not in parts:
        parts[name] = mesh_shard(leaf.global_shape, mesh, placement.spec, rank)
    part = parts[name]
    if part is None:
        return HOLE
    if placement.copy:
        # A tied tensor's further occurrences are replicas: only the first one is written.
        part = replace(part, replica_id=part.replica_id + placement.copy * mesh.size)
    data = fill(leaf, part)
    return rank_leaf(leaf.key, data, leaf.dtype, part, allow_shape_mismatch=leaf.allow_shape_mismatch)


def _view(leaf: ShardedTensor, part: RankShard) -> Any:
    return rank_data(leaf.data, part)


def _meta_data(leaf: ShardedTensor, part: RankShard) -> torch.Tensor:
    return empty_data(part.shape, leaf.dtype, "meta")


# from_local: from tensors that a rank holds.


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

    The shards' data are the same tensor objects, parameters too, so that optimizer states find them. Nothing is
    communicated: an axis that is cut is taken to be as long as all parts of this rank's size together. Where that isn't
    so, ranks don't agree on the global shape, and `save` and `load` raise an error that says so and names
    `global_shapes`, which such tensors need.

    Args:
        tree: its tensors are what this rank holds, lazy ones too; shards and other values stay as they are.
        mesh: the ranks.
        specs: how the global tensors are cut, as for `shard`.
        rank: one that is on the mesh.
        key: names a tensor by its path; by default the path's entries are joined by dots. A tensor that occurs twice
            may have one key; then the first is the main one.
        global_shapes: by key, those of tensors that aren't cut into equal parts.

    Raises:
        MetadataError: a tensor has no spec, or one that doesn't fit it or the mesh; or the rank isn't there.
        ShapeError: a tensor isn't of the shape that the rank has of the global one, or the rank has nothing of it.
        IntegrityError: different tensors have one key.
        KeyMismatch: a pattern of `specs_by_pattern` fits no tensor, and nearly fits one that got the default.
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
    pairs, rebuild = flatten_with_paths(tree)
    refuse_hidden("from_local", pairs)
    tensors = keyed_tensors("from_local", pairs, key)
    copies = copies_by_path("from_local", tensors.items(), dict(pairs), key)
    check_patterns("from_local", specs, [tensor.key for tensor in tensors.values()], whole=False)
    spec_of = specs_by_path(specs, tree, tensors)
    if global_shapes is not None and not isinstance(global_shapes, Mapping):
        found, fix = type(global_shapes).__name__, "Pass {key: global shape}."
        raise MetadataError(error_text("from_local: global_shapes isn't a dict", found=found, fix=fix))
    sizes = (global_shapes or {}).items()
    shapes = {name: integers(f"from_local: {name!r}", "global_shapes", shape) for name, shape in sizes}
    leaves = []
    for path, leaf in pairs:
        if path not in tensors:
            leaves.append(leaf)
            continue
        name, local = tensors[path].key, tensors[path].local_shape
        spec = spec_of[path]
        check_spec(name, TensorKind(leaf.dtype, local, 0), mesh, spec)
        part = _part(name, path, local, mesh, spec, rank, shapes.get(name))
        replica = part.replica_id + copies[path] * mesh.size
        leaves.append(rank_leaf(name, leaf, leaf.dtype, replace(part, replica_id=replica)))
    return rebuild(leaves)


def _part(
    name: str,
    path: TreePath,
    local: tuple[int, ...],
    mesh: Mesh,
    spec: PartitionSpec,
    rank: int,
    global_shape: tuple[int, ...] | None,
) -> RankShard:
    """Return the rank's part of the global tensor, after checking that the local tensor has its shape."""
    entries = (*spec.entries, *(None,) * (len(local) - len(spec.entries)))
    counts = (prod(mesh.shape[split.axis] for split in splits(entry)) for entry in entries)
    # Ranks can't tell from their own part whether it is a last, shorter one: where parts differ in size, ranks compute
    # different global shapes, which saves and loads compare.
    whole = (
        tuple(size * count for size, count in zip(local, counts, strict=True)) if global_shape is None else global_shape
    )
    part = mesh_shard(whole, mesh, spec, rank)
    if part is None or part.shape != local:
        expected = "nothing" if part is None else part.shape
        fix = "Correct the spec, or pass global_shapes={key: shape} for a tensor that isn't cut into equal parts."
        what = f"from_local: {name!r} at {render_path(path)} isn't what rank {rank} has of {whole} by {spec}"
        raise ShapeError(error_text(what, found=local, expected=expected, fix=fix))
    return part
