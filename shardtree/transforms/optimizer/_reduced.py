"""The rule for states that are a parameter reduced along an axis: factored second moments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ...errors import TreeError, error_text
from ...mapping import ShardedTensor
from ._leaf import OptimizerRule
from ._rule_parts import axes_of, check_shape, one_box, own_leaf, unfit
from ._state_dict import ShardedParam

WhereCut: TypeAlias = Literal["refuse", "equal", "own"]


def reduced_axis(axis: int, *, where_cut: WhereCut = "refuse") -> OptimizerRule:
    """Return the rule for states that are a parameter reduced along an axis, such as factored second moments.

    The axis may have size 1, as in torch's Adafactor, or be missing, as in that of transformers.

    Args:
        axis: of the parameter's own shape; negative ones count from its end.
        where_cut: what holds where several shards share the axis. "equal": ranks reduced together, so that all of
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
    """Where a shard's state lies on the reduced axis.

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
        # One piece begins at 0 and has a length: its replicas count.
        return _Place(1, 0, (offset if size else whole, *replica))
    if where_cut == "refuse":
        found = f"{size} of {whole} indices of axis {at}"
        raise unfit("reduced_axis", shard, state_key, found, "all of them; or where_cut='equal' or 'own'")
    if shard.axis_fragmentations is None or not size:
        raise unfit("reduced_axis", shard, state_key, "an irregular grid", "a regular one for where_cut='own'")
    return _Place(shard.axis_fragmentations[at], offset // size, replica)


def _with_axis(values: tuple[int, ...], at: int, value: int | None) -> tuple[int, ...]:
    """Return values with another one at an axis, or without that axis."""
    return (*values[:at], *(() if value is None else (value,)), *values[at + 1 :])
