"""from_dtensors: a tree with DTensors becomes one with our shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import ShapeError, error_text, render_path
from ...layouts import KeyFunction, part_shard
from ...mapping import ShardedTensor, ShardedTensorFactory
from ...trees import HOLE, Hole, path_key, shard_leaves, without_holes
from ._placed import Parts, Placed, Reading, Strided, all_parts, is_dtensor, placed_tensors


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
    return part_shard(placed.key, local, local.dtype, part)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a graph, once what it comes from has arrived."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        return local.detach()
