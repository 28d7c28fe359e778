"""What rules for states of other shapes have in common: a state's kind, the leaf that it becomes, and refusals."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ShapeError, TreeError, error_text
from ...mapping import ShardedBase, ShardedObject, ShardedTensor
from ._arguments import check_param
from ._moments import PREFIX
from ._per_parameter import built_shards
from ._state_dict import ShardedParam


def own_leaf(
    shard: ShardedTensor,
    state_key: str,
    tensor: Any,
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    offset: tuple[int, ...],
) -> ShardedTensor:
    data = None if isinstance(tensor, ShardedTensor) else tensor
    key = f"{PREFIX}.{state_key}.{shard.key}"
    return ShardedTensor(key, data, tensor.dtype, shape, whole, offset, None, shard.replica_id, shard.prepend_axis_num)


def axes_of(shard: ShardedTensor, tensor: Any) -> int:
    """Return how many axes a state has, told by itself or by what is stored of it."""
    if isinstance(tensor, ShardedTensor):
        return len(tensor.global_shape) - shard.prepend_axis_num
    return len(getattr(tensor, "shape", ()))


def value_of(param: ShardedParam, tensor: Any) -> Any:
    """Return a state, or a stand-in for one of which only the metadata is known."""
    if isinstance(tensor, ShardedTensor):
        front = next((shard.prepend_axis_num for shard in built_shards(param)), 0)
        return torch.empty(tensor.global_shape[front:], dtype=tensor.dtype, device="meta")
    return tensor.data if isinstance(tensor, ShardedObject) else tensor


def check_shape(rule: str, shard: ShardedTensor, state_key: str, tensor: Any, expected: tuple[int, ...]) -> None:
    """Raise unless a state, where there is one, has the shape that follows from the parameter's."""
    if isinstance(tensor, ShardedTensor):
        return
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != expected:
        found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        what = f"{rule}: {state_key!r} of {shard.key!r}"
        raise ShapeError(error_text(what, found=found, expected=f"{expected} for {shard.data_shape}"))


def one_box(rule: str, param: ShardedParam, state_key: str) -> ShardedTensor:
    check_param(rule, param)
    if not isinstance(param, ShardedTensor) or param.flattened_range is not None:
        found = "a flat range" if isinstance(param, ShardedTensor) else "a factory"
        raise unfit(rule, param, state_key, found, "one box")
    return param


def unfit(rule: str, param: ShardedBase, state_key: str, found: str, expected: str) -> TreeError:
    fix = "Write a rule of your own for it, or keep what each shard has with `one_per_shard`."
    return TreeError(error_text(f"{rule}: {state_key!r} of {param.key!r}", found=found, expected=expected, fix=fix))
