"""Descriptions of archives: the saved tree with each tensor replaced by its dtype, its view and its byte offset.

DTensors are described without torch.distributed: mesh position and placements are plain records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any, Literal

import torch

from ...errors import UnsupportedValue, error_text
from ...kit import element_count, exactly
from ..pickles import Constructor, Stub, inert, read_pickle
from ._classes import NAMED, constructors
from ._decode import VALUES
from ._fill import filled_tensor
from ._payload import StoredTensor, describe_tensor, stored_tensor
from ._tensors import (
    DTYPES,
    NUMPY,
    STORAGE_KINDS,
    StorageKind,
    StorageReference,
    lazy_bits,
    rebuilders,
    storage_reference,
)
from ._zip import Archive, Read, Record, open_archive


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a tensor along one axis of a mesh.

    Attributes:
        kind: "shard" if the tensor is cut; "strided" if the parts of a previous cut are cut along the same axis, as
            FSDP2 cuts the parts of tensor parallelism; "replicate" for copies; "partial" for terms of a sum.
        dim: Axis of the tensor that is cut.
        split_factor: For "strided", number of parts of the previous cut, which was made along later axes of the mesh.
    """

    kind: Literal["shard", "strided", "replicate", "partial"]
    dim: int = 0
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class DTensorParts:
    """Position of a rank's part in a DTensor.

    Attributes:
        placements: Placement along each axis of the mesh.
        sizes: Shape of the mesh.
        position: Coordinate of the rank on each axis of the mesh.
        rank: Global rank; None if the stored mesh does not contain it.
    """

    placements: tuple[Placement, ...]
    sizes: tuple[int, ...]
    position: tuple[int, ...]
    rank: int | None


Element = Callable[[Any, tuple[int, ...]], int]
"""Function that returns an element of a tensor of integers, by its indices."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSubclass:
    """A placeholder for a DTensor until its state (the local tensor and the mesh) has been read from the pickle.

    Attributes:
        dtype: Dtype of the elements.
        shape: Shape of the global tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def local_tensor(self, state: Any, element: Element) -> tuple[Any, DTensorParts]:
        """Return the rank's local tensor, and where it lies in the DTensor.

        Args:
            state: State of the DTensor in the pickle.
            element: Function that returns an element of a stored tensor of integers, for a mesh that is such a tensor.
        """
        fields = _fields(state)
        spec = _fields(_stub(fields["_spec"], "DTensorSpec").state)
        mesh = _fields(_stub(spec["mesh"], "DeviceMesh").state)
        placements = tuple(map(_placement, exactly(tuple, spec["placements"])))
        sizes = _sizes(mesh)
        position = tuple(exactly(int, at) for at in _items(mesh["_coordinate_on_dim"]))
        fits = len(placements) == len(sizes) == len(position)
        if not fits or any(not 0 <= at < size for at, size in zip(position, sizes, strict=True)):
            raise ValueError(f"a DTensor with {len(placements)} placements at {position} of a mesh {sizes}"[:200])
        return fields["_local_tensor"], DTensorParts(placements, sizes, position, _rank(mesh, position, element))


def _subclass(kind: Any, dtype: Any, shape: Any, *rest: Any) -> TensorSubclass:
    if kind is not _DTENSOR:
        raise TypeError("a subclass of torch.Tensor that is not a DTensor")
    lengths = tuple(exactly(int, length) for length in _items(shape))
    if type(dtype) is not torch.dtype:
        raise TypeError("a DTensor without a dtype")
    element_count(lengths)
    return TensorSubclass(dtype, lengths)


def _fields(state: Any) -> dict[str, Any]:
    """Return an object's attributes by name, given its state in a pickle.

    The state is a dict, or a pair of the dict and the slots' values by name; either may be None.
    """
    if type(state) is tuple and len(state) == 2:
        return {**exactly(dict, state[0] or {}), **exactly(dict, state[1] or {})}
    return exactly(dict, state)


def _stub(value: Any, name: str) -> Stub:
    if type(value) is not Stub or value.type_name.rpartition(".")[2] != name:
        raise TypeError(f"a {type(value).__name__} in place of a {name}")
    return value


def _items(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"a {type(value).__name__} in place of a tuple")
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
    """Return the lengths of a mesh's axes, given the mesh's attributes."""
    if "mesh" in mesh:  # Up to torch 2.8, the mesh is a tensor of ranks.
        return tuple(mesh["mesh"].shape)
    layout = _stub(mesh["_layout"], "_MeshLayout")
    fields = _fields(layout.state)
    if "axes" in fields:
        return tuple(_size(_fields(_stub(axis, "_FlatLayout").state)["shape"]) for axis in _items(fields["axes"]))
    shape = fields["shape"]
    return tuple(map(_size, _items(shape))) if isinstance(shape, (tuple, list)) else (exactly(int, shape),)


def _size(shape: Any) -> int:
    return prod(map(_size, shape)) if isinstance(shape, (tuple, list)) else exactly(int, shape)


def _rank(mesh: dict[str, Any], position: tuple[int, ...], element: Element) -> int | None:
    """Return the global rank of the process that saved a mesh; None if the mesh's attributes do not contain the rank.

    Args:
        mesh: Attributes of the DeviceMesh in the pickle.
        position: Coordinate of the process on each axis of the mesh.
        element: Function that returns an element of a stored tensor of integers, for a mesh that is such a tensor.
    """
    if mesh.get("_rank") is not None:
        return exactly(int, mesh["_rank"])
    if "mesh" not in mesh:
        return None  # The layout of a submesh doesn't have the root's ranks.
    return element(mesh["mesh"], position)


def _of_fsdp1(*args: Any) -> Any:
    fix = "Load the file with FSDP1, and save its full state dict."
    raise UnsupportedValue(error_text("a torch.distributed ShardedTensor, as FSDP1 saves, cannot be read", fix=fix))


def _call(*args: Any) -> Any:
    raise TypeError("a call of a tensor's class")


_TENSOR, _DTENSOR = Constructor(_call), Constructor(_call)  # Classes are distinguished by identity.

_OLD, _NEW = "torch.distributed._tensor", "torch.distributed.tensor"
_STUBS = {
    "placement_types": ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard", "DTensorSpec", "TensorMeta"),
    "_dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
}

_DTENSOR_CLASSES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_wrapper_subclass"): Constructor(_subclass),
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
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): Constructor(_of_fsdp1),
}
"""Constructors for the names of DTensors' classes in pickles of torch 2.4 and later."""

_MOST_AXES = 64
_FIX = "Only data is read from such a file; for an enum, a dataclass or a named tuple pass LoadOptions(types=(...))."


@dataclass(frozen=True, slots=True, eq=False)
class StoredDTensor:
    """A rank's part of a DTensor, without its elements.

    Attributes:
        local: Stored tensor of the rank's part.
        shape: Shape of the global tensor.
        parts: Position of the part in the global tensor.
    """

    local: StoredTensor
    shape: tuple[int, ...]
    parts: DTensorParts


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveDescription:
    """The value in an archive, with descriptions in place of tensors.

    Attributes:
        value: Saved value; its tensors are `StoredTensor` and `StoredDTensor`.
        records: Records of the archive, in the order of their bytes.
    """

    value: Any
    records: tuple[Record, ...]


def describe_archive(
    read: Read,
    length: int,
    *,
    what: str,
    file: str,
    classes: Mapping[tuple[str, str], Any] | None = None,
    types: Iterable[type] = (),
) -> ArchiveDescription:
    r"""Return the value that torch.save saved, with descriptions in place of tensors; the bytes may be untrusted.

    Only the directory and the pickle are read. DTensors are described without torch.distributed.

    Args:
        read: Function that returns a byte range of the archive, by its first byte and one past its last.
        length: Length of the archive in bytes.
        what: Description of the archive, for errors.
        file: Name of the archive, for `StoredTensor.file`.
        classes: Constructors or values for further names in the pickle, by module and qualified name.
        types: Enums, dataclasses and named tuples that the value may contain.

    Raises:
        CorruptCheckpoint: The bytes are not such an archive, or contradict each other.
        UnsafeFile: The archive names something that is not data.
        UnsupportedValue: A tensor is quantised, sparse, or of another kind that is not read.

    Examples:
        >>> import io
        >>> out = io.BytesIO()
        >>> torch.save({"w": torch.arange(6.0)[2:], "step": 7}, out)
        >>> data = out.getvalue()
        >>> saved = describe_archive(lambda begin, end: data[begin:end], len(data), what="example", file="w.pt").value
        >>> saved["step"], saved["w"].shape, data[saved["w"].begin :][:4]
        (7, (4,), b'\x00\x00\x00@')
    """
    archive = open_archive(read, length, what)
    places = _Places(archive, file)
    names = {
        **VALUES,
        **NAMED,
        **NUMPY,
        **STORAGE_KINDS,
        **DTYPES,
        **rebuilders(places.tensor, _with_lazy_bits, StoredTensor, StoredDTensor),
        **_DTENSOR_CLASSES,
        ("torch", "Tensor"): _TENSOR,
        ("torch._tensor", "_rebuild_from_type_v2"): Constructor(places.subclass),
        **(classes or {}),
        **constructors(types),
    }
    content = archive.checked_data("data.pkl")
    helpers = frozenset({StorageKind, StorageReference, TensorSubclass})
    value = read_pickle(content, names, what=what, persistent_load=storage_reference, fix=_FIX, helpers=helpers)
    return ArchiveDescription(value, tuple(archive.records.values()))


def _with_lazy_bits(tensor: StoredTensor, extra: Any) -> StoredTensor:
    conj, neg = lazy_bits(tensor.dtype, extra)
    return replace(tensor, conj=conj, neg=neg) if conj or neg else tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Functions that a pickle's reader calls for an archive's tensors; they return descriptions.

    Attributes:
        archive: Archive that is described.
        file: Name of the archive, for `StoredTensor.file`.
    """

    archive: Archive
    file: str

    def tensor(self, *arguments: Any) -> StoredTensor:
        """Return the description of a tensor, given its storage, then offset, shape, strides and perhaps dtype."""
        return stored_tensor(describe_tensor(*arguments), self.archive, self.file)

    def subclass(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """Return the description of a DTensor, or of a plain tensor with attributes, which are ignored.

        The arguments are those of `torch._tensor._rebuild_from_type_v2`.

        Args:
            function: Constructor of the tensor without its state.
            kind: Class of the tensor.
            args: Arguments for `function`.
            state: State of the tensor, such as a DTensor's local tensor and mesh.
        """
        tensor = function.make(*args) if type(function) is Constructor and type(args) is tuple else None
        if type(tensor) is StoredTensor and kind is _TENSOR:
            return tensor  # The object's attributes, such as DeepSpeed's ids, aren't needed.
        if type(tensor) is not TensorSubclass:
            raise TypeError("an unknown subclass of torch.Tensor")
        local, parts = tensor.local_tensor(state, self._element)
        if type(local) is not StoredTensor or local.dtype != tensor.dtype or len(tensor.shape) > _MOST_AXES:
            raise ValueError("a DTensor whose local tensor is no tensor or has another dtype")
        return StoredDTensor(local, tensor.shape, parts)

    def _element(self, tensor: Any, position: tuple[int, ...]) -> int:
        if type(tensor) is not StoredTensor or tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError("a mesh whose ranks are not a tensor of integers")
        # Only this element is read: every DTensor has the mesh, and strides of 0 can make it arbitrarily large.
        begin = tensor.begin + sum(map(mul, position, tensor.stride)) * tensor.dtype.itemsize
        return int(
            filled_tensor(self.archive.read, replace(tensor, begin=begin, shape=(), stride=()), self.archive.what)
        )
