"""dtensor_layout: from one rank's DTensors, what every rank holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...layouts import KeyFunction, Mesh, ShardColumns, TensorKind, join_columns
from ...layouts.meshes import Placement, placed_columns
from ...trees import path_key
from ._placed import Reading, Strided, all_parts, placed_tensors


def dtensor_layout(
    tree: Any,
    *,
    key: KeyFunction = path_key,
    within: Any = None,
    strided: Strided = None,
    replicated: Callable[[str, torch.Tensor], bool] | None = None,
) -> ShardColumns:
    """Return the shards that all ranks hold of a tree's DTensors, as columns: every rank computes the same by itself.

    With ``layout=`` of this, `save` and `load` exchange no layouts. The arguments and errors are those of
    `from_dtensors`, of whose trees on all ranks these are the shards; local tensors aren't looked at.

    Args:
        tree: with DTensors, also on the meta device.
        key: as there.
        within: as there.
        strided: as there.
        replicated: as there.

    Examples:
        >>> len(dtensor_layout({"step": 3}))
        0
    """
    by_mesh: dict[Mesh, list[Placement]] = defaultdict(list)
    for each in placed_tensors(tree, Reading(key, within, strided, replicated), all_parts()):
        kind = TensorKind(each.tensor.dtype, tuple(each.tensor.shape), 0)
        by_mesh[each.mesh].append(Placement(each.key, kind, each.spec))
    return join_columns([placed_columns(placements, mesh) for mesh, placements in by_mesh.items()])
