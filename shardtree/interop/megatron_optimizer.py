"""Megatron-Core's distributed optimizer in any layout: its default format converted, and a live one as flat shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ..core.mapping import ReplicaId, ShardedObject, ShardedTensor
from ..core.trees import rename, shard_leaves
from ..errors import CorruptCheckpoint, KeyMismatch, UnsupportedValue, error_text
from ..inspection import OpenCheckpoint
from .megatron import from_megatron

__all__ = ["model_space", "optimizer_shards"]

# Keys of objects for state that isn't a tensor, such as param_groups or a grad scaler; one for each model-parallel
# rank. Sizes of buckets are left out: they differ between pipeline stages, and the result has no buckets.
_PART = re.compile(
    r"(?:chained_(?P<optimizer>\d{1,18})\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?P<name>(?!per_bucket_numel)\w+)"
)

_OTHER_STATE = re.compile(r"chained_\d+\.(optimizer\.state\..+)", re.DOTALL)
"""Key of a state of an optimizer that isn't distributed, such as Muon, beside one that is."""

_STEP = "optimizer.state.step."

_TYPE = "fully_reshardable"

_GROUP_NAMES = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Fields by which Megatron-Core identifies a group of a checkpoint, in addition to `is_expert_parallel`."""

_GROUP_NAMES_SINCE_019 = (*_GROUP_NAMES, "max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""Fields by which Megatron-Core identifies a group from 0.19 on; a missing field counts as None."""

_Optimizers = Mapping[int | None, Mapping[str, Any]]
"""Common state of each optimizer, by number; the number is None if one optimizer has all parameters."""


def model_space(checkpoint: OpenCheckpoint, *, expert_parallel: bool | None = None) -> dict[str, Any]:
    """Return the keywords with which `convert` turns a `dp_reshardable` checkpoint into a `fully_reshardable` one.

    Megatron-Core loads the result with any tensor, pipeline, expert and data parallelism, but a `dp_reshardable`
    checkpoint only with the same model parallelism. Objects that each model-parallel rank has saved, such as
    `param_groups`, become common state, where Megatron-Core expects them in the result.

    With expert parallelism, Megatron-Core has a separate optimizer for the experts. Without it, one optimizer has all
    parameters. Megatron-Core can't load the state of two optimizers into one, or of one into two. So pass
    `expert_parallel` if the resuming run differs from the saved one in this. A run of Megatron-Core 0.19 whose `min_lr`
    differs from the saved one ends in ``KeyError: (None, 0.0001, ...)``, also with Megatron-Core's own checkpoints.

    Optimizers that aren't distributed, such as Muon beside a distributed Adam, stay as they are; their states lose the
    prefix `chained_0.`, which a `fully_reshardable` checkpoint doesn't have.

    Args:
        checkpoint: Opened checkpoint with the `dp_reshardable` optimizer.
        expert_parallel: Whether the run that loads the result has expert parallelism; None if it has the same as the
            saved run.

    Returns:
        The keywords `transform_common` and `leave_out`, and `transform` if states of other optimizers are renamed.

    Raises:
        KeyMismatch: The checkpoint has no `dp_reshardable` optimizer.
        CorruptCheckpoint: Objects that must be equal on all model-parallel ranks differ.
        UnsupportedValue: `expert_parallel` is False, but one optimizer can't keep the hyperparameters of the experts
            apart from those of other parameters; or `expert_parallel` is given, but the checkpoint also has optimizers
            that aren't distributed.

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
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_state_dict, megatron-core 0.16.1 to
        0.19.2.
    """
    parts: dict[tuple[int | None, str], Any] = {}
    differing = set()
    # With buckets, listing all names would read weights and masters, which the conversion reads again.
    names = getattr(checkpoint.metadata, "stored", None)
    for name in checkpoint if names is None else names:
        if match := _PART.fullmatch(name.rpartition("/shard_")[0]):
            shard = checkpoint[name]
            assert isinstance(shard, ShardedObject)
            place = (None if match["optimizer"] is None else int(match["optimizer"]), match["name"])
            if parts.setdefault(place, shard.data) != shard.data:
                differing.add(shard.key)
    where = checkpoint.checkpoint.storage.where()
    if not parts:
        fix = "Convert the checkpoint without model_space, which only converts dp_reshardable optimizers."
        raise KeyMismatch(error_text(f"model_space: {where!r} has no dp_reshardable optimizer", fix=fix))
    if differing:
        fix = "The checkpoint was damaged, or its ranks had diverged when it was saved; load an earlier one."
        heading = "model_space: ranks' optimizers differ"
        raise CorruptCheckpoint(error_text(heading, offenders=sorted(differing), fix=fix))
    # Older releases identify groups by fewer fields, and lose one of two groups that agree in these.
    since_019 = checkpoint.checkpoint.fields["common_backend"] == "torch_dist"  # older releases write a common.pt
    optimizers = _arrange(parts, expert_parallel, _GROUP_NAMES_SINCE_019 if since_019 else _GROUP_NAMES)
    # Megatron-Core stores the step in the groups alone.
    steps = (key for key in checkpoint if key.startswith(_STEP)) if names is None else (f"{_STEP}**",)
    left_out = ("**optimizer.distributed.dp_group_idx_**", *steps)
    numbers = {number for number, _ in parts}
    return {"transform_common": partial(_with_optimizers, optimizers, numbers), "leave_out": left_out} | (
        _rename_transform(checkpoint if names is None else names, where, expert_parallel)
    )


def _rename_transform(names: Iterable[str], where: str, expert_parallel: bool | None) -> dict[str, Any]:
    """Return the argument `transform` of `convert`, which renames the states of optimizers that are not distributed.

    Args:
        names: Stored names of the checkpoint.
        where: Location of the checkpoint in errors.
        expert_parallel: Argument of `model_space`.

    Returns:
        A dict with the argument; empty if there are no such optimizers.

    Raises:
        UnsupportedValue: There are such optimizers, and `expert_parallel` is given.
    """
    if not any(map(_OTHER_STATE.fullmatch, names)):
        return {}
    if expert_parallel is not None:
        heading = f"model_space: expert_parallel= is given, but {where!r} has optimizers that are not distributed"
        fix = "Leave expert_parallel out."
        raise UnsupportedValue(error_text(heading, found=f"expert_parallel={expert_parallel}", fix=fix))
    return {"transform": partial(rename, names=_without_number)}


def _without_number(key: str) -> str:
    return _OTHER_STATE.sub(r"\1", key)


def _arrange(
    parts: Mapping[tuple[int | None, str], Any], expert_parallel: bool | None, names: Sequence[str]
) -> _Optimizers:
    """Return the common state of each optimizer in the converted checkpoint.

    Args:
        parts: Saved objects by optimizer number and name; the number is None if one optimizer has all parameters.
        expert_parallel: True if the experts get a separate optimizer, False if one optimizer gets all parameters, None
            if the optimizers stay as they were saved.
        names: Fields by which Megatron-Core identifies a parameter group.
    """
    optimizers: dict[int | None, dict[str, Any]] = {}
    for (number, name), value in sorted(parts.items(), key=str):
        optimizers.setdefault(number, {"param_state_sharding_type": _TYPE})[name] = value
    if expert_parallel and None in optimizers:
        return {0: optimizers[None], 1: _with_groups(optimizers[None], _of_kind(optimizers[None], experts=True))}
    return (
        {None: _join([*optimizers.values()], names)}
        if expert_parallel is False and None not in optimizers
        else optimizers
    )


def _of_kind(optimizer: Mapping[str, Any], *, experts: bool) -> list[dict[str, Any]]:
    """Return copies of an optimizer's parameter groups, with the field `is_expert_parallel` set to `experts`."""
    return [{**group, "is_expert_parallel": experts} for group in optimizer["optimizer"]["param_groups"]]


def _with_groups(optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {**optimizer, "optimizer": {**optimizer["optimizer"], "param_groups": groups}}


def _join(optimizers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return one optimizer with the parameter groups of several; equal groups are merged.

    Args:
        optimizers: Common state of each optimizer. The result is the first one with all parameter groups.
        names: Fields by which Megatron-Core identifies a parameter group.

    Raises:
        UnsupportedValue: Two groups have equal identifying fields, but differ in other fields.
    """
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        groups += [group for group in _of_kind(optimizer, experts=False) if group not in groups]
    identities = [tuple(group.get(name, group.get(f"pre_{name}")) for name in names) for group in groups]
    if len(set(identities)) < len(identities):
        heading = "model_space: one optimizer cannot have different hyperparameters for experts and other parameters"
        fix = (
            "Pass expert_parallel=None, so that experts keep their own optimizer, and use expert parallelism in the "
            "resumed run, as in the saved one."
        )
        raise UnsupportedValue(error_text(heading, found=groups, fix=fix))
    return _with_groups(optimizers[0], groups)


def _with_optimizers(optimizers: _Optimizers, numbers: Collection[int | None], common: Any) -> Any:
    # Several optimizers are stored under their numbers. Megatron-Core counts these entries, and an optimizer that isn't
    # distributed has one too.
    old = ("param_state_sharding_type", *numbers)
    state = {key: value for key, value in common.get("optimizer", {}).items() if key not in old}
    for number, optimizer in optimizers.items():
        state |= optimizer if number is None else {number: optimizer}
    content = common.get("content_metadata")
    if isinstance(content, Mapping):
        common = {**common, "content_metadata": {**content, "distrib_optim_sharding_type": _TYPE}}
    return {**common, "optimizer": state}


# A live optimizer's buffers as flat shards, without a gather


def optimizer_shards(optimizer: Any, model: Any) -> dict[str, list[ShardedTensor]]:
    """Return a rank's states of a live distributed optimizer as flat shards, by key.

    Keys are `optimizer.state.<state>.<key of the model>`; the state `param` is the float32 master. Saved shards load in
    any layout. As the target of a load with ``donate=True``, the shards fill the optimizer. Nothing is gathered or
    copied: data are views of the optimizer's own tensors. The step and the groups' hyperparameters are in
    `optimizer.state_dict()`.

    Args:
        optimizer: A `DistributedOptimizer`, or a `ChainedOptimizer` of several.
        model: Sharded state dict of all model chunks whose parameters the optimizer has: Megatron-Core's own, or the
            result of `from_megatron`.

    Raises:
        KeyMismatch: The model's state dict lacks a parameter of the optimizer.
        UnsupportedValue: A factory of the model builds shards that are not contiguous in their parameter.

    Examples:
        >>> from types import SimpleNamespace
        >>> optimizer_shards(SimpleNamespace(gbuf_ranges=[]), {})
        {}

    References:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer, megatron-core 0.16.1.
    """
    leaves = shard_leaves(from_megatron(model))
    of_memory = {_memory_of(leaf.data): leaf for leaf in leaves if isinstance(leaf.data, torch.Tensor)}
    by_key: dict[str, list[ShardedTensor]] = {}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, begin in _ranges(inner):
            leaf = of_memory.get(_memory_of(parameter))
            if leaf is None:
                heading = (
                    f"optimizer_shards: a parameter of shape {tuple(parameter.shape)} is not in the model's state dict"
                )
                raise KeyMismatch(error_text(heading, fix="Pass the state dicts of all chunks of the model together."))
            states = inner._get_main_param_and_optimizer_states(parameter)
            for state, data in states.items():
                if isinstance(data, torch.Tensor) and data.dim() == 1:  # the step has no axis
                    shards = _flat_shards(leaf, f"optimizer.state.{state}.", data, begin, inner)
                    for shard in shards:
                        by_key.setdefault(shard.key, []).append(shard)
    return by_key


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _ranges(optimizer: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each parameter with states on this rank, and the offset of the rank's range in it."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start


def _flat_shards(leaf: Any, prefix: str, data: torch.Tensor, begin: int, optimizer: Any) -> Iterator[ShardedTensor]:
    """Yield flat shards of a state: one for each box of the parameter that this rank's range of elements overlaps.

    Args:
        leaf: Shard or factory of the parameter.
        prefix: Text before the parameter's key.
        data: Values of the state for the rank's range, one axis.
        begin: First element of the range in the parameter.
        optimizer: Optimizer that has the state.
    """
    for box, first in _boxes_in(leaf):
        low, high = max(begin, first), min(begin + len(data), first + prod(box.local_shape))
        if low < high:
            yield replace(
                box,
                key=prefix + box.key,
                data=data[low - begin : high - begin],
                dtype=data.dtype,
                flattened_range=slice(low - first, high - first),
                replica_id=_without_data_parallel(box, optimizer),
            )


def _without_data_parallel(box: ShardedTensor, optimizer: Any) -> ReplicaId:
    """Return a box's replica_id with its last number, the data-parallel rank, replaced.

    The new number is the index of the distributed optimizer's instance: the data-parallel ranks of one instance hold
    different ranges of a state, not replicas of it.
    """
    instance = getattr(optimizer, "distributed_optimizer_instance_id", 0)
    return (*box.replica_id[:-1], instance) if isinstance(box.replica_id, tuple) else instance


def _boxes_in(leaf: Any) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield a parameter's stored boxes, each with the offset of its first element in the parameter.

    A factory builds its boxes from a tensor that numbers the parameter's elements: 0, 1, 2 and so on. The numbers in a
    built box then tell its elements.

    Raises:
        UnsupportedValue: A box's elements are not consecutive in the parameter.
    """
    if isinstance(leaf, ShardedTensor):
        yield leaf, 0
        return
    numbers = torch.arange(leaf.data.numel(), device="cpu").view(leaf.data.shape)
    boxes = [box for box in shard_leaves(replace(leaf, data=numbers).build()) if isinstance(box, ShardedTensor)]
    for box in boxes:
        places = box.data.reshape(-1)
        first = int(places[0]) if places.numel() else 0
        if not torch.equal(places, torch.arange(first, first + places.numel(), device="cpu")):
            fix = (
                "Save this optimizer with Megatron-Core, with 'distrib_optim_sharding_type': 'fully_reshardable' in "
                "the metadata of sharded_state_dict."
            )
            raise UnsupportedValue(
                error_text(f"optimizer_shards: shards of {leaf.key!r} are not contiguous in the parameter", fix=fix)
            )
        yield replace(box, data=None, dtype=leaf.data.dtype), first
