"""DCP's agreement for a save of the same model: the coordinator's global plan, made of the plans of all ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

from shardtree.layouts import ShardColumns

from ._many import DTYPE, Case, by_rank, layout
from .planning_dcp import finished, global_save_plan, placed_tensor, save_planner


def dcp_tree(columns: ShardColumns) -> dict[str, Any]:
    """Return one rank's tensors, which know their places, so that DCP's arithmetic of meshes isn't counted."""
    tree: dict[str, Any] = {}
    rows = zip(columns.key.tolist(), columns.offset.tolist(), columns.shape.tolist(), strict=True)
    for number, offset, shape in rows:
        whole = columns.kinds[number].global_shape
        skip = len(shape) - len(whole)
        tree[columns.keys[number]] = placed_tensor(whole, tuple(offset[skip:]), tuple(shape[skip:]), DTYPE)
    return tree


def packed_plans(case: Case) -> list[bytes]:
    """Return each rank's local plan, as it travels to the coordinator."""
    parts = by_rank(layout(case), case.ranks)
    plans = (save_planner(dcp_tree(part), rank).create_local_plan() for rank, part in enumerate(parts))
    return [pickle.dumps(plan) for plan in plans]


def dcp_seconds(tree: dict[str, Any], packed: Sequence[bytes]) -> float:
    """Return the processor seconds of the coordinator until each rank can be told what it writes."""
    begin = time.process_time()
    planner = save_planner(tree, 0)
    planner.create_local_plan()
    plans, _ = global_save_plan(planner, [pickle.loads(each) for each in packed])
    finished([planner], plans[:1])
    return time.process_time() - begin
