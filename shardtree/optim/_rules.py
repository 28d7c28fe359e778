"""Rules for optimizer states whose axes aren't those of the parameter.

These are states with one value per parameter, states with one value per block of elements, square preconditioners, and
states with a layout of their own on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ..core.geometry import as_int
from ..core.mapping import ShardedTensor
from ..errors import ShapeError, TreeError, error_text
from ..meshes import Mesh, PartitionSpec, abstract_at, from_local
from ._axes import AxisCut, WhereCut, check_where_cut, cuts_of, one_per_shard, placed, unfit
from ._leaf import PREFIX, OptimizerRule, OptimizerState
from ._per_parameter import built_shards, first_element, per_parameter
from ._state_dict import ShardedParam, check_param

# One value for each parameter, or for each shard.


def value_of(param: ShardedParam, state: OptimizerState) -> Any:
    """Return the tensor or value of an optimizer state; if only a stored tensor's metadata is known, a meta tensor."""
    if state.dtype is None or not state.is_stored:
        return state.data
    front = next((shard.prepend_axis_num for shard in built_shards(param)), 0)
    return torch.empty(state.own_sizes(front), dtype=state.dtype, device="meta")


def one_per_parameter(param: ShardedParam, state_key: str, state: Any) -> Any:
    """Return a leaf for a state of any shape that is the same on all shards of a parameter.

    It is stored once; the main replica is on the rank that has the parameter's first element.

    Args:
        param: Shard or factory of the parameter.
        state_key: Name of the state.
        state: The state, given as an `OptimizerState`, a tensor or a plain value.

    Examples:
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> one_per_parameter(param, "code", torch.zeros(256)).global_shape
        (256,)
    """
    return per_parameter(param, f"{PREFIX}.{state_key}", value_of(param, OptimizerState.of(state)))


def square_preconditioners(*, where_cut: WhereCut = "refuse") -> dict[str, OptimizerRule]:
    """Return rules for the preconditioners of Shampoo and SOAP: square matrices, one for each axis of a parameter.

    The rules are for the states ``precond_0``, ``inv_precond_0`` (or ``pre_cond_0``, ``inv_pre_cond_0``) and so on, and
    for SOAP's lists ``GG`` and ``Q``. An axis without a matrix may have a placeholder, such as None.

    Args:
        where_cut: Assumption about cut parameters. "equal": the optimizer preconditions whole parameters, so that all
            shards have the same state, which is stored once. "own": each shard is preconditioned separately, and its
            state can be loaded only with the same cuts. "refuse": an error.

    Examples:
        >>> import torch
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> equal, own = (square_preconditioners(where_cut=each)["precond_*"] for each in ("equal", "own"))
        >>> equal(param, "precond_0", torch.eye(8)).global_shape, own(param, "precond_0", torch.eye(2)).global_shape
        ((8, 8), (4, 1, 2, 2))

    References:
        Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization", 2018.
        Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024.
    """
    check_where_cut("square_preconditioners", where_cut)

    def rule(param: ShardedParam, state_key: str, state: Any) -> Any:
        wrapped = OptimizerState.of(state)
        shards = built_shards(param)
        sizes = wrapped.own_sizes(next((shard.prepend_axis_num for shard in shards), 0))
        if wrapped.dtype is not None and not wrapped.is_stored and (len(sizes) != 2 or sizes[0] != sizes[1]):
            heading = f"square_preconditioners: {state_key!r} of {param.key!r} is not a square matrix"
            fix = "If this state is no preconditioner, give it another rule, such as `one_per_parameter`."
            raise ShapeError(error_text(heading, found=f"sizes {sizes}", expected="two equal sizes", fix=fix))
        if where_cut == "own":
            return one_per_shard(param, state_key, wrapped)
        if wrapped.dtype is not None and where_cut == "refuse" and any(_is_cut(shard) for shard in shards):
            raise unfit(
                "square_preconditioners",
                param,
                state_key,
                "a part of the parameter",
                "the whole parameter; or where_cut='equal' or 'own'",
            )
        return one_per_parameter(param, state_key, wrapped)

    return dict.fromkeys(("precond_*", "inv_precond_*", "pre_cond_*", "inv_pre_cond_*", "GG", "Q"), rule)


def _is_cut(shard: ShardedTensor) -> bool:
    return shard.flattened_range is not None or any(cut.size != cut.whole for cut in cuts_of(shard))


def on_mesh(
    mesh: Mesh,
    spec: PartitionSpec,
    rank: int,
    *,
    shape: Callable[[ShardedParam], Sequence[int]] | None = None,
) -> OptimizerRule:
    """Return the rule for states that have a layout of their own, given by a mesh and a spec.

    Args:
        mesh: Mesh of the ranks.
        spec: Partition spec of the state, whatever the parameter's layout.
        rank: This rank, which must be on the mesh.
        shape: Function from the parameter to the shape of the whole state. A save needs it if the ranks' parts of the
            state differ in size.

    Examples:
        >>> import torch
        >>> from shardtree.layouts import Mesh, PartitionSpec
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(8, 3))
        >>> left = on_mesh(Mesh(dp=4), PartitionSpec("dp"), 1)(param, "left", torch.zeros(2, 8))
        >>> left.global_shape, left.global_offset
        ((8, 8), (2, 0))
    """

    def rule(param: ShardedParam, state_key: str, state: Any) -> Any:
        check_param("on_mesh", param)
        wrapped, key = OptimizerState.of(state), f"{PREFIX}.{state_key}.{param.key}"
        if wrapped.dtype is None or any(shard.prepend_axis_num for shard in built_shards(param)):
            found = "a parameter with prepended axes" if wrapped.dtype is not None else type(wrapped.data).__name__
            raise unfit("on_mesh", param, state_key, found, "a tensor, and a parameter without prepended axes")
        if wrapped.is_stored:
            whole = torch.empty(wrapped.sizes, dtype=wrapped.dtype, device="meta")
            return abstract_at([whole], mesh, spec, rank, key=lambda _: key)[0]
        shapes = None if shape is None else {key: shape(param)}
        return from_local([wrapped.data], mesh, spec, rank, key=lambda _: key, global_shapes=shapes)[0]

    return rule


# States with one value for each block: scales of 8-bit states.


def block_scales(block_size: int) -> OptimizerRule:
    """Return the rule for states with one value per block of consecutive elements, such as the scales of 8-bit states.

    Elements are counted in row-major order. Optimizers count blocks from each rank's first element. If each rank's
    elements are consecutive in the parameter, and begin and end at block boundaries, these blocks are also blocks of
    the whole parameter, and the state can be loaded in another layout.

    Args:
        block_size: Number of elements in a block.

    Raises:
        TreeError: The block size isn't a positive integer. When the rule is applied: the parameter is a factory, its
            elements aren't consecutive, or a block spans ranks.
        ShapeError: When the rule is applied: the number of values differs from the number of blocks.

    Examples:
        >>> import torch
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 8), (0, 1, 4))
        >>> scales = block_scales(4)(param, "absmax", torch.zeros(4))
        >>> scales.global_shape, scales.global_offset
        ((16,), (4,))

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
    """
    elements_of_block = as_int(block_size)
    if elements_of_block is None or elements_of_block < 1:
        raise TreeError(error_text("block_scales: unusable block_size", found=repr(block_size), expected="1 or more"))
    block_size = elements_of_block

    def rule(param: ShardedParam, state_key: str, state: Any) -> ShardedTensor:
        check_param("block_scales", param)
        if not isinstance(param, ShardedTensor):
            raise unfit("block_scales", param, state_key, "a factory", "one box, or a flat range of one box")
        front = param.prepend_axis_num
        whole, begin, count = prod(param.global_shape[front:]), first_element(param), prod(param.data_shape)
        # A shard without elements goes to the end, where it overlaps nothing.
        begin = begin if count else whole
        is_aligned = begin % block_size == 0 and (count % block_size == 0 or begin + count == whole)
        if count and not (_are_consecutive(param, begin, count) and is_aligned):
            found = f"{param.local_shape} at {param.global_offset} of {param.global_shape}, blocks of {block_size}"
            raise unfit("block_scales", param, state_key, found, "consecutive whole blocks of the whole parameter")
        blocks = AxisCut(*(-(-elements // block_size) for elements in (count, begin, whole)))
        return placed("block_scales", param, state_key, OptimizerState.of(state), [blocks], param.replica_id)

    return rule


def _are_consecutive(shard: ShardedTensor, begin: int, count: int) -> bool:
    """Return whether a shard's elements are consecutive in the row-major global tensor.

    Args:
        shard: A box or a flat range of a box.
        begin: Row-major index of the shard's first element.
        count: Number of the shard's elements.
    """
    flat = shard.flattened_range or slice(0, count)
    last = replace(shard, data=None, flattened_range=slice(flat.stop - 1, flat.stop))
    return first_element(last) == begin + count - 1
