"""DeviceMeshes as meshes: a sub-mesh is seen within the mesh that it is a slice of."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...errors import MetadataError, error_text
from ...layouts import Mesh


def mesh_of(device_mesh: Any) -> Mesh:
    """Return a DeviceMesh as a mesh: the same axes, and the same global ranks on them.

    Axes without names are called "axis0", "axis1", and so on. Of a sub-mesh, this process is told of its own slice.

    Args:
        device_mesh: torch.distributed's.

    Raises:
        MetadataError: it isn't a mesh, or a slice that this process isn't in, so that nobody knows which.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> mesh_of(SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")))
        Mesh(dp=2, tp=2)
    """
    try:
        ranks = device_mesh.mesh
    except RuntimeError as error:
        what, fix = "mesh_of: this process isn't in the sub-mesh", "Pass the whole mesh, or a slice that it is in."
        raise MetadataError(error_text(what, found=error, fix=fix)) from error
    except AttributeError as error:
        what, expected = "mesh_of: not a DeviceMesh", "what init_device_mesh returns, or a slice of it"
        raise MetadataError(error_text(what, found=type(device_mesh).__name__, expected=expected)) from error
    names = axis_names(device_mesh)
    return Mesh(**dict(zip(names, ranks.shape, strict=True))).on_ranks(ranks.flatten().tolist())


def axis_names(device_mesh: Any) -> tuple[str, ...]:
    """Return the names of a DeviceMesh's axes, made up where it has none."""
    return tuple(device_mesh.mesh_dim_names or (f"axis{number}" for number in range(device_mesh.mesh.ndim)))


def outer_mesh(device_mesh: Any, within: Any = None) -> Mesh:
    """Return the mesh of all ranks that hold tensors like this one: a slice and its likes, the outer axes first.

    Args:
        device_mesh: the tensor's own mesh.
        within: the mesh that it is a slice of; its root mesh by default.

    Raises:
        MetadataError: it isn't a slice of that.
    """
    return widened(mesh_of(device_mesh), mesh_of(root_of(device_mesh) if within is None else within))


def root_of(device_mesh: Any) -> Any:
    """Return the mesh that a sub-mesh was taken from; any other mesh itself."""
    if hasattr(device_mesh, "_get_root_mesh"):
        return device_mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.6 or so

    return _mesh_resources.get_root_mesh(device_mesh)


def widened(own: Mesh, outer: Mesh) -> Mesh:
    """Return a slice of a mesh with that mesh's other axes in front, on the ranks of all slices like it.

    A flattened axis is one that varies along several axes of the outer mesh.

    Raises:
        MetadataError: the one isn't a slice of the other.

    Examples:
        >>> widened(Mesh(dp=2).on_ranks([1, 3]), Mesh(dp=2, tp=2))
        Mesh(tp=2, dp=2).on_ranks((0, 2, 1, 3))
    """
    names, sizes = list(outer.shape), list(outer.shape.values())
    place = {rank: number for number, rank in enumerate(outer.ranks)}
    if not place.keys() >= set(own.ranks):
        raise _no_slice(own, outer)
    places = np.stack(np.unravel_index([place[rank] for rank in own.ranks], [*sizes, 1]))[:-1]
    varies = [bool((row != row[0]).any()) for row in places]
    inner = [axis for axis, does in enumerate(varies) if does]
    if prod(sizes[axis] for axis in inner) != own.size:
        raise _no_slice(own, outer)
    others = [axis for axis, does in enumerate(varies) if not does]
    slices = np.array(outer.ranks).reshape(sizes).transpose([*others, *inner]).reshape(-1, own.size)
    order = np.zeros(own.size, dtype=np.int64)
    for axis in inner:
        order = order * sizes[axis] + places[axis]
    left = {_free(names[axis], own): sizes[axis] for axis in others if sizes[axis] > 1}
    return Mesh(**left, **own.shape).on_ranks(slices[:, order].flatten().tolist())


def _free(name: str, own: Mesh) -> str:
    """Return a name that a mesh doesn't have."""
    while name in own.shape:
        name = f"outer_{name}"
    return name


def _no_slice(own: Mesh, outer: Mesh) -> MetadataError:
    what, fix = "a DTensor's mesh isn't a slice of the mesh that it should be in", "Pass that mesh as within=..."
    return MetadataError(error_text(what, found=own, expected=f"a slice of {outer}", fix=fix))
