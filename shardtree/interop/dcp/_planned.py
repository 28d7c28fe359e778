"""Helpers of the reader and the writer: the names that DCP gives to plain values, and checks of boxes in its plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.futures import Future

from ...core.mapping import ShardedBase, ShardedTensor
from ...core.trees import HOLE, flatten_with_paths
from ...errors import MetadataError, ShapeError, TreeError, TreePath, UnsupportedValue, error_text
from ...shell.storage import Directory
from ..dtensor import from_dtensors


def named(directory: Directory | None) -> Directory:
    """Return the checkpoint's path, URL or storage; raise MetadataError if it is None."""
    if directory is None:
        fix = "Pass checkpoint_id= to DCP's call, or checkpoint_dir to the reader or writer."
        raise MetadataError(error_text("dcp: no checkpoint is named", fix=fix))
    return directory


def flattened(common: Any) -> tuple[dict[str, Any], dict[str, TreePath]]:
    """Flatten a common state as DCP flattens a state.

    Args:
        common: Common state, whose lists have `HOLE` in place of tensors.

    Returns:
        ``(values, paths)``: the plain values by the names that DCP gives them, and the path of each in the state.
    """
    pairs, rebuild = flatten_with_paths(common if isinstance(common, Mapping) else {})
    # DCP names the entries of a list by their positions if there is a tensor among them.
    tensor = torch.empty(0, device="cpu")
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(rebuild([tensor if leaf is HOLE else leaf for _, leaf in pairs]))
    except ValueError as error:
        heading, fix = (
            "dcp.load: two plain values of the checkpoint have the same name in torch.distributed.checkpoint",
            "Load the checkpoint with st.load, rename one of them in the tree, and save it again.",
        )
        raise TreeError(error_text(heading, found=error, fix=fix)) from error
    values = {name: value for name, value in planner.state_dict.items() if value is not tensor}
    return values, {name: planner.mappings[name] for name in values}


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def _box(shard: ShardedBase) -> Box | None:
    return (shard.global_offset, shard.local_shape) if isinstance(shard, ShardedTensor) else None


def refuse_other_boxes(what: str, planner: Any, boxes: Sequence[tuple[str, Box]]) -> None:
    """Raise UnsupportedValue if this rank's part of a DTensor isn't the box that DCP assumes.

    Args:
        what: Name of the call, for the error.
        planner: DCP's planner, whose attribute `state_dict` has the DTensors. DCP's default planner has it; without it,
            nothing is checked.
        boxes: Name of each tensor in this rank's plan, with the box that DCP assumes for the rank's part.
    """
    kept = getattr(planner, "state_dict", None)
    state: Mapping[str, Any] = kept if isinstance(kept, Mapping) else {}
    counts, problems = Counter(name for name, _ in boxes), []
    for name, box in boxes:
        # Several boxes for a part in DCP's plan come from a tensor subclass that states its boxes itself.
        if counts[name] > 1 or 0 in box[1]:
            continue
        try:
            shard = from_dtensors({name: state.get(name)})[name]
        except ShapeError as error:
            problems.append(f"{name}: {error}")
            continue
        if isinstance(shard, ShardedBase) and _box(shard) != box:
            problems.append(f"{name}: {state[name].placements}")
    if problems:
        heading = f"{what}: DCP assumes wrong offsets or shapes of these DTensors' local shards"
        fix = "Use st.save and st.load with shardtree.interop.dtensor.from_dtensors(state), which handle such shards."
        raise UnsupportedValue(error_text(heading, offenders=problems, fix=fix))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
