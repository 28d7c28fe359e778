"""Trees of whole tensors, meshes and specs, for the laws of layouts that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from shardtree.layouts import Mesh, PartitionSpec, ShardColumns
from shardtree.testing import PRINTABLE_DTYPES, meshes, outline, partition_specs, shapes, tensors


@dataclass(frozen=True)
class Case:
    """Tensors by key, the mesh that they are cut for, and how."""

    whole: Mapping[str, torch.Tensor]
    mesh: Mesh
    specs: Mapping[str, PartitionSpec]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a strategy for tensors of any shape and dtype, a mesh and specs; ranks hold a box, several, or none."""
    mesh = draw(meshes(max_ranks=12))
    keys = draw(st.lists(st.sampled_from(["w", "layer.w", "é"]), min_size=1, max_size=2, unique=True))
    dtypes = st.sampled_from(PRINTABLE_DTYPES)
    whole = {key: draw(tensors(shapes(max_axes=2), dtype=dtypes)) for key in keys}
    return Case(whole, mesh, {key: draw(partition_specs(tuple(tensor.shape), mesh)) for key, tensor in whole.items()})


def rows(columns: ShardColumns) -> list[tuple[Any, ...]]:
    """Return what each row of columns says, sorted: equal lists are equal layouts."""
    boxes = np.concatenate([columns.offset, columns.shape, columns.start[:, None], columns.stop[:, None]], axis=1)
    table = zip(columns.key.tolist(), boxes.tolist(), columns.rank.tolist(), columns.main.tolist(), strict=True)
    return sorted((columns.keys[key], str(columns.kinds[key]), *row) for key, *row in table)


def same(left: Any, right: Any) -> bool:
    """Return whether two trees are the same, bit for bit."""
    return bool(outline(left) == outline(right))
