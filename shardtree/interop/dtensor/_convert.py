"""`from_dtensors` and `to_dtensors` convert trees; `dtensor_layout` computes the shards of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...core.layouts import ShardColumns, TensorKind, join_columns
from ...core.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from ...core.trees import (
    HOLE,
    Hole,
    flatten_with_paths,
    join,
    leaves_with_paths,
    path_key,
    select,
    without_holes,
)
from ...errors import ShapeError, TreeError, TreePath, UnsupportedValue, error_text, render_path
from ...meshes import KeyFunction, Mesh, Placement, placed_columns, rank_leaf
from ._placed import Parts, PlacedTensor, ReadOptions, Strided, all_parts, is_dtensor, placed_tensors

# DTensors to shards.


def from_dtensors(
    tree: Any,
    *,
    key: KeyFunction = path_key,
    within: Any = None,
    strided: Strided = None,
    replicated: Callable[[str, torch.Tensor], bool] | None = None,
) -> Any:
    """Return the tree with this rank's local part of each DTensor as a shard, for `save` and as a target of `load`.

    Nothing is communicated or copied. A local tensor that is one box of the global tensor becomes a ShardedTensor; a
    local tensor that consists of several boxes becomes a ShardedTensorFactory. Other values are unchanged, so `save`
    stores plain tensors with the common state. A DTensor on a mesh that this rank isn't in is left out.

    Args:
        tree: Dicts, lists and tuples with DTensors of any placements except `Partial`, such as the results of torch's
            `get_model_state_dict` and `get_optimizer_state_dict`.
        key: Function that returns the key of the tensor at a path; by default the path joined by dots.
        within: DeviceMesh whose ranks all hold this tree. A DTensor on a slice of this mesh is replicated along the
            mesh's other axes. The default is the root mesh of each DTensor. With pipeline parallelism, pass the stage's
            mesh, as in ``root["dp", "tp"]``. Without such a DeviceMesh, pass a `layouts.Mesh` of global ranks.
        strided: Meaning of a `_StridedShard`: "fsdp2" if it is FSDP2's, which cuts tensor-parallel shards further;
            "dtensor" if placements apply left to right. By default, a size for which the two meanings differ is an
            error.
        replicated: Function of a key and a plain tensor that returns whether the tensor is the same on all ranks of
            `within`, and so becomes a shard; it needs `within`. It serves for parameters that tensor parallelism leaves
            plain. By default no plain tensor becomes a shard.

    Raises:
        UnsupportedValue: A DTensor is `Partial`.
        ShapeError: A local tensor doesn't match the placements, or these are ambiguous.
        TreeError: Two paths have the same key.
        MetadataError: A DTensor's mesh isn't a slice of `within`; an option is invalid, or needs `within`.

    Examples:
        >>> from_dtensors({"step": torch.tensor(3)})
        {'step': tensor(3)}

    References:
        torch.distributed.tensor.DTensor, torch 2.13.
    """
    parts = all_parts()
    reading = ReadOptions(key, within, strided, replicated)
    shards = {placed.path: _shard(placed, parts) for placed in placed_tensors(tree, reading, parts)}
    pairs, rebuild = flatten_with_paths(tree)
    new = rebuild([shards.get(path, leaf) for path, leaf in pairs])
    return without_holes(new) if any(shard is HOLE for shard in shards.values()) else new


def _shard(source: PlacedTensor, parts: Parts) -> ShardedTensor | ShardedTensorFactory | Hole:
    place = source.device_mesh.get_coordinate()
    if place is None:
        return HOLE
    rank, whole = int(source.device_mesh.mesh[tuple(place)]), tuple(source.tensor.shape)
    part = next(part for part in parts(whole, source.mesh, source.spec) if part.rank == rank)
    local = local_tensor(source.tensor)
    if tuple(local.shape) != part.shape:
        where = f"{source.key!r} at {render_path(source.path)}"
        heading = f"from_dtensors: {where}: the local tensor does not match its placements"
        found, expected = (
            f"a local tensor of shape {tuple(local.shape)}",
            f"shape {part.shape}, this rank's part of {whole}",
        )
        # from_local assumes that all ranks' local tensors have the same shape, and derives the global shape from it.
        fix = "Pass the global shape= and stride= to DTensor.from_local if ranks hold shards of different sizes."
        raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))
    return rank_leaf(source.key, local, local.dtype, part)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this rank's local part of a tensor, detached from autograd."""
    with torch.no_grad():
        local: Any = tensor.to_local() if is_dtensor(tensor) else tensor
        # to_local may return a tensor to wait for, the result of a collective that is still in progress.
        done: torch.Tensor = local.wait() if hasattr(local, "wait") else local
        return done.detach()


# Shards, or loaded tensors, to DTensors.


def to_dtensors(tree: Any, like: Any) -> Any:
    """Return the tree with a DTensor wherever `like` has one: with its mesh, placements, shape and stride.

    Nothing is communicated, and tensors on the mesh's kind of device aren't copied. A result requires a gradient if the
    DTensor in `like` does, and its dtype can have one; it is a DTensor, not a parameter.

    Args:
        tree: Result of `load` for the target `from_dtensors(like)`, or that target itself.
        like: Tree with DTensors. Its other leaves are ignored.

    Raises:
        TreeError: The tree has nothing at the path of a DTensor.
        ShapeError: A tensor doesn't have the shape of this rank's local part of the DTensor.
        UnsupportedValue: The value at that path isn't a tensor, or is a shard without data.

    Examples:
        >>> to_dtensors({"step": 3}, like={"step": 0})
        {'step': 3}
    """
    dtensors = {path: leaf for path, leaf in leaves_with_paths(like) if is_dtensor(leaf)}
    pairs, rebuild = flatten_with_paths(tree)
    # A DTensor on a mesh without this rank has no elements here: there is nothing to load, so it is taken from `like`.
    absent = {path for path, leaf in dtensors.items() if leaf.device_mesh.get_coordinate() is None}
    lacking = dtensors.keys() - {path for path, _ in pairs}
    if lacking - absent:
        offenders = sorted(render_path(path) for path in lacking - absent)
        fix = "Pass the result of load(from_dtensors(like), ...) as tree."
        raise TreeError(error_text("to_dtensors: missing values for DTensors", offenders=offenders, fix=fix))
    new = rebuild(
        [dtensors[path] if path in absent else _dtensor(path, leaf, dtensors.get(path)) for path, leaf in pairs]
    )
    return join(new, select(like, lambda path, _: path in lacking)) if lacking else new


def _dtensor(path: TreePath, leaf: Any, like: Any) -> Any:
    """Return a leaf's local tensor as a DTensor with the mesh, placements and shape of the DTensor `like`.

    If `like` is None, the leaf is returned unchanged.
    """
    if like is None:
        return leaf
    local = leaf.data if isinstance(leaf, ShardedBase) else leaf
    where = f"to_dtensors: {render_path(path)}"
    if not isinstance(local, torch.Tensor) or is_dtensor(local):
        fix = "Load the tree first, and pass the result of load."
        heading, expected = f"{where}: not a local tensor", "this rank's own tensor"
        raise UnsupportedValue(error_text(heading, found=type(local).__name__, expected=expected, fix=fix))
    like_local = local_tensor(like)
    if local.shape != like_local.shape:
        fix = "Load into from_dtensors(like), whose shards are this rank's local parts."
        found, expected_shape = tuple(local.shape), tuple(like_local.shape)
        raise ShapeError(error_text(f"{where}: wrong local shape", found=found, expected=expected_shape, fix=fix))
    with torch.no_grad():
        return _make_dtensor(local.detach(), like_local, like).requires_grad_(
            like.requires_grad and (local.is_floating_point() or local.is_complex())
        )


def _make_dtensor(local: torch.Tensor, like_local: torch.Tensor, like: Any) -> Any:
    """Return a DTensor with the mesh, placements and shape of `like`, and another local tensor.

    The local tensor is moved to the mesh's kind of device. If CPU offload keeps `like_local` on another device, it is
    moved there instead.
    """
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    if like_local.is_meta or like_local.device.type == mesh.device_type:
        return DTensor.from_local(local, mesh, like.placements, shape=like.shape, stride=like.stride())
    make: Any = DTensor  # not from_local, which would move it to the mesh's kind of device
    return make(local.to(like_local.device), like._spec, requires_grad=False)


# All ranks' shards, computed from one rank's DTensors.


def dtensor_layout(
    tree: Any,
    *,
    key: KeyFunction = path_key,
    within: Any = None,
    strided: Strided = None,
    replicated: Callable[[str, torch.Tensor], bool] | None = None,
) -> ShardColumns:
    """Return all ranks' shards of a tree's DTensors, as columns that every rank computes alike without communication.

    With the result as ``layout=``, `save` and `load` exchange no layouts. The shards are those that `from_dtensors`
    returns on all ranks for the same arguments, and so are the errors. Local tensors aren't accessed.

    Args:
        tree: Tree of DTensors, also on the meta device.
        key: Function that returns the key of the tensor at a path, as for `from_dtensors`.
        within: DeviceMesh whose ranks all hold this tree, as for `from_dtensors`.
        strided: Meaning of a `_StridedShard`, as for `from_dtensors`.
        replicated: Function that returns whether a plain tensor becomes a shard, as for `from_dtensors`.

    Examples:
        >>> len(dtensor_layout({"step": 3}))
        0
    """
    by_mesh: dict[Mesh, list[Placement]] = defaultdict(list)
    for placed in placed_tensors(tree, ReadOptions(key, within, strided, replicated), all_parts()):
        kind = TensorKind(placed.tensor.dtype, tuple(placed.tensor.shape), 0)
        by_mesh[placed.mesh].append(Placement(placed.key, kind, placed.spec))
    return join_columns([placed_columns(placements, mesh) for mesh, placements in by_mesh.items()])
