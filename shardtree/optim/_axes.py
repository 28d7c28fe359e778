"""Rules that derive the shards of optimizer states from the axes of their parameters; and helpers of all rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ..core.geometry import as_int
from ..core.mapping import ReplicaId, ShardedBase, ShardedObject, ShardedTensor
from ..errors import ShapeError, TreeError, error_text
from ._leaf import PREFIX, OptimizerRule, OptimizerState
from ._state_dict import ShardedParam, check_param

# Helpers of all rules.

WhereCut: TypeAlias = Literal["refuse", "equal", "own"]


class AxisCut(NamedTuple):
    """This rank's part of an axis of a parameter or of its state.

    Attributes:
        size: Length of this rank's part.
        offset: Offset of this rank's part in the whole axis.
        whole: Length of the whole axis.
    """

    size: int
    offset: int
    whole: int


def placed(
    rule: str,
    shard: ShardedTensor,
    state_key: str,
    state: OptimizerState,
    axes: Sequence[AxisCut | None],
    replica_id: ReplicaId,
) -> ShardedTensor:
    """Return the shard of a state for a save or a load, cut along its axes as `axes` says.

    Args:
        rule: Name of the rule in errors.
        shard: Shard of the parameter.
        state_key: Name of the state.
        state: The state; it gives the lengths of axes that aren't cut.
        axes: This rank's part of each axis of the state; None for an axis that isn't cut.
        replica_id: Replica id of the result.

    Raises:
        ShapeError: The state's shape isn't the shape that follows from the parameter's.
    """
    front, sizes = shard.prepend_axis_num, state.own_sizes(shard.prepend_axis_num)
    expected = tuple(
        cut.size if cut is not None else sizes[axis] if axis < len(sizes) else 0 for axis, cut in enumerate(axes)
    )
    if state.dtype is None or len(sizes) != len(axes) or not (state.is_stored or sizes == expected):
        found = type(state.data).__name__ if state.dtype is None else sizes
        axis_texts = ["any" if cut is None else str(cut.size) for cut in axes]
        shape = f"({', '.join(axis_texts)}{',' * (len(axes) == 1)})"
        text = f"{shape} for a parameter of shape {shard.data_shape}"
        raise ShapeError(
            error_text(f"{rule}: wrong shape of {state_key!r} of {shard.key!r}", found=found, expected=text)
        )
    cuts = [cut or AxisCut(size, 0, size) for cut, size in zip(axes, sizes, strict=True)]
    return ShardedTensor(
        f"{PREFIX}.{state_key}.{shard.key}",
        state.data,
        state.dtype,
        expected,
        (*shard.global_shape[:front], *(cut.whole for cut in cuts)),
        (*shard.global_offset[:front], *(cut.offset for cut in cuts)),
        None,
        replica_id,
        front,
    )


def one_box(rule: str, param: ShardedParam, state_key: str) -> ShardedTensor:
    check_param(rule, param)
    if not isinstance(param, ShardedTensor) or param.flattened_range is not None:
        found = "a flat range" if isinstance(param, ShardedTensor) else "a factory"
        raise unfit(rule, param, state_key, found, "one box")
    return param


def unfit(rule: str, param: ShardedBase, state_key: str, found: str, expected: str) -> TreeError:
    fix = "Write a rule of your own for it, or keep each shard's own state with `one_per_shard`."
    heading = f"{rule}: the rule cannot be applied to {state_key!r} of {param.key!r}"
    return TreeError(error_text(heading, found=found, expected=expected, fix=fix))


def cuts_of(shard: ShardedTensor) -> list[AxisCut]:
    """Return the part that a shard has of each axis of its parameter, without prepended axes."""
    front = shard.prepend_axis_num
    return list(map(AxisCut, shard.local_shape, shard.global_offset[front:], shard.global_shape[front:]))


def check_where_cut(rule: str, where_cut: object, choices: Sequence[str] = ("refuse", "equal", "own")) -> None:
    if where_cut not in choices:
        expected = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise TreeError(error_text(f"{rule}: unknown value of where_cut", found=repr(where_cut), expected=expected))


# States cut as their parameters are, along some of their axes.


def along(*axes: int | None, where_cut: Literal["refuse", "equal"] = "refuse") -> OptimizerRule:
    """Return the rule for states whose axes are each cut like an axis of the parameter, or not cut.

    Args:
        axes: For each axis of the state, the parameter's axis that has the same length and the same cuts; None for an
            axis that only the state has, which is whole on every shard. Negative axes count from the parameter's end.
        where_cut: Treatment of parameters that are cut along an axis without a counterpart in the state. "equal": all
            shards along that axis have equal states, and one is stored. "refuse": an error.

    Examples:
        >>> import torch
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4))
        >>> pairs = along(0, None)(param, "pairs", torch.zeros(2, 5))
        >>> pairs.global_shape, pairs.global_offset
        ((8, 5), (2, 0))
    """
    places = [None if axis is None else as_int(axis) for axis in axes]
    numbers = [place for place in places if place is not None]
    if len(set(numbers)) < sum(axis is not None for axis in axes):
        expected = "for each axis of the state, the number of the parameter's axis or None, and no number twice"
        raise TreeError(error_text("along: unusable axes", found=repr(axes)[:200], expected=expected))
    check_where_cut("along", where_cut, ("refuse", "equal"))

    def rule(param: ShardedParam, state_key: str, state: Any) -> ShardedTensor:
        shard, cuts = one_box("along", param, state_key), cuts_of(one_box("along", param, state_key))
        if not all(-len(cuts) <= axis < len(cuts) for axis in numbers):
            raise unfit("along", shard, state_key, f"a parameter of {len(cuts)} axes", f"one that has axes {numbers}")
        cut_axes = [None if place is None else cuts[place] for place in places]
        others = [cut for axis, cut in enumerate(cuts) if not {axis, axis - len(cuts)} & {*numbers}]
        apart = [cut for cut in others if cut.size != cut.whole]
        if apart and where_cut == "refuse":
            found = f"{shard.local_shape} at {shard.global_offset} of {shard.global_shape}"
            expected = "a shard cut only along the axes given to `along`; or where_cut='equal'"
            raise unfit("along", shard, state_key, found, expected)
        return placed("along", shard, state_key, OptimizerState.of(state), cut_axes, copies(shard, apart))

    return rule


def copies(shard: ShardedTensor, apart: Sequence[AxisCut]) -> ReplicaId:
    """Return the replica id of a state that is equal on several shards of a parameter, so that one of them stores it.

    Args:
        shard: Shard of the parameter.
        apart: The shard's part of each cut axis along which the state doesn't vary. Shards that differ only in these
            parts have equal states.
    """
    replica = (shard.replica_id,) if isinstance(shard.replica_id, int) else shard.replica_id
    # Only one piece has index 0 and elements: its replicas become the state's, all others are further copies.
    return (*(cut.offset if cut.size else cut.whole for cut in apart), *replica) if apart else shard.replica_id


# States that each shard has for itself.


def one_per_shard(param: ShardedParam, state_key: str, state: Any) -> ShardedTensor | ShardedObject:
    """Return the leaf of a state that each shard of a parameter has separately, such as a random seed.

    The states of all shards are stored as one array, with a cell for each piece of the parameter's grid. A load into a
    grid of another shape raises an error.

    Args:
        param: Shard of the parameter: one box of a regular grid.
        state_key: Name of the state.
        state: A tensor, of one shape on all shards, or any value.

    Raises:
        TreeError: The parameter is a factory, a flat range, or on an irregular grid.

    Examples:
        >>> import torch
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
    wrapped = OptimizerState.of(state)
    if wrapped.dtype is None:
        return ShardedObject(key, wrapped.data, count or (1,), place or (0,), shard.replica_id)
    shape = wrapped.own_sizes(len(count))
    offset, whole = (*place, *(0,) * len(shape)), (*count, *shape)
    return ShardedTensor(key, wrapped.data, wrapped.dtype, shape, whole, offset, None, shard.replica_id, len(count))


# States reduced along an axis: factored second moments.


def reduced_axis(axis: int, *, where_cut: WhereCut = "refuse") -> OptimizerRule:
    """Return the rule for states that are a parameter reduced along an axis, such as factored second moments.

    In the state, the reduced axis may have size 1, as in torch's Adafactor, or be missing, as in transformers'
    Adafactor.

    Args:
        axis: Reduced axis, of the parameter's own shape; negative numbers count from its end.
        where_cut: Treatment of a parameter that is cut along the reduced axis. "refuse": an error. "equal": its shards
            are reduced together, so all have the same state, which is stored once. "own": each shard reduces its own
            piece of the axis. If the state has the axis with size 1, the stored tensor has one element there for each
            piece; if the state lacks the axis, it is stored as by `one_per_shard`. A load with another number of pieces
            is an error.

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
    # There is no guess by default: moments that are equal on several shards can't be told from each shard's own until
    # one overwrites the other.
    check_where_cut("reduced_axis", where_cut)

    def rule(param: ShardedParam, state_key: str, state: Any) -> ShardedTensor | ShardedObject:
        shard, wrapped = one_box("reduced_axis", param, state_key), OptimizerState.of(state)
        axes = len(shard.local_shape)
        if not -axes <= axis < axes:
            raise unfit("reduced_axis", shard, state_key, f"a parameter of {axes} axes", f"one that has axis {axis}")
        local = axis % axes
        place = _place(shard, local, state_key, where_cut)
        keeps_axis = wrapped.axes(shard.prepend_axis_num) == axes
        cuts = cuts_of(shard)
        cuts[local : local + 1] = [AxisCut(1, place.index, place.pieces)] if keeps_axis else []
        if place.pieces > 1 and not keeps_axis:
            return _one_per_piece(shard, state_key, wrapped, cuts, place.pieces)
        return placed("reduced_axis", shard, state_key, wrapped, cuts, place.replica_id)

    return rule


def _one_per_piece(
    shard: ShardedTensor, state_key: str, own: OptimizerState, cuts: Sequence[AxisCut], pieces: int
) -> ShardedTensor | ShardedObject:
    """Return the leaf of a state that lacks the reduced axis, if each shard reduces its own piece of that axis.

    Args:
        shard: Shard of the parameter.
        state_key: Name of the state.
        own: State of this shard.
        cuts: This rank's part of each axis of the state.
        pieces: Number of pieces into which the reduced axis is cut.
    """
    # The stored state has the grid's axes in front; for a parameter of one axis, the grid's axis would be ambiguous.
    expected = len(cuts) + len(shard.local_shape) if own.is_stored else len(cuts)
    if not cuts or own.axes(shard.prepend_axis_num) != expected:
        found = f"{pieces} pieces along the axis, and a state of {own.axes(shard.prepend_axis_num)} axes"
        text = "a state that keeps the axis with size 1; or, if the parameter has several axes, one that lacks only it"
        raise unfit("reduced_axis", shard, state_key, found, text)
    if not own.is_stored:
        placed("reduced_axis", shard, state_key, own, cuts, shard.replica_id)  # only for its check of the shape
    return one_per_shard(shard, state_key, own)


def came_rules(*, where_cut: WhereCut = "refuse") -> dict[str, OptimizerRule]:
    """Return rules for the factored states of CAME: second moments, and the instability of updates.

    Args:
        where_cut: Treatment of cut axes, as for `reduced_axis`; "own" if each rank runs CAME on its own piece.

    Examples:
        >>> import torch
        >>> param = ShardedTensor.from_rank_offsets("w", torch.zeros(16, 256), (0, 1, 4))
        >>> row = came_rules()["exp_avg_res_row"](param, "exp_avg_res_row", torch.zeros(16))
        >>> row.global_shape, row.global_offset
        ((64,), (16,))

    References:
        Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023.
    """
    row, column = reduced_axis(-1, where_cut=where_cut), reduced_axis(-2, where_cut=where_cut)
    return {f"exp_avg_{kind}_{name}": rule for kind in ("sq", "res") for name, rule in (("row", row), ("col", column))}


def adafactor_rules(*, where_cut: WhereCut = "refuse") -> dict[str, OptimizerRule]:
    """Return rules for the factored states of Adafactor, both torch's and that of transformers and T5.

    Args:
        where_cut: Treatment of cut axes, as for `reduced_axis`; "own" if each rank runs torch's Adafactor on its
            own piece.

    Examples:
        >>> list(adafactor_rules())
        ['row_var', 'col_var', 'exp_avg_sq_row', 'exp_avg_sq_col']
    """
    row, column = reduced_axis(-1, where_cut=where_cut), reduced_axis(-2, where_cut=where_cut)
    return {"row_var": row, "col_var": column, "exp_avg_sq_row": row, "exp_avg_sq_col": column}


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a shard's state along the axis that `reduced_axis` reduces.

    Attributes:
        pieces: Length of that axis in the whole stored state: 1, or the number of pieces that shards reduce separately.
        index: Index of the shard's state along that axis.
        replica_id: Replica id of the shard's state.
    """

    pieces: int
    index: int
    replica_id: ReplicaId


def _place(shard: ShardedTensor, local: int, state_key: str, where_cut: WhereCut) -> _Place:
    at = shard.prepend_axis_num + local
    whole, size, offset = shard.global_shape[at], shard.local_shape[local], shard.global_offset[at]
    if size == whole:
        return _Place(1, 0, shard.replica_id)
    if where_cut == "equal":
        return _Place(1, 0, copies(shard, [AxisCut(size, offset, whole)]))
    if where_cut == "refuse":
        found = f"{size} of {whole} indices of axis {at}"
        raise unfit("reduced_axis", shard, state_key, found, f"all {whole}; or where_cut='equal' or 'own'")
    if shard.axis_fragmentations is None or not size:
        raise unfit("reduced_axis", shard, state_key, "an irregular grid", "a regular grid, as where_cut='own' needs")
    return _Place(shard.axis_fragmentations[at], offset // size, shard.replica_id)
