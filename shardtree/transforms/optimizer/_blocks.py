"""The rule for states with one value for each block of a parameter: scales of 8-bit states."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ...errors import TreeError, error_text
from ...mapping import ShardedTensor
from ._arguments import check_param
from ._first import first_element
from ._leaf import OptimizerRule
from ._rule_parts import check_shape, own_leaf, unfit
from ._state_dict import ShardedParam


def block_scales(block_size: int) -> OptimizerRule:
    """Return the rule for states with one value for each block of a parameter's row-major elements, as 8-bit ones have.

    Blocks begin anew at each rank's first element. They are those of the whole parameter, and can be loaded in another
    layout, where each rank's elements follow each other in the whole parameter, and begin and end where a block does.

    Args:
        block_size: in elements.

    Raises:
        TreeError: the parameter is a factory; its elements don't follow each other, or blocks lie across ranks.
        ShapeError: there are more or fewer values than blocks.

    Examples:
        >>> import torch
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 8), (0, 1, 4))
        >>> scales = block_scales(4)(param, "absmax", torch.zeros(4))
        >>> scales.global_shape, scales.global_offset
        ((16,), (4,))

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
    """
    if not isinstance(block_size, int) or block_size < 1:
        raise TreeError(error_text("block_scales: block_size", found=repr(block_size), expected="a count of elements"))

    def rule(param: ShardedParam, state_key: str, tensor: Any) -> ShardedTensor:
        check_param("block_scales", param)
        if not isinstance(param, ShardedTensor):
            raise unfit("block_scales", param, state_key, "a factory", "one box, or a flat range of one")
        front = param.prepend_axis_num
        whole, begin, count = prod(param.global_shape[front:]), first_element(param), prod(param.data_shape)
        begin = begin if count else whole
        aligned = begin % block_size == 0 and (count % block_size == 0 or begin + count == whole)
        if count and not (_follow(param, begin, count) and aligned):
            found = f"{param.local_shape} at {param.global_offset} of {param.global_shape}, blocks of {block_size}"
            raise unfit("block_scales", param, state_key, found, "whole blocks of the whole parameter")
        shape = (-(-count // block_size),)
        check_shape("block_scales", param, state_key, tensor, shape)
        numbers = (*param.global_shape[:front], -(-whole // block_size))
        offset = (*param.global_offset[:front], -(-begin // block_size))
        return own_leaf(param, state_key, tensor, shape, numbers, offset)

    return rule


def _follow(shard: ShardedTensor, begin: int, count: int) -> bool:
    """Return whether a shard's elements follow each other in the whole tensor: then the last one tells."""
    flat = shard.flattened_range or slice(0, count)
    last = replace(shard, data=None, flattened_range=slice(flat.stop - 1, flat.stop))
    return first_element(last) == begin + count - 1
