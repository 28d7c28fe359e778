"""Where a tensor of a tree lies: the mesh of all ranks that hold some of it, and how it is cut there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ...errors import (
    CheckpointingException,
    MetadataError,
    ShapeError,
    TreeError,
    TreePath,
    UnsupportedValue,
    error_text,
    render_path,
)
from ...layouts import AxisSplit, KeyFunction, Mesh, PartitionSpec, RankShard, SpecEntry, mesh_shards
from ...trees import call_at, leaves_with_paths, path_key

# DeviceMeshes as meshes: a sub-mesh is seen within the mesh that it is a slice of.


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


# DTensor's placements as partition specs: each tensor axis with its cuts, left to right.


def spec_of(dtensor: Any) -> PartitionSpec:
    """Return how a DTensor is cut, in the axes of its own mesh.

    Args:
        dtensor: of any placements but `Partial`; its elements aren't looked at.

    Raises:
        UnsupportedValue: it isn't a DTensor, or a placement is `Partial`, of an unknown kind, or cuts in another order
            than left to right.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> mesh = SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        >>> spec_of(SimpleNamespace(device_mesh=mesh, placements=(Replicate(), Shard(1)), ndim=2))
        PartitionSpec(None, 'tp')

    References:
        torch.distributed.tensor.placement_types, torch 2.13.
    """
    if not hasattr(dtensor, "placements"):
        what, found = "spec_of: not a DTensor", type(dtensor).__name__
        raise UnsupportedValue(error_text(what, found=found, fix="Other tensors don't say how they are cut."))
    cuts: list[list[AxisSplit]] = [[] for _ in range(dtensor.ndim)]
    for axis, placement in zip(axis_names(dtensor.device_mesh), dtensor.placements, strict=True):
        dim = _cut_dim(placement)
        if dim is not None:
            cuts[dim].append(AxisSplit(axis, getattr(placement, "split_factor", 1)))
    _check_order(dtensor)
    return PartitionSpec(*map(_entry, cuts))


def _cut_dim(placement: Any) -> int | None:
    """Return the axis that a placement cuts; None where it replicates."""
    if placement.is_partial():
        fix = "Call .redistribute() with Replicate() or Shard() in its place: that puts together what ranks hold."
        what = f"a DTensor is Partial, {placement}: what a rank holds of an element is a part of its value"
        raise UnsupportedValue(error_text(what, fix=fix))
    if placement.is_replicate():
        return None
    if type(placement).__name__ not in ("Shard", "_StridedShard"):
        fix = "Call .redistribute() with one of these."
        what, expected = "a DTensor's placement is of an unknown kind", "Shard, _StridedShard or Replicate"
        raise UnsupportedValue(error_text(what, found=placement, expected=expected, fix=fix))
    return int(placement.dim)


def _check_order(dtensor: Any) -> None:
    """Raise where torch was told of an order of cuts that the placements alone don't tell of."""
    order = getattr(getattr(dtensor, "_spec", None), "shard_order", None) or ()
    odd = [f"axis {tensor_dim}: {mesh_dims}" for tensor_dim, mesh_dims in order if list(mesh_dims) != sorted(mesh_dims)]
    if odd:
        what, fix = "a DTensor's axis is cut by mesh axes in another order", "Call .redistribute() with its placements."
        raise UnsupportedValue(error_text(what, offenders=odd, expected="left to right", fix=fix))


def _entry(cuts: Sequence[AxisSplit]) -> SpecEntry:
    """Return one plain cut by its name, several as they follow each other."""
    plain = len(cuts) == 1 and cuts[0].split_factor == 1
    return cuts[0].axis if plain else tuple(cuts) or None


def as_fsdp2_cuts(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return the spec of what FSDP2 holds, for the spec that its placements name.

    It cuts what tensor parallelism has left on each rank, and names that by a cut that comes first and interleaves as
    many blocks as there are pieces. Sizes that can't be cut evenly don't always come to the same in both ways.

    Examples:
        >>> spec = PartitionSpec((AxisSplit("dp", split_factor=2), AxisSplit("tp")))
        >>> as_fsdp2_cuts(spec, Mesh(dp=2, tp=2))
        PartitionSpec((AxisSplit(axis='tp', split_factor=1), AxisSplit(axis='dp', split_factor=1)))
    """
    return PartitionSpec(*(_as_fsdp2_cuts(entry, mesh) for entry in spec.entries))


def _as_fsdp2_cuts(entry: SpecEntry, mesh: Mesh) -> SpecEntry:
    cuts = [cut for cut in entry if isinstance(cut, AxisSplit)] if isinstance(entry, tuple) else []
    for number, cut in enumerate(cuts):
        later = cuts[number + 1 :]
        if cut.split_factor > 1 and cut.split_factor == prod(mesh.shape[each.axis] for each in later):
            return (*cuts[:number], *later, replace(cut, split_factor=1))
    return entry


Strided: TypeAlias = Literal["dtensor", "fsdp2"] | None
"""What a `_StridedShard` before a `Shard` of the same axis stands for; None: an error where that makes a difference."""

Parts: TypeAlias = Callable[[tuple[int, ...], Mesh, PartitionSpec], tuple[RankShard, ...]]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a tree's tensors are read; the options of `from_dtensors`, with the same names.

    Attributes:
        key: names the tensor at a path.
        within: the DeviceMesh whose ranks all hold the tree; or None.
        strided: what a `_StridedShard` stands for.
        replicated: says of a key and a plain tensor whether all these ranks hold the same; or None.
    """

    key: KeyFunction
    within: Any
    strided: Strided
    replicated: Callable[[str, torch.Tensor], bool] | None

    def __post_init__(self) -> None:
        if self.strided not in (None, "dtensor", "fsdp2"):
            what, expected = "from_dtensors: no such meaning of a strided cut", "'dtensor', 'fsdp2' or None"
            raise MetadataError(error_text(what, found=repr(self.strided), expected=expected))
        for name, given in (("key", self.key), ("replicated", self.replicated)):
            if given is not None and not callable(given):
                what = f"from_dtensors: {name} isn't a function"
                raise MetadataError(error_text(what, found=type(given).__name__, expected="a function"))
        if self.replicated is not None and self.within is None:
            what, fix = "from_dtensors: replicated= without within=", "Pass the DeviceMesh that they are replicated on."
            raise MetadataError(error_text(what, fix=fix))


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor of a tree, and where it lies.

    Attributes:
        path: in the tree.
        key: its name.
        tensor: itself, a DTensor or one that is replicated.
        device_mesh: its own.
        mesh: all ranks that hold some of it.
        spec: how it is cut there.
    """

    path: TreePath
    key: str
    tensor: Any
    device_mesh: Any
    mesh: Mesh
    spec: PartitionSpec


def is_dtensor(leaf: Any) -> bool:
    """Return whether a leaf is a DTensor.

    Examples:
        >>> is_dtensor(torch.zeros(2))
        False
    """
    if not isinstance(leaf, torch.Tensor) or type(leaf) is torch.Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(leaf, DTensor)


def placed_tensors(tree: Any, reading: Reading, parts: Parts) -> Iterator[Placed]:
    """Yield the DTensors of a tree, and the plain tensors that are replicated, each with the place that it has.

    Raises:
        CheckpointingException: one has no place, or one that isn't clear; names its key and path.
        TreeError: two paths are the same once they are joined.
    """
    outer, seen = cache(outer_mesh), dict[str, TreePath]()
    for path, leaf in leaves_with_paths(tree):
        if is_dtensor(leaf):
            key = call_at(path, reading.key, path)
            try:
                mesh = outer(leaf.device_mesh, reading.within)
                spec = _chosen(tuple(leaf.shape), mesh, spec_of(leaf), reading.strided, parts)
            except CheckpointingException as error:
                error.add_note(f"of {key!r} at {render_path(path)}")
                raise
            _check_key(key, path, reading, seen)
            yield Placed(path, key, leaf, leaf.device_mesh, mesh, spec)
        elif reading.replicated is not None and isinstance(leaf, torch.Tensor):
            key = call_at(path, reading.key, path)
            if call_at(path, reading.replicated, key, leaf):
                _check_key(key, path, reading, seen)
                yield Placed(path, key, leaf, reading.within, mesh_of(reading.within), PartitionSpec())


def _check_key(key: str, path: TreePath, reading: Reading, seen: dict[str, TreePath]) -> None:
    """Enter a key; raise TreeError where another path has it that nobody gave it to."""
    other = seen.setdefault(key, path)
    if other != path and reading.key is path_key:
        offenders, fix = [render_path(other), render_path(path)], "Pass key=, or rename one of them."
        raise TreeError(error_text(f"from_dtensors: two paths have the key {key!r}", offenders=offenders, fix=fix))


def _chosen(
    global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, strided: Strided, parts: Parts
) -> PartitionSpec:
    """Return the spec that a strided cut stands for."""
    other = as_fsdp2_cuts(spec, mesh)
    if strided == "dtensor" or other == spec:
        return spec
    if strided == "fsdp2":
        return other
    pairs = zip(parts(global_shape, mesh, spec), parts(global_shape, mesh, other), strict=True)
    if any(left.shape != right.shape or (left.spans != right.spans and 0 not in left.shape) for left, right in pairs):
        what = f"a DTensor of shape {global_shape} on {mesh}, cut by {spec}, can be meant in two ways"
        fix = (
            "Pass strided='fsdp2' for what fully_shard made of a parallelised module, strided='dtensor' for what "
            "distribute_tensor made: for a size that isn't a multiple of all ranks these differ."
        )
        raise ShapeError(error_text(what, fix=fix))
    return other  # where all is alike, the one of fewer boxes


def all_parts() -> Parts:
    """Return `mesh_shards` that computes each kind of tensor once."""
    return cache(mesh_shards)
