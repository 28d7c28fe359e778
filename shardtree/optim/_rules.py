"""Rules for states that aren't shaped like their parameter: one for each parameter, shard or block; reduced axes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import torch

from ..errors import ShapeError, TreeError, error_text
from ..mapping import ShardedBase, ShardedObject, ShardedTensor
from ._leaf import PREFIX, OptimizerRule
from ._per_parameter import built_shards, first_element, per_parameter
from ._state_dict import ShardedParam, check_param

# What rules share.


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
    """Return how many axes a state has, given itself or the metadata of what is stored."""
    if isinstance(tensor, ShardedTensor):
        return len(tensor.global_shape) - shard.prepend_axis_num
    return len(getattr(tensor, "shape", ()))


def value_of(param: ShardedParam, tensor: Any) -> Any:
    """Return a state, or a meta tensor where only its metadata is known."""
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


# One value for each parameter, or for each shard.


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
    """Return a leaf for a state that each shard has of its own. It can't be loaded in another layout.

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


# One value for each block: scales of 8-bit states.


def block_scales(block_size: int) -> OptimizerRule:
    """Return the rule for states with one value for each block of a parameter's row-major elements, as 8-bit ones have.

    Optimizers count blocks from each rank's first element. Those are blocks of the whole parameter, and can be loaded
    in another layout, where each rank's elements are consecutive in the parameter, and begin and end with a block.

    Args:
        block_size: in elements.

    Raises:
        TreeError: the parameter is a factory; its elements aren't consecutive, or blocks span ranks.
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
        # A shard without elements goes to the end, where it overlaps nothing.
        begin = begin if count else whole
        aligned = begin % block_size == 0 and (count % block_size == 0 or begin + count == whole)
        if count and not (_are_consecutive(param, begin, count) and aligned):
            found = f"{param.local_shape} at {param.global_offset} of {param.global_shape}, blocks of {block_size}"
            raise unfit("block_scales", param, state_key, found, "whole blocks of the whole parameter")
        shape = (-(-count // block_size),)
        check_shape("block_scales", param, state_key, tensor, shape)
        numbers = (*param.global_shape[:front], -(-whole // block_size))
        offset = (*param.global_offset[:front], -(-begin // block_size))
        return own_leaf(param, state_key, tensor, shape, numbers, offset)

    return rule


def _are_consecutive(shard: ShardedTensor, begin: int, count: int) -> bool:
    """Return whether a shard's elements are consecutive in the tensor: then the last one's number shows it."""
    flat = shard.flattened_range or slice(0, count)
    last = replace(shard, data=None, flattened_range=slice(flat.stop - 1, flat.stop))
    return first_element(last) == begin + count - 1


# States reduced along an axis: factored second moments.

WhereCut: TypeAlias = Literal["refuse", "equal", "own"]


def reduced_axis(axis: int, *, where_cut: WhereCut = "refuse") -> OptimizerRule:
    """Return the rule for states that are a parameter reduced along an axis, such as factored second moments.

    The axis may have size 1, as in torch's Adafactor, or be missing, as in that of transformers.

    Args:
        axis: of the parameter's own shape; negative ones count from its end.
        where_cut: what to assume where several shards share the axis. "equal": ranks reduced together, so that all of
            them have the same, and it is stored once. "own": each reduced its own piece; the axis, which must have
            size 1, gets an element for each piece, and another number of pieces is an error on load. "refuse": an
            error.

    Examples:
        >>> import torch
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> row = reduced_axis(-1)(param, "row_var", torch.zeros(2, 1))
        >>> row.global_shape, row.global_offset
        ((8, 1), (2, 0))
        >>> reduced_axis(-2, where_cut="own")(param, "col_var", torch.zeros(1, 3)).global_shape
        (4, 3)

    References:
        Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
    """
    # No default guesses: moments that are equal on several shards can't be told from each shard's own before one
    # overwrites the other.
    if where_cut not in ("refuse", "equal", "own"):
        expected = "'refuse', 'equal' or 'own'"
        raise TreeError(error_text("reduced_axis: where_cut", found=repr(where_cut), expected=expected))

    def rule(param: ShardedParam, state_key: str, tensor: Any) -> ShardedTensor:
        shard = one_box("reduced_axis", param, state_key)
        axes = len(shard.local_shape)
        if not -axes <= axis < axes:
            raise unfit("reduced_axis", shard, state_key, f"{axes} axes", f"an axis {axis}")
        local = axis % axes
        place = _place(shard, local, state_key, where_cut)
        kept = axes_of(shard, tensor) == axes
        if place.pieces > 1 and not kept:
            expected = "a state that keeps the reduced axis, with size 1"
            raise unfit("reduced_axis", shard, state_key, f"{place.pieces} pieces", expected)
        shape = _with_axis(shard.local_shape, local, 1 if kept else None)
        check_shape("reduced_axis", shard, state_key, tensor, shape)
        at = shard.prepend_axis_num + local
        whole = _with_axis(shard.global_shape, at, place.pieces if kept else None)
        offset = _with_axis(shard.global_offset, at, place.index if kept else None)
        return replace(own_leaf(shard, state_key, tensor, shape, whole, offset), replica_id=place.replica_id)

    return rule


def adafactor_rules(*, where_cut: WhereCut = "refuse") -> dict[str, OptimizerRule]:
    """Return rules for the factored states of torch's Adafactor, and of the one of transformers and T5.

    Args:
        where_cut: as `reduced_axis` takes it. Where each rank runs torch's Adafactor on its own piece, it is "own".

    Examples:
        >>> list(adafactor_rules())
        ['row_var', 'col_var', 'exp_avg_sq_row', 'exp_avg_sq_col']
    """
    row, column = reduced_axis(-1, where_cut=where_cut), reduced_axis(-2, where_cut=where_cut)
    return {"row_var": row, "col_var": column, "exp_avg_sq_row": row, "exp_avg_sq_col": column}


@dataclass(frozen=True, slots=True)
class _Place:
    """A shard's place on the reduced axis of a state.

    Attributes:
        pieces: how long the axis is in the whole state.
        index: the shard's on it.
        replica_id: of its state.
    """

    pieces: int
    index: int
    replica_id: tuple[int, ...]


def _place(shard: ShardedTensor, local: int, state_key: str, where_cut: WhereCut) -> _Place:
    at = shard.prepend_axis_num + local
    whole, size, offset = shard.global_shape[at], shard.local_shape[local], shard.global_offset[at]
    replica = (shard.replica_id,) if isinstance(shard.replica_id, int) else shard.replica_id
    if size == whole:
        return _Place(1, 0, replica)
    if where_cut == "equal":
        # Only one piece has index 0 and elements: its replicas become the state's, all others are further copies.
        return _Place(1, 0, (offset if size else whole, *replica))
    if where_cut == "refuse":
        found = f"{size} of {whole} indices of axis {at}"
        raise unfit("reduced_axis", shard, state_key, found, "all of them; or where_cut='equal' or 'own'")
    if shard.axis_fragmentations is None or not size:
        raise unfit("reduced_axis", shard, state_key, "an irregular grid", "a regular one for where_cut='own'")
    return _Place(shard.axis_fragmentations[at], offset // size, replica)


def _with_axis(values: tuple[int, ...], at: int, value: int | None) -> tuple[int, ...]:
    """Return values with the one at an axis replaced, or removed."""
    return (*values[:at], *(() if value is None else (value,)), *values[at + 1 :])
