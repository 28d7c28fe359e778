"""A `dp_reshardable` optimizer of Megatron-Core, converted to `fully_reshardable`, which it loads in any layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..checkpoint import OpenCheckpoint
from ..errors import CorruptCheckpoint, KeyMismatch, error_text
from ..mapping import ShardedObject

__all__ = ["model_space"]

# One object for each model-parallel rank and part of the state that isn't a tensor: param_groups, a grad scaler.
_PART = re.compile(r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?P<name>\w+)")

_STEP = "optimizer.state.step."

_TYPE = "fully_reshardable"


def model_space(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return the keywords with which `convert` makes a `fully_reshardable` checkpoint of a `dp_reshardable` one.

    Megatron-Core loads the result with any tensor, pipeline, expert and data parallelism, where it can load
    `dp_reshardable` with the same model parallelism alone. What it keeps in an object for each model-parallel rank,
    such as `param_groups`, becomes common state, as it must be there.

    Args:
        checkpoint: the one with buckets, opened.

    Returns:
        `transform_common` and `leave_out`.

    Raises:
        KeyMismatch: the checkpoint has no distributed optimizer of that kind.
        CorruptCheckpoint: ranks' objects differ.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder, key = tempfile.mkdtemp(), "optimizer.distributed.dp_group_idx_0.optimizer"
        >>> groups = st.ShardedObject(key, {"param_groups": [{"lr": 0.1, "step": 3.0}]}, (1,), (0,))
        >>> st.save({"groups": groups, "optimizer": {"param_state_sharding_type": "dp_reshardable"}}, folder)
        >>> converted = tempfile.mkdtemp()
        >>> report = st.convert(folder, converted, backend="torch_dist", **model_space(st.open_checkpoint(folder)))
        >>> st.load_common_state_dict(converted)["optimizer"]["optimizer"]
        {'param_groups': [{'lr': 0.1, 'step': 3.0}]}

    References:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_state_dict, megatron-core 0.16.1.
    """
    parts: dict[tuple[str | None, str], Any] = {}
    differing = set()
    for name in checkpoint:
        if found := _PART.fullmatch(name.rpartition("/shard_")[0]):
            shard = checkpoint[name]
            assert isinstance(shard, ShardedObject)
            place = (found["optimizer"], found["name"])
            if parts.setdefault(place, shard.data) != shard.data:
                differing.add(shard.key)
    where = checkpoint.checkpoint.storage.where()
    if not parts:
        fix = "Convert it without this: its states have the model's names already."
        raise KeyMismatch(error_text(f"{where!r} has no optimizer of type dp_reshardable", fix=fix))
    if differing:
        fix = "The checkpoint was damaged, or its ranks had diverged when it was saved; load an earlier one."
        raise CorruptCheckpoint(error_text("ranks' optimizers differ", offenders=sorted(differing), fix=fix))
    # Megatron-Core has the step in the groups alone.
    left_out = ("*optimizer.distributed.dp_group_idx_*", *(key for key in checkpoint if key.startswith(_STEP)))
    return {"transform_common": partial(_with_parts, parts), "leave_out": left_out}


def _with_parts(parts: Mapping[tuple[str | None, str], Any], common: Any) -> Any:
    optimizer = dict(common.get("optimizer", {}))
    for (number, name), value in parts.items():
        part = {"param_state_sharding_type": _TYPE, name: value}
        if number is None:
            optimizer |= part
        else:  # several optimizers, such as that of the experts, stand under their numbers
            optimizer[int(number)] = {**optimizer.get(int(number), {}), **part}
    content = common.get("content_metadata")
    if isinstance(content, Mapping):
        common = {**common, "content_metadata": {**content, "distrib_optim_sharding_type": _TYPE}}
    return {**common, "optimizer": optimizer}
