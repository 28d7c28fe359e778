"""Shared by the reader and the writer: DCP's names of plain values, and what DCP takes a rank's part for."""

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
    """Return the place of the checkpoint, once one is named."""
    if directory is None:
        fix = "Pass checkpoint_id= to DCP's call, or checkpoint_dir to the reader or writer."
        raise MetadataError(error_text("dcp: no checkpoint is named", fix=fix))
    return directory


def flattened(common: Any) -> tuple[dict[str, Any], dict[str, TreePath]]:
    """Return plain values by name, and their paths, as DCP flattens a state.

    Args:
        common: A common state; holes in its lists are where tensors were.
    """
    pairs, rebuild = flatten_with_paths(common if isinstance(common, Mapping) else {})
    # DCP names the entries of a list by their positions if there is a tensor among them.
    tensor = torch.empty(0, device="cpu")
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(rebuild([tensor if leaf is HOLE else leaf for _, leaf in pairs]))
    except ValueError as error:
        what, fix = "dcp.load: two plain values have one name", "Rename one of them, and save the checkpoint again."
        raise TreeError(error_text(what, found=error, fix=fix)) from error
    values = {name: value for name, value in planner.state_dict.items() if value is not tensor}
    return values, {name: planner.mappings[name] for name in values}


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def _box(shard: ShardedBase) -> Box | None:
    return (shard.global_offset, shard.local_shape) if isinstance(shard, ShardedTensor) else None


def refuse_other_boxes(what: str, planner: Any, boxes: Sequence[tuple[str, Box]]) -> None:
    """Raise UnsupportedValue if DCP takes a rank's part of a DTensor for a box that it isn't.

    Args:
        what: Name of the call.
        planner: DCP's planner; of one that doesn't keep the state as its default does, nothing is known.
        boxes: Name of each tensor that this rank has a part of, with the box that DCP takes the part for.
    """
    kept = getattr(planner, "state_dict", None)
    state: Mapping[str, Any] = kept if isinstance(kept, Mapping) else {}
    counts, problems = Counter(name for name, _ in boxes), []
    for name, box in boxes:
        # A part with several boxes in DCP's plan is of a tensor subclass that says so itself.
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
        heading = f"{what}: DTensors whose parts aren't the single boxes that DCP takes them for"
        fix = "Use st.save and st.load with shardtree.interop.dtensor.from_dtensors(state), which know such parts."
        raise UnsupportedValue(error_text(heading, offenders=problems, fix=fix))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
