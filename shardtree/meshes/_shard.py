"""`shard` cuts a tree of whole tensors for the ranks of a mesh; `from_local` wraps the tensors that a rank holds."""

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

    Shards are views of the tensors in the tree. Only a part that consists of several boxes is a copy; see `rank_leaf`.
    `unshard` is the inverse.

    Args:
        tree: Tree of whole tensors: tensors on any device, lazy tensors, or whole shards (which keep their keys, and
            may have no data). A whole `ShardedObject` becomes a replica on each rank. Other values stay unchanged on
            all ranks.
        mesh: Mesh of the ranks.
        specs: Specs of the tensors: a PartitionSpec for all of them, a tree of specs (each holds for all tensors at its
            path and below, as in JAX), or a function ``(key, leaf) -> PartitionSpec`` such as `specs_by_pattern`
            returns.
        key: Function from a tensor's path to its key; by default the entries of the path are joined by dots. Tensors
            with one key must be equal; the first one is the main replica.

    Returns:
        A tree for each rank. Tensors that a rank doesn't hold are left out of its dicts; in a list or tuple, a `HOLE`
        keeps their place.

    Raises:
        MetadataError: A tensor has no spec, or a spec doesn't fit its tensor or the mesh.
        TreeError: A leaf is a factory or part of a tensor, or two paths have the same key.
        KeyMismatch: A pattern of `specs_by_pattern` matches no tensor, and `unused="allow"` isn't passed.
        IntegrityError: Tensors of one key differ.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> left, right = shard({"w": torch.arange(4), "step": 3}, Mesh(tp=2), PartitionSpec("tp"))
        >>> right["w"].key, right["w"].global_offset, right["w"].data, right["step"]
        ('w', (2,), tensor([2, 3]), 3)
    """
    return _trees(tree, mesh, specs, (), key, _view)


def shard_at(tree: Any, mesh: Mesh, specs: Specs, rank: int, *, key: KeyFunction | None = None) -> Any:
    """Return the sharded tree of one rank; see `shard`.

    Args:
        rank: Rank on the mesh.

    Raises:
        MetadataError: The rank isn't on the mesh, or a spec is missing or doesn't fit.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> shard_at({"w": torch.arange(4)}, Mesh(tp=2), PartitionSpec("tp"), 1)["w"].data
        tensor([2, 3])
    """
    return _trees(tree, mesh, specs, (rank,), key, _view)[0]


def abstract(tree: Any, mesh: Mesh, specs: Specs, *, key: KeyFunction | None = None) -> list[Any]:
    """Return the sharded tree of each rank with meta tensors as data: targets of a load, which allocates their memory.

    Meta tensors have a shape and a dtype but no elements. To get None instead, call `without_data` on a tree.

    Args:
        tree: Tree of whole tensors, as for `shard`. Meta tensors suffice, and so do shards without data, such as the
            result of `load_tensors_metadata`.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> trees = abstract({"w": torch.empty(4, device="meta")}, Mesh(tp=2), PartitionSpec("tp"))
        >>> [tree["w"].global_offset for tree in trees], trees[0]["w"].data
        ([(0,), (2,)], tensor(..., device='meta', size=(2,)))
    """
    return _trees(without_data(tree), mesh, specs, (), key, _meta_data)


def abstract_at(tree: Any, mesh: Mesh, specs: Specs, rank: int, *, key: KeyFunction | None = None) -> Any:
    """Return the tree of one rank with meta tensors as data; see `abstract`.

    Examples:
        >>> from shardtree.layouts import PartitionSpec
        >>> abstract_at({"w": torch.empty(5)}, Mesh(tp=2), PartitionSpec("tp"), 1)["w"].local_shape
        (2,)
    """
    return _trees(without_data(tree), mesh, specs, (rank,), key, _meta_data)[0]


def layout_of(tree: Any, mesh: Mesh, specs: Specs, *, key: KeyFunction | None = None) -> ShardColumns:
    """Return the shards of all ranks as columns, without building them; see `shard`.

    Each rank thereby knows every rank's shards. Rows are sorted by key, then in the mesh's order.

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
    """Return the sharded trees of the given ranks; of all ranks of the mesh if `ranks` is empty.

    The function `fill` returns the data of each new shard from the whole tensor's shard and the rank's part.
    """
    check_mesh(mesh)
    for rank in ranks:
        mesh.coordinates(rank)
    leaves, rebuild = placed_leaves(tree, mesh, specs, key)
    parts: dict[Any, RankShard | None] = {}
    return [prune(rebuild([_leaf(leaf, mesh, rank, parts, fill) for leaf in leaves])) for rank in ranks or mesh.ranks]


def _leaf(source: Placed, mesh: Mesh, rank: int, parts: dict[Any, RankShard | None], fill: _Fill) -> Any:
    """Return a rank's leaf for a leaf of the whole tree; a hole for a tensor that the rank doesn't hold.

    Args:
        source: Leaf of the whole tree, with its placement.
        mesh: Mesh of the ranks.
        rank: Rank on the mesh.
        parts: Memoised parts, by shape, spec and rank; new ones are added.
        fill: Function from the whole shard and the rank's part to the data of the new leaf.
    """
    leaf, placement = source.leaf, source.placement
    if placement is None:
        return replace(leaf, replica_id=mesh.ranks.index(rank)) if isinstance(leaf, ShardedObject) else leaf
    name = (leaf.global_shape, placement.spec, rank)
    # Computed once for all tensors of one shape and spec, which layers repeat.
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


# from_local: from the tensors of one rank.


def from_local(
    tree: Any,
    mesh: Mesh,
    specs: Specs,
    rank: int,
    *,
    key: KeyFunction | None = None,
    global_shapes: Mapping[str, Sequence[int]] | None = None,
) -> Any:
    """Return the sharded tree of a rank from its own tensors; `shard_at` takes whole tensors instead.

    The shards' data are the tensor objects of `tree` themselves, so that an optimizer's states can be matched with its
    parameters by identity. Nothing is communicated: the parts along a sharded axis are assumed to have equal sizes. If
    they don't, ranks disagree about the global shape; `save` and `load` then raise an error that asks for
    `global_shapes`.

    Args:
        tree: Tree of the rank's own tensors, lazy ones too; shards and other values stay unchanged.
        mesh: Mesh of the ranks.
        specs: Specs of the global tensors, as for `shard`.
        rank: Rank on the mesh.
        key: Function from a tensor's path to its key; by default the entries of the path are joined by dots. Tied
            tensors may share a key; the first one is the main replica.
        global_shapes: Global shapes, by key, of tensors whose parts differ in size.

    Raises:
        MetadataError: A tensor has no spec, a spec doesn't fit its tensor or the mesh, or the rank isn't on the mesh.
        ShapeError: A tensor has another shape than the rank's part of the global tensor, or the rank has no part of it.
        IntegrityError: Different tensors have one key.
        KeyMismatch: A pattern of `specs_by_pattern` matches no tensor, but nearly matches a key that got the default.
        TreeError: The tree holds DTensors or tensors that aren't dense, or two paths have the same key and no `key`
            function was passed.

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
        raise MetadataError(error_text("from_local: global_shapes is not a dict", found=found, fix=fix))
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
    # A rank can't tell from its own part whether it is a last, shorter one. If parts differ in size, ranks compute
    # different global shapes, and saves and loads compare those.
    whole = (
        tuple(size * count for size, count in zip(local, counts, strict=True)) if global_shape is None else global_shape
    )
    part = mesh_shard(whole, mesh, spec, rank)
    if part is None or part.shape != local:
        expected = "no tensor on this rank" if part is None else f"shape {part.shape}"
        fix = "Correct the spec, or pass global_shapes={key: shape} if the ranks' parts differ in size."
        heading = f"from_local: {name!r} at {render_path(path)} is not rank {rank}'s part of {whole}, cut as {spec}"
        raise ShapeError(error_text(heading, found=f"shape {local}", expected=expected, fix=fix))
    return part
