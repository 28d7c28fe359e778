"""DTensor's placements as partition specs: each tensor axis with its cuts, left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...errors import UnsupportedValue, error_text
from ...layouts import Mesh, PartitionSpec, SpecEntry, Split
from ._meshes import axis_names


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
    cuts: list[list[Split]] = [[] for _ in range(dtensor.ndim)]
    for axis, placement in zip(axis_names(dtensor.device_mesh), dtensor.placements, strict=True):
        dim = _cut_dim(placement)
        if dim is not None:
            cuts[dim].append(Split(axis, getattr(placement, "split_factor", 1)))
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


def _entry(cuts: Sequence[Split]) -> SpecEntry:
    """Return one plain cut by its name, several as they follow each other."""
    plain = len(cuts) == 1 and cuts[0].split_factor == 1
    return cuts[0].axis if plain else tuple(cuts) or None


def as_fsdp2_cuts(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Return the spec of what FSDP2 holds, for the spec that its placements name.

    It cuts what tensor parallelism has left on each rank, and names that by a cut that comes first and interleaves as
    many blocks as there are pieces. Sizes that can't be cut evenly don't always come to the same in both ways.

    Examples:
        >>> spec = PartitionSpec((Split("dp", split_factor=2), Split("tp")))
        >>> as_fsdp2_cuts(spec, Mesh(dp=2, tp=2))
        PartitionSpec((Split(axis='tp', split_factor=1), Split(axis='dp', split_factor=1)))
    """
    return PartitionSpec(*(_as_fsdp2_cuts(entry, mesh) for entry in spec.entries))


def _as_fsdp2_cuts(entry: SpecEntry, mesh: Mesh) -> SpecEntry:
    cuts = [cut for cut in entry if isinstance(cut, Split)] if isinstance(entry, tuple) else []
    for number, cut in enumerate(cuts):
        later = cuts[number + 1 :]
        if cut.split_factor > 1 and cut.split_factor == prod(mesh.shape[each.axis] for each in later):
            return (*cuts[:number], *later, replace(cut, split_factor=1))
    return entry
