"""Strategies for meshes, and for partition specs of every kind that fit a tensor and a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from ..layouts import AxisSplit, Mesh, PartitionSpec, SpecEntry
from ._tensors import PRINTABLE_DTYPES, shapes, tensors

_NAMES = ("dp", "tp", "pp", "cp", "ep")
_SIZES = (2, 1, 3, 4)


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 8, max_axes: int = 3, simple: bool = False) -> Mesh:
    """Return a strategy for meshes; it shrinks to one axis of one rank.

    Ranks may be in any order, and begin with any number.

    Args:
        draw: Hypothesis's own.
        max_ranks: the most ranks.
        max_axes: the most axes, up to five.
        simple: whether ranks count up from 0.

    Examples:
        >>> from hypothesis import find
        >>> find(meshes(), lambda mesh: mesh.shape.get("tp", 0) > 1).shape
        {'tp': 2}
    """
    sizes: dict[str, int] = {}
    size = 1
    for name in draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=max_axes, unique=True)):
        fitting = [one for one in sorted(_SIZES) if size * one <= max_ranks]
        sizes[name] = draw(st.sampled_from(fitting))
        size *= sizes[name]
    mesh = Mesh(**sizes)
    if simple:
        return mesh
    # A mesh of some of a job's ranks, such as one stage of a pipeline, doesn't begin with rank 0.
    first = draw(st.sampled_from([0, 0, size, 3]))
    ranks = list(range(first, first + size))
    return mesh.on_ranks(draw(st.just(ranks) | st.permutations(ranks)))


@st.composite
def partition_specs(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, *, simple: bool = False) -> PartitionSpec:
    """Return a strategy for specs that fit a tensor and a mesh; it shrinks to one that cuts nothing.

    An axis is cut by no mesh axis, one or several, jointly or one after the other, also strided; its size needn't be a
    multiple of the cuts. A tensor may be on only some of the ranks, by `at`.

    Args:
        draw: Hypothesis's own.
        shape: of the tensor.
        mesh: the ranks.
        simple: whether each axis is cut by at most one mesh axis, into equal parts, on all ranks.

    Examples:
        >>> from hypothesis import find
        >>> find(partition_specs((5, 3), Mesh(dp=2, tp=2)), lambda spec: spec.axes == ("tp",))
        PartitionSpec('tp', None)
    """
    if simple:
        entries: list[SpecEntry] = []
        left = dict(mesh.shape)
        for size in shape:
            fitting = [name for name, parts in left.items() if size % parts == 0]
            entries.append(draw(st.sampled_from([None, *fitting])))
            left.pop(str(entries[-1]), None)
        return PartitionSpec(*entries)
    cuts: list[list[str]] = [[] for _ in shape]
    at: dict[str, int] = {}
    for name in draw(st.permutations(list(mesh.shape))):
        use = draw(st.sampled_from(["replicate", *range(len(shape)), "at"]))
        if isinstance(use, int):
            cuts[use].append(name)
        elif use == "at":
            at[name] = draw(st.integers(0, mesh.shape[name] - 1))
    return PartitionSpec(*(draw(_entries(names)) for names in cuts), at=at)


def _entries(names: list[str]) -> st.SearchStrategy[SpecEntry]:
    """Return a strategy for the entries that cut a tensor axis by some mesh axes."""
    if not names:
        return st.none()
    splits = st.tuples(*(st.builds(AxisSplit, st.just(name), st.sampled_from([1, 2, 3])) for name in names))
    joint: st.SearchStrategy[SpecEntry] = st.just(tuple(names))
    return joint | splits


# Tensors with a mesh and specs.


@dataclass(frozen=True, slots=True, eq=False)
class MeshCase:
    """Tensors by key, a mesh, and partition specs.

    Attributes:
        whole: global tensors by key, the oracle for `shard`.
        mesh: the ranks.
        specs: by key.
    """

    whole: Mapping[str, torch.Tensor]
    mesh: Mesh
    specs: Mapping[str, PartitionSpec]


@st.composite
def mesh_cases(draw: st.DrawFn, *, max_ranks: int = 12, max_axes: int = 2) -> MeshCase:
    """Return a strategy for one or two tensors of any shape and dtype, a mesh, and specs that fit both.

    A rank may hold one box of a tensor, several, or none.

    Args:
        draw: Hypothesis's own.
        max_ranks: the most ranks of the mesh.
        max_axes: the most axes of a tensor.

    Examples:
        >>> from hypothesis import find
        >>> case = find(mesh_cases(), lambda case: True)
        >>> case.whole["w"].shape, case.mesh, case.specs
        (torch.Size([]), Mesh(dp=1), {'w': PartitionSpec()})
    """
    mesh = draw(meshes(max_ranks=max_ranks))
    keys = draw(st.lists(st.sampled_from(["w", "layer.w", "é"]), min_size=1, max_size=2, unique=True))
    kinds = st.sampled_from(PRINTABLE_DTYPES)
    whole = {key: draw(tensors(shapes(max_axes=max_axes), dtype=kinds)) for key in keys}
    specs = {key: draw(partition_specs(tuple(tensor.shape), mesh)) for key, tensor in whole.items()}
    return MeshCase(whole, mesh, specs)
