"""Tensors, a mesh and specs that cut them for it: what laws of layouts that follow from a mesh run over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from ..layouts import Mesh, PartitionSpec
from ._dtypes import PRINTABLE_DTYPES
from ._meshes import meshes, partition_specs
from ._shapes import shapes
from ._tensors import tensors


@dataclass(frozen=True, slots=True, eq=False)
class MeshCase:
    """Tensors by key, the mesh that they are cut for, and how.

    Attributes:
        whole: global tensors by key, the oracle of what `shard` cuts.
        mesh: the ranks.
        specs: how each tensor is cut.
    """

    whole: Mapping[str, torch.Tensor]
    mesh: Mesh
    specs: Mapping[str, PartitionSpec]


@st.composite
def mesh_cases(draw: st.DrawFn, *, max_ranks: int = 12, max_axes: int = 2) -> MeshCase:
    """Return a strategy for one or two tensors of any shape and dtype, a mesh, and specs that fit both.

    Ranks hold a box of a tensor, several, or none.

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
