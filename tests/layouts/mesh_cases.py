"""What laws of layouts that follow from meshes and specs ask of trees and columns, beside the kit's own cases."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardtree.layouts import ShardColumns
from shardtree.testing import MeshCase as Case
from shardtree.testing import mesh_cases as cases
from shardtree.testing import outline

__all__ = ["Case", "cases", "rows", "same"]


def rows(columns: ShardColumns) -> list[tuple[Any, ...]]:
    """Return what each row of columns says, sorted: equal lists are equal layouts."""
    boxes = np.concatenate([columns.offset, columns.shape, columns.start[:, None], columns.stop[:, None]], axis=1)
    table = zip(columns.key.tolist(), boxes.tolist(), columns.rank.tolist(), columns.main.tolist(), strict=True)
    return sorted((columns.keys[key], str(columns.kinds[key]), *row) for key, *row in table)


def same(left: Any, right: Any) -> bool:
    """Return whether two trees are the same, bit for bit."""
    return bool(outline(left) == outline(right))
