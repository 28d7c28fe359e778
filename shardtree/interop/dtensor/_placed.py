"""The layout of a DTensor: the mesh of all ranks that hold shards of it, and its partition spec on that mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ...core.trees import call_at, leaves_with_paths, path_key, refuse_shapeless
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
from ...meshes import AxisSplit, KeyFunction, Mesh, PartitionSpec, RankShard, SpecEntry, mesh_shards

# DeviceMeshes as meshes; sub-meshes as slices of a larger mesh.


def mesh_of(device_mesh: Any) -> Mesh:
    """Return a DeviceMesh as a mesh: the same axes, and the same global ranks on them.

    Axes without names are called "axis0", "axis1", and so on. A sub-mesh gives the slice that this process is in.

    Args:
        device_mesh: DeviceMesh of torch.distributed.

    Raises:
        MetadataError: `device_mesh` isn't a DeviceMesh, or is a slice that this process isn't in, so that torch doesn't
            know its ranks.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> mesh_of(SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")))
        Mesh(dp=2, tp=2)
    """
    try:
        ranks = device_mesh.mesh
    except RuntimeError as error:
        heading = "mesh_of: this process is not in the sub-mesh"
        fix = "Pass the whole mesh, or a slice that contains this process."
        raise MetadataError(error_text(heading, found=error, fix=fix)) from error
    except AttributeError as error:
        heading, expected = "mesh_of: not a DeviceMesh", "what init_device_mesh returns, or a slice of it"
        raise MetadataError(error_text(heading, found=type(device_mesh).__name__, expected=expected)) from error
    names = axis_names(device_mesh)
    return Mesh(**dict(zip(names, ranks.shape, strict=True))).on_ranks(ranks.flatten().tolist())


def axis_names(device_mesh: Any) -> tuple[str, ...]:
    """Return the names of a DeviceMesh's axes; "axis0" and so on if they have no names."""
    return tuple(device_mesh.mesh_dim_names or (f"axis{number}" for number in range(device_mesh.mesh.ndim)))


def outer_mesh(device_mesh: Any, within: Any = None) -> Mesh:
    """Return the mesh of all ranks that hold a tensor, which may be more than those of the tensor's DeviceMesh.

    If the DeviceMesh is a slice of a larger mesh, the parallel slices hold the tensor too. The result then has a first
    axis over these slices, followed by the axes of the DeviceMesh.

    Args:
        device_mesh: DeviceMesh of the tensor.
        within: Larger mesh, as a DeviceMesh or a `Mesh`; by default the root mesh of `device_mesh`.

    Raises:
        MetadataError: `device_mesh` is not a slice of the larger mesh.
    """
    outer = root_of(device_mesh) if within is None else within
    return widened(mesh_of(device_mesh), outer if isinstance(outer, Mesh) else mesh_of(outer))


def root_of(device_mesh: Any) -> Any:
    """Return the mesh that a sub-mesh was sliced from; any other mesh is returned unchanged."""
    if hasattr(device_mesh, "_get_root_mesh"):
        return device_mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.6 or so

    return _mesh_resources.get_root_mesh(device_mesh)


def widened(own: Mesh, outer: Mesh) -> Mesh:
    """Return a mesh over all ranks of `outer`, whose last axes are those of its slice `own`.

    Parallel slices, which are shifted copies of `own`, must tile the outer mesh's sequence of ranks. If there are
    several, a new first axis numbers them. The outer mesh's axes don't matter: those of the slice may be flattened,
    split or concatenated ones.

    Args:
        own: The slice.
        outer: Mesh with all ranks.

    Raises:
        MetadataError: `own` is not a slice of `outer`.

    Examples:
        >>> widened(Mesh(dp=2).on_ranks([1, 3]), Mesh(world=4))
        Mesh(outer_dp=2, dp=2).on_ranks((0, 2, 1, 3))
    """
    place = {rank: number for number, rank in enumerate(outer.ranks)}
    if not place.keys() >= set(own.ranks):
        raise _not_a_slice(own, outer)
    places = np.array([place[rank] for rank in own.ranks])
    steps, free, slices = places - places.min(), np.ones(outer.size, dtype=bool), list[list[int]]()
    # Parallel slices take the same steps from other places. The first place in no slice so far begins the next one.
    for first in range(outer.size):
        if free[first]:
            here = first + steps
            if here.max() >= outer.size or not free[here].all():
                raise _not_a_slice(own, outer)
            free[here] = False
            slices.append(here.tolist())
    if places.tolist() not in slices:
        raise _not_a_slice(own, outer)
    # The new axis is named after all axes of the slice, so that none of them has the same name.
    new_axis = {f"outer_{'_'.join(own.shape)}": len(slices)} if len(slices) > 1 else {}
    return Mesh(**new_axis, **own.shape).on_ranks(outer.ranks[number] for row in slices for number in row)


def _not_a_slice(own: Mesh, outer: Mesh) -> MetadataError:
    heading, fix = (
        "a DTensor's mesh is not a slice of the mesh of all ranks (within=)",
        "Pass as within= the DeviceMesh that the DTensor's mesh was sliced from.",
    )
    expected = f"a slice of {outer}"
    return MetadataError(error_text(heading, found=own, expected=expected, fix=fix))


# DTensor's placements as partition specs: for each tensor axis the mesh axes that cut it, left to right.


def spec_of(dtensor: Any) -> PartitionSpec:
    """Return a DTensor's partition spec: for each tensor axis, the axes of the DTensor's own mesh that cut it.

    Args:
        dtensor: DTensor with any placements except `Partial`; its elements aren't accessed.

    Raises:
        UnsupportedValue: `dtensor` is not a DTensor, or a placement is `Partial` or of an unknown kind, or several mesh
            axes cut a tensor axis in another order than left to right.

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
        heading, found = "spec_of: not a DTensor", type(dtensor).__name__
        raise UnsupportedValue(
            error_text(heading, found=found, fix="Pass a DTensor: other tensors have no placements.")
        )
    cuts: list[list[AxisSplit]] = [[] for _ in range(dtensor.ndim)]
    for axis, placement in zip(axis_names(dtensor.device_mesh), dtensor.placements, strict=True):
        dim = _cut_dim(placement)
        if dim is not None:
            cuts[dim].append(AxisSplit(axis, getattr(placement, "split_factor", 1)))
    # Newer versions of torch record the order of cuts separately: the placements alone don't show it.
    order = getattr(getattr(dtensor, "_spec", None), "shard_order", None) or ()
    odd = [
        f"tensor axis {tensor_dim}: sharded over mesh axes {list(mesh_dims)}, expected {sorted(mesh_dims)}"
        for tensor_dim, mesh_dims in order
        if list(mesh_dims) != sorted(mesh_dims)
    ]
    if odd:
        heading, fix = (
            "a DTensor is sharded over mesh axes in another order than ascending",
            "Call .redistribute() with Replicate() on every mesh axis, then with these placements, in ascending order.",
        )
        raise UnsupportedValue(error_text(heading, offenders=odd, fix=fix))
    return PartitionSpec(*map(_entry, cuts))


def _cut_dim(placement: Any) -> int | None:
    """Return the tensor axis that a placement cuts; None if it replicates."""
    if placement.is_partial():
        fix = "Reduce them by .redistribute(), with Replicate() or Shard() in place of Partial."
        heading = f"a DTensor has a Partial placement, {placement}: its values have to be reduced over ranks first"
        raise UnsupportedValue(error_text(heading, fix=fix))
    if placement.is_replicate():
        return None
    if type(placement).__name__ not in ("Shard", "_StridedShard"):
        fix = "Call .redistribute() with Shard or Replicate placements."
        heading, expected = "a DTensor's placement is of an unknown kind", "Shard, _StridedShard or Replicate"
        raise UnsupportedValue(error_text(heading, found=placement, expected=expected, fix=fix))
    return int(placement.dim)


def _entry(cuts: Sequence[AxisSplit]) -> SpecEntry:
    """Return the spec entry of one tensor axis, given the mesh axes that cut it.

    The entry is None without cuts, the mesh axis's name for a single cut with `split_factor` 1, else the tuple of cuts.
    """
    plain = len(cuts) == 1 and cuts[0].split_factor == 1
    return cuts[0].axis if plain else tuple(cuts) or None


def as_fsdp2_cuts(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return the spec of the shards that FSDP2 really makes, given the spec that follows from its placements.

    FSDP2 cuts the shards of tensor parallelism further. Its placements describe this in the reverse order: first a cut
    into interleaved blocks (`_StridedShard`), then the cut of tensor parallelism. The two orders can give different
    shards if a size is not divisible by the number of ranks.

    Args:
        spec: Partition spec of a DTensor's placements.
        mesh: Mesh with the axes of the spec.

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
        if cut.split_factor > 1 and cut.split_factor == prod(mesh.shape[later_cut.axis] for later_cut in later):
            return (*cuts[:number], *later, replace(cut, split_factor=1))
    return entry


Strided: TypeAlias = Literal["dtensor", "fsdp2"] | None
"""The meaning of a `_StridedShard` before a `Shard` of the same axis; None: an error where that makes a difference."""

Parts: TypeAlias = Callable[[tuple[int, ...], Mesh, PartitionSpec], tuple[RankShard, ...]]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of `from_dtensors`, with the same names.

    Attributes:
        key: Function that returns the key of the tensor at a path.
        within: DeviceMesh or `Mesh` of all ranks that hold the tree; None for each DTensor's root mesh.
        strided: Meaning of a `_StridedShard`: "dtensor" or "fsdp2". With None, a tensor is an error if the two meanings
            give it different shards.
        replicated: Function that returns, for a key and a plain tensor, whether the tensor is the same on all ranks of
            `within`; None if no plain tensor becomes a shard.
    """

    key: KeyFunction
    within: Any
    strided: Strided
    replicated: Callable[[str, torch.Tensor], bool] | None

    def __post_init__(self) -> None:
        if self.strided not in (None, "dtensor", "fsdp2"):
            heading, expected = "from_dtensors: unknown value of strided", "'dtensor', 'fsdp2' or None"
            raise MetadataError(error_text(heading, found=repr(self.strided), expected=expected))
        for name, value in (("key", self.key), ("replicated", self.replicated)):
            if value is not None and not callable(value):
                heading = f"from_dtensors: {name} is not a function"
                raise MetadataError(error_text(heading, found=type(value).__name__, expected="a function"))
        if self.replicated is not None and (self.within is None or isinstance(self.within, Mesh)):
            # A Mesh doesn't know which of its ranks this one is.
            heading = "from_dtensors: replicated= needs within=, a DeviceMesh"
            fix = "Pass as within= the DeviceMesh of all ranks that hold the tensors selected by replicated=."
            raise MetadataError(error_text(heading, fix=fix))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """A tensor of a tree and its layout.

    Attributes:
        path: Path of the tensor in the tree.
        key: Key of the tensor.
        tensor: DTensor, or plain tensor that is replicated.
        device_mesh: DeviceMesh of the tensor.
        mesh: Mesh of all ranks that hold shards of the tensor.
        spec: Partition spec on `mesh`.
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
    # Imported here only: torch.distributed.tensor takes long to import, and most trees have plain tensors.
    from torch.distributed.tensor import DTensor

    return isinstance(leaf, DTensor)


def placed_tensors(tree: Any, reading: ReadOptions, parts: Parts) -> Iterator[PlacedTensor]:
    """Yield the DTensors of a tree, and the plain tensors that are replicated, each with its layout.

    Args:
        tree: Any tree.
        reading: Options of `from_dtensors`.
        parts: Function that returns the shard of each rank for a global shape, a mesh and a spec; see `all_parts`.

    Raises:
        CheckpointingException: A layout isn't supported, or is ambiguous; the error names its key and path.
        TreeError: Two paths have the same key.
    """
    outer, seen = cache(outer_mesh), dict[str, TreePath]()
    for path, leaf in leaves_with_paths(tree):
        if is_dtensor(leaf):
            key = call_at(path, reading.key, path)
            try:
                mesh = outer(leaf.device_mesh, reading.within)
                spec = _resolve_strided(tuple(leaf.shape), mesh, spec_of(leaf), reading.strided, parts)
            except CheckpointingException as error:
                error.add_note(f"of {key!r} at {render_path(path)}")
                raise
            _check_key(key, path, reading, seen)
            yield PlacedTensor(path, key, leaf, leaf.device_mesh, mesh, spec)
        elif reading.replicated is not None and isinstance(leaf, torch.Tensor):
            key = call_at(path, reading.key, path)
            if call_at(path, reading.replicated, key, leaf):
                refuse_shapeless("from_dtensors", [(path, leaf)])
                _check_key(key, path, reading, seen)
                yield PlacedTensor(path, key, leaf, reading.within, mesh_of(reading.within), PartitionSpec())


def _check_key(key: str, path: TreePath, reading: ReadOptions, seen: dict[str, TreePath]) -> None:
    """Register the key of a path; raise TreeError if the default key function gave another path the same key."""
    # With the caller's own key function, two paths may have the same key on purpose.
    other = seen.setdefault(key, path)
    if other != path and reading.key is path_key:
        offenders, fix = [render_path(other), render_path(path)], "Pass key=, or rename one of them."
        raise TreeError(error_text(f"from_dtensors: two paths have the key {key!r}", offenders=offenders, fix=fix))


def _resolve_strided(
    global_shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec, strided: Strided, parts: Parts
) -> PartitionSpec:
    """Return the spec after reading strided cuts as DTensor's or as FSDP2's, as `strided` demands.

    Without a choice (None), both readings must give every rank the same shard.

    Raises:
        ShapeError: There is no choice, and the readings give different shards.
    """
    # Both meanings give the same shards unless a size isn't a multiple of the ranks in certain ways. A rank can't tell
    # from its own shard which was meant, since only other ranks' shards may differ: so every rank compares all of them.
    other = as_fsdp2_cuts(spec, mesh)
    if strided == "dtensor" or other == spec:
        return spec
    if strided == "fsdp2":
        return other
    pairs = zip(parts(global_shape, mesh, spec), parts(global_shape, mesh, other), strict=True)
    if any(left.shape != right.shape or (left.spans != right.spans and 0 not in left.shape) for left, right in pairs):
        heading = f"a DTensor of shape {global_shape} on {mesh}, cut by {spec}, is ambiguous"
        fix = (
            "Pass strided='fsdp2' if fully_shard made the shards, or strided='dtensor' if distribute_tensor made them: "
            "these functions make different shards of this tensor."
        )
        raise ShapeError(error_text(heading, fix=fix))
    return other  # both give the same shards; this spec describes them by fewer boxes


def all_parts() -> Parts:
    """Return `mesh_shards` with a cache of its results, since many tensors of a model have the same shape and spec."""
    return cache(mesh_shards)
