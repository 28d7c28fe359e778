"""States of a parameter's own shape: they lie as the parameter does, and are stored as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...errors import ShapeError, TreeError, error_text
from ...mapping import ShardedTensor, ShardedTensorFactory
from ...mapping.memory import check_has_shape
from ._arguments import check_param
from ._state_dict import ShardedParam

PREFIX = "optimizer.state"


def make_sharded_optimizer_tensor(model_param: ShardedParam, optim_param: torch.Tensor, prefix: str) -> ShardedParam:
    """Return a parameter's shard or factory with a moment in its place, under the parameter's key with a prefix.

    Args:
        model_param: the parameter's shard or factory.
        optim_param: a tensor of the shape of its data, of any dtype; flat where that is flat.
        prefix: put before the key, with a dot.

    Raises:
        ShapeError: the tensor has another shape than the parameter.
        TreeError: it is a DTensor, or no tensor; or the parameter isn't sharded.

    Examples:
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> moment = make_sharded_optimizer_tensor(param, torch.ones(2, 3).bfloat16(), "optimizer.state.exp_avg")
        >>> moment.key, moment.dtype, moment.global_offset
        ('optimizer.state.exp_avg.w', torch.bfloat16, (2, 0))

    References:
        megatron.core.dist_checkpointing.optimizer, megatron-core 0.16.1.
    """
    check_param("make_sharded_optimizer_tensor", model_param)
    what = f"make_sharded_optimizer_tensor: {prefix!r} of {model_param.key!r}"
    if not isinstance(optim_param, torch.Tensor) or hasattr(optim_param, "placements"):
        found = "a DTensor" if isinstance(optim_param, torch.Tensor) else type(optim_param).__name__
        fix = "For DTensors use `from_dtensors` of shardtree.interop.dtensor."
        raise TreeError(error_text(what, found=found, expected="a local tensor", fix=fix))
    check_has_shape(what, optim_param)
    expected = moment_shape(model_param)
    if expected is not None and tuple(optim_param.shape) != expected:
        fix = "Is it another parameter's, or another rank's? Tensors of another shape need a rule."
        raise ShapeError(error_text(what, found=tuple(optim_param.shape), expected=expected, fix=fix))
    return moment(model_param, optim_param, prefix)


def moment(param: ShardedParam, data: torch.Tensor, prefix: str) -> ShardedParam:
    """Return a parameter's shard or factory with other data, where it is known that they fit."""
    if isinstance(param, ShardedTensorFactory):
        return replace(param, key=f"{prefix}.{param.key}", data=data)
    return replace(param, key=f"{prefix}.{param.key}", data=data, dtype=data.dtype)


def moment_shape(param: ShardedParam) -> tuple[int, ...] | None:
    """Return the shape that a parameter's moments have on this rank; None for a factory that has no tensor."""
    if isinstance(param, ShardedTensor):
        return param.data_shape
    shape: Any = getattr(param.data, "shape", None)
    return None if shape is None else tuple(shape)
