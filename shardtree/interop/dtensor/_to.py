"""to_dtensors: what was loaded, or a tree of shards, becomes DTensors again."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ShapeError, TreeError, TreePath, UnsupportedValue, error_text, render_path
from ...mapping import ShardedBase
from ...trees import join, leaves_with_paths, select, shard_leaves
from ._from import local_tensor
from ._placed import is_dtensor


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
