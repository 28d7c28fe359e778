"""from_dtensors and to_dtensors: trees with DTensors, trees with our shards; dtensor_layout: what every rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...errors import ShapeError, TreeError, TreePath, UnsupportedValue, error_text, render_path
from ...layouts import KeyFunction, Mesh, ShardColumns, TensorKind, join_columns, rank_leaf
from ...layouts.meshes import Placement, placed_columns
from ...mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from ...trees import HOLE, Hole, join, leaves_with_paths, path_key, select, shard_leaves, without_holes
from ._placed import Parts, Placed, Reading, Strided, all_parts, is_dtensor, placed_tensors

# from_dtensors: a tree with DTensors becomes one with our shards.


def from_dtensors(
    tree: Any,
    *,
    key: KeyFunction = path_key,
    within: Any = None,
    strided: Strided = None,
    replicated: Callable[[str, torch.Tensor], bool] | None = None,
) -> Any:
    """Return the tree with what this rank holds of each DTensor as a shard, for `save` and as a target of `load`.

    Nothing is communicated or copied. A local tensor that is one box of the global one becomes a ShardedTensor, one
    that is several a ShardedTensorFactory. Other values stay as they are: plain tensors are common values. A DTensor
    on a mesh that this rank isn't in is left out.

    Args:
        tree: dicts, lists and tuples with DTensors of any placements but `Partial`, such as torch's
            `get_model_state_dict` and `get_optimizer_state_dict` return.
        key: names the tensor at a path; joins it by dots by default.
        within: the DeviceMesh whose ranks all hold this tree. A DTensor on a slice of it is replicated along its
            other axes. By default it is each DTensor's root mesh; with pipeline parallelism pass that of the stage, as
            in ``root["dp", "tp"]``.
        strided: "fsdp2" where a `_StridedShard` is FSDP2's, which cuts what tensor parallelism left; "dtensor" where
            it is to be read left to right. By default sizes for which that makes a difference are an error.
        replicated: says of a key and a plain tensor whether it is the same on all ranks of `within`, and a shard to be
            saved or loaded, as for parameters that tensor parallelism alone leaves plain. By default none is.

    Raises:
        UnsupportedValue: a DTensor is `Partial`.
        ShapeError: a local tensor isn't what the placements say, or these can be meant in two ways.
        TreeError: two paths are the same once they are joined by dots.
        MetadataError: a DTensor's mesh isn't a slice of `within`; an option isn't one, or lacks `within`.

    Examples:
        >>> from_dtensors({"step": torch.tensor(3)})
        {'step': tensor(3)}

    References:
        torch.distributed.tensor.DTensor, torch 2.13.
    """
    parts = all_parts()
    reading = Reading(key, within, strided, replicated)
    shards = {each.path: _shard(each, parts) for each in placed_tensors(tree, reading, parts)}
    pairs, rebuild = shard_leaves(tree)
    built = rebuild([shards.get(path, leaf) for path, leaf in pairs])
    return without_holes(built) if any(shard is HOLE for shard in shards.values()) else built


def _shard(placed: Placed, parts: Parts) -> ShardedTensor | ShardedTensorFactory | Hole:
    place = placed.device_mesh.get_coordinate()
    if place is None:
        return HOLE
    rank, whole = int(placed.device_mesh.mesh[tuple(place)]), tuple(placed.tensor.shape)
    part = next(part for part in parts(whole, placed.mesh, placed.spec) if part.rank == rank)
    local = local_tensor(placed.tensor)
    if tuple(local.shape) != part.shape:
        what = f"from_dtensors: {placed.key!r} at {render_path(placed.path)}: not what its placements say"
        found, expected = f"a local tensor of shape {tuple(local.shape)}", f"{part.shape} of {whole}"
        fix = "Give DTensor.from_local the global shape= and stride= where ranks hold parts of different sizes."
        raise ShapeError(error_text(what, found=found, expected=expected, fix=fix))
    return rank_leaf(placed.key, local, local.dtype, part)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a graph, once what it comes from has arrived."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return local.detach()


# to_dtensors: what was loaded, or a tree of shards, becomes DTensors again.


def to_dtensors(tree: Any, like: Any) -> Any:
    """Return the tree with a DTensor wherever another one has one: with its mesh, placements, shape and stride.

    Nothing is communicated, and what is on the mesh's kind of device isn't copied. The result wants a gradient where
    the other one does, if its dtype can have one; it is a DTensor, not a parameter.

    Args:
        tree: what `load` returned for the target `from_dtensors(like)`, or that target itself.
        like: the tree with DTensors. Its other leaves are ignored.

    Raises:
        TreeError: there is nothing where a DTensor should be.
        ShapeError: a tensor isn't of the shape that this rank holds of the DTensor.
        UnsupportedValue: what stands there isn't a tensor, or a shard without one.

    Examples:
        >>> to_dtensors({"step": 3}, like={"step": 0})
        {'step': 3}
    """
    wanted = {path: leaf for path, leaf in leaves_with_paths(like) if is_dtensor(leaf)}
    pairs, rebuild = shard_leaves(tree)
    # What this rank isn't in the mesh of is a DTensor without elements, and stays as it is.
    absent = {path for path, leaf in wanted.items() if leaf.device_mesh.get_coordinate() is None}
    lacking = wanted.keys() - {path for path, _ in pairs}
    if lacking - absent:
        offenders = sorted(render_path(path) for path in lacking - absent)
        fix = "Pass what load returned for from_dtensors(like)."
        raise TreeError(error_text("to_dtensors: nothing where a DTensor should be", offenders=offenders, fix=fix))
    made = (wanted[path] if path in absent else _dtensor(path, leaf, wanted.get(path)) for path, leaf in pairs)
    built = rebuild(list(made))
    return join(built, select(like, lambda path, _: path in lacking)) if lacking else built


def _dtensor(path: TreePath, leaf: Any, like: Any) -> Any:
    """Return a leaf as a DTensor like another one, or as it is where there is no other one."""
    if like is None:
        return leaf
    local = leaf.data if isinstance(leaf, ShardedBase) else leaf
    what = f"to_dtensors: {render_path(path)}"
    if not isinstance(local, torch.Tensor) or is_dtensor(local):
        fix = "Load it first: pass what load returned."
        raise UnsupportedValue(error_text(what, found=type(local).__name__, expected="this rank's own tensor", fix=fix))
    held = local_tensor(like)
    if local.shape != held.shape:
        fix = "Load into from_dtensors(like), which asks for this rank's own part."
        raise ShapeError(error_text(what, found=tuple(local.shape), expected=tuple(held.shape), fix=fix))
    with torch.no_grad():
        return _built(local.detach(), held, like).requires_grad_(like.requires_grad and _can_learn(local))


def _can_learn(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _built(local: torch.Tensor, held: torch.Tensor, like: Any) -> Any:
    """Return the DTensor, on the mesh's kind of device; or on the other one's own, as FSDP2's offload has it."""
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    if held.is_meta or held.device.type == mesh.device_type:
        return DTensor.from_local(local, mesh, like.placements, shape=like.shape, stride=like.stride())
    make: Any = DTensor  # from_local would move it
    return make(local.to(held.device), like._spec, requires_grad=False)


# dtensor_layout: from one rank's DTensors, what every rank holds.


def dtensor_layout(
    tree: Any,
    *,
    key: KeyFunction = path_key,
    within: Any = None,
    strided: Strided = None,
    replicated: Callable[[str, torch.Tensor], bool] | None = None,
) -> ShardColumns:
    """Return the shards that all ranks hold of a tree's DTensors, as columns: every rank computes the same by itself.

    With ``layout=`` of this, `save` and `load` exchange no layouts. The arguments and errors are those of
    `from_dtensors`, of whose trees on all ranks these are the shards; local tensors aren't looked at.

    Args:
        tree: with DTensors, also on the meta device.
        key: as there.
        within: as there.
        strided: as there.
        replicated: as there.

    Examples:
        >>> len(dtensor_layout({"step": 3}))
        0
    """
    by_mesh: dict[Mesh, list[Placement]] = defaultdict(list)
    for each in placed_tensors(tree, Reading(key, within, strided, replicated), all_parts()):
        kind = TensorKind(each.tensor.dtype, tuple(each.tensor.shape), 0)
        by_mesh[each.mesh].append(Placement(each.key, kind, each.spec))
    return join_columns([placed_columns(placements, mesh) for mesh, placements in by_mesh.items()])
