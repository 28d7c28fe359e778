"""Rules for what there is one of: one for each parameter, one for each shard."""

from __future__ import annotations

from typing import Any

import torch

from ...mapping import ShardedObject, ShardedTensor
from ._moments import PREFIX
from ._per_parameter import per_parameter
from ._rule_parts import one_box, unfit, value_of
from ._state_dict import ShardedParam


def one_per_parameter(param: ShardedParam, state_key: str, tensor: Any) -> Any:
    """Return a leaf for a tensor of any shape, or a value, that is the same on all shards of a parameter.

    It is stored once; the main replica is that of the rank that has the parameter's first element.

    Args:
        param: the parameter's shard or factory.
        state_key: the state's name.
        tensor: the state.

    Examples:
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> one_per_parameter(param, "code", torch.zeros(256)).global_shape
        (256,)
    """
    return per_parameter(param, f"{PREFIX}.{state_key}", value_of(param, tensor))


def one_per_shard(param: ShardedParam, state_key: str, tensor: Any) -> ShardedTensor | ShardedObject:
    """Return a leaf for what each shard of a parameter has of its own: it can't be loaded in another layout.

    It is stored as an array with a place for each piece of the grid; another layout asks for another array, which is
    an error.

    Args:
        param: the parameter's shard: one box of a regular grid.
        state_key: the state's name.
        tensor: the state: a tensor, of one shape on all shards, or any value.

    Raises:
        TreeError: the parameter is a factory, a flat range, or on an irregular grid.

    Examples:
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> own = one_per_shard(param, "seed", torch.zeros(5))
        >>> own.global_shape, own.global_offset
        ((4, 1, 5), (1, 0, 0))
    """
    shard = one_box("one_per_shard", param, state_key)
    if shard.axis_fragmentations is None:
        raise unfit("one_per_shard", shard, state_key, "an irregular grid", "a regular grid")
    count, place = shard.axis_fragmentations, shard.local_chunk_offset_in_global()
    key = f"{PREFIX}.{state_key}.{shard.key}"
    if isinstance(tensor, ShardedTensor):
        tensor = torch.empty(tensor.global_shape[len(count) :], dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, torch.Tensor):
        return ShardedObject(key, value_of(param, tensor), count or (1,), place or (0,), shard.replica_id)
    shape = tuple(tensor.shape)
    offset = (*place, *(0,) * len(shape))
    whole = (*count, *shape)
    return ShardedTensor(key, tensor, tensor.dtype, shape, whole, offset, None, shard.replica_id, len(count))
