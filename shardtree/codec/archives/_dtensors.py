"""DTensors in torch.save's pickles, without torch.distributed: the mesh position and the placements, as plain records.

The classes have moved from module to module and gained attributes with torch's releases; what a reader needs has been
there since 2.4: ``_coordinate_on_dim`` of the mesh, its axes' lengths, and the placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from ...errors import UnsupportedValue, error_text
from .._header import element_count
from .._nodes import exactly
from ..pickles import Constructor, Stub, inert


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies along one axis of a mesh.

    Attributes:
        kind: whether the axis cuts the tensor, cuts what other axes left, copies it, or holds terms of a sum.
        dim: the tensor's axis that is cut.
        split_factor: of "strided": in how many pieces the axes to its right have cut before.
    """

    kind: Literal["shard", "strided", "replicate", "partial"]
    dim: int = 0
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class DTensorParts:
    """Where a rank's part of a DTensor belongs.

    Attributes:
        placements: one for each axis of the mesh.
        sizes: lengths of the mesh's axes.
        position: the rank's, on each axis.
        rank: its number among all ranks, None where the mesh doesn't tell.
    """

    placements: tuple[Placement, ...]
    sizes: tuple[int, ...]
    position: tuple[int, ...]
    rank: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A subclass of a tensor before its state is known.

    Attributes:
        dtype: of the elements.
        shape: the global tensor's.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def placed(self, state: Any, ints: Callable[[Any], tuple[int, ...]]) -> tuple[Any, DTensorParts]:
        """Return the local tensor, and where it belongs.

        Args:
            state: the DTensor's.
            ints: returns the elements of a small tensor in it.
        """
        fields = _fields(state)
        spec = _fields(_stub(fields["_spec"], "DTensorSpec").state)
        mesh = _fields(_stub(spec["mesh"], "DeviceMesh").state)
        placements = tuple(map(_placement, exactly(tuple, spec["placements"])))
        sizes = _sizes(mesh)
        position = tuple(exactly(int, at) for at in _items(mesh["_coordinate_on_dim"]))
        fits = len(placements) == len(sizes) == len(position)
        if not fits or any(not 0 <= at < size for at, size in zip(position, sizes, strict=True)):
            raise ValueError(f"a DTensor of {len(placements)} placements at {position} of a mesh {sizes}"[:200])
        return fields["_local_tensor"], DTensorParts(placements, sizes, position, _rank(mesh, sizes, position, ints))


def _wrapped(kind: Any, dtype: Any, shape: Any, *rest: Any) -> Wrapped:
    if kind is not _DTENSOR:
        raise TypeError("a subclass of torch.Tensor that isn't a DTensor")
    lengths = tuple(exactly(int, length) for length in _items(shape))
    if type(dtype) is not torch.dtype:
        raise TypeError("a DTensor without a dtype")
    element_count(lengths)
    return Wrapped(dtype, lengths)


def _fields(state: Any) -> dict[str, Any]:
    """Return the attributes of an object's state: a dict, or a dict or None with a dict of slots."""
    if type(state) is tuple and len(state) == 2:
        return {**exactly(dict, state[0] or {}), **exactly(dict, state[1] or {})}
    return exactly(dict, state)


def _stub(value: Any, name: str) -> Stub:
    if type(value) is not Stub or value.type_name.rpartition(".")[2] != name:
        raise TypeError(f"a {type(value).__name__} in place of a {name}")
    return value


def _items(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError("something in place of a tuple")
    return tuple(value)


def _placement(value: Any) -> Placement:
    if type(value) is not Stub:
        raise TypeError(f"a {type(value).__name__} in place of a placement")
    name = value.type_name.rpartition(".")[2]
    if name == "Replicate":
        return Placement("replicate")
    if name in ("Partial", "_Partial"):
        return Placement("partial")
    fields = _fields(value.state)
    if name == "Shard":
        return Placement("shard", exactly(int, fields["dim"]))
    if name == "_StridedShard":
        return Placement("strided", exactly(int, fields["dim"]), exactly(int, fields["split_factor"]))
    raise TypeError(f"a {name} in place of a placement")


def _sizes(mesh: dict[str, Any]) -> tuple[int, ...]:
    """Return the lengths of a mesh's axes."""
    if "mesh" in mesh:  # a tensor of ranks, up to torch 2.8
        return tuple(mesh["mesh"].shape)
    layout = _stub(mesh["_layout"], "_MeshLayout")
    fields = _fields(layout.state)
    if "axes" in fields:
        return tuple(_size(_fields(_stub(axis, "_FlatLayout").state)["shape"]) for axis in _items(fields["axes"]))
    shape = fields["shape"]
    return tuple(map(_size, _items(shape))) if isinstance(shape, (tuple, list)) else (exactly(int, shape),)


def _size(shape: Any) -> int:
    return prod(map(_size, shape)) if isinstance(shape, (tuple, list)) else exactly(int, shape)


def _rank(
    mesh: dict[str, Any], sizes: tuple[int, ...], position: tuple[int, ...], ints: Callable[[Any], tuple[int, ...]]
) -> int | None:
    """Return the number of the rank whose mesh it was."""
    if mesh.get("_rank") is not None:
        return exactly(int, mesh["_rank"])
    if "mesh" not in mesh:
        return None  # a submesh's own layout says nothing about the root's ranks
    at = 0
    for place, size in zip(position, sizes, strict=True):
        at = at * size + place
    return ints(mesh["mesh"])[at]


def _unsupported(what: str, fix: str) -> Constructor:
    def make(*args: Any) -> Any:
        raise UnsupportedValue(error_text(what, fix=fix))

    return Constructor(make)


def _class(*args: Any) -> Any:
    raise TypeError("a call of DTensor")


_DTENSOR = Constructor(_class)

_OLD, _NEW = "torch.distributed._tensor", "torch.distributed.tensor"
_STUBS = {
    "placement_types": ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard", "DTensorSpec", "TensorMeta"),
    "_dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
}
_FSDP1 = _unsupported(
    "a ShardedTensor, as FSDP1 saves its parameters",
    "Save with FSDP2, or load it with FSDP1 and save a whole or a torch.distributed.checkpoint state dict.",
)

DTENSOR_CLASSES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_wrapper_subclass"): Constructor(_wrapped),
    **{(module, "DTensor"): _DTENSOR for module in (_NEW, f"{_NEW}._api", f"{_OLD}.api", f"{_NEW}.api")},
    **{
        (f"{package}.{module}", name): inert(f"{package}.{module}.{name}")
        for package in (_OLD, _NEW)
        for module, names in _STUBS.items()
        for name in names
    },
    ("torch.distributed.device_mesh", "DeviceMesh"): inert("torch.distributed.device_mesh.DeviceMesh"),
    **{
        ("torch.distributed._mesh_layout", name): inert(f"torch.distributed._mesh_layout.{name}")
        for name in ("_MeshLayout", "_FlatLayout")
    },
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): _FSDP1,
}
"""Names of torch's classes of DTensors in pickles, since 2.4."""
