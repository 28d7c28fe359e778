"""Where a tensor of a tree lies: the mesh of all ranks that hold some of it, and how it is cut there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch

from ...errors import CheckpointingException, MetadataError, ShapeError, TreeError, TreePath, error_text, render_path
from ...layouts import KeyFunction, Mesh, Part, PartitionSpec, mesh_parts
from ...trees import call_at, leaves_with_paths, path_key
from ._meshes import mesh_of, outer_mesh
from ._specs import as_fsdp2_cuts, spec_of

Strided: TypeAlias = Literal["dtensor", "fsdp2"] | None
"""What a `_StridedShard` before a `Shard` of the same axis stands for; None: an error where that makes a difference."""

Parts: TypeAlias = Callable[[tuple[int, ...], Mesh, PartitionSpec], tuple[Part, ...]]


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
    """Return `mesh_parts` that computes each kind of tensor once."""
    return cache(mesh_parts)
