"""A rank's slices of a ZeRO-1 buffer as shards: flat ranges of the parameters, with data or as targets of a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...core.lazy import as_integers
from ...core.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from ...core.trees import empty_data
from ...errors import KeyMismatch, MetadataError, ShapeError, error_text, plural
from ._pack import Parameter, check_parameters
from ._plan import BufferPlan, BufferRange, check_dtype, check_plan, checked_rank

# A rank's slices, one tensor per bucket, divided into parameters' ranges, and assembled from them.


def slice_views(plan: BufferPlan, rank: int, slices: Sequence[Any]) -> dict[str, Any]:
    """Return views of the parameters' elements in a rank's slices, by name.

    Parameters without elements on the rank are left out.

    Args:
        plan: Plan of the buffer.
        rank: Data-parallel rank.
        slices: The rank's slice of each bucket, 1-D with the lengths `plan.slice_lengths`: main parameters, or one
            kind of state.

    Raises:
        MetadataError: There is no such rank.
        ShapeError: The number, length or dtype of slices is wrong; the error names each slice.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> plan = plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2)
        >>> slice_views(plan, 1, [torch.tensor([5, 10, 11, 12, 0])])
        {'w': tensor([5]), 'b': tensor([10, 11, 12])}
    """
    check_plan(plan, "slice_views")
    ranges = plan.ranges(rank)
    _check_slices(plan, rank, slices)
    return {
        part.name: slices[part.bucket].narrow(0, part.taken.start, part.taken.stop - part.taken.start)
        for part in ranges
    }


def buffer_slices(
    plan: BufferPlan,
    rank: int,
    tree: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor]:
    """Return a rank's slices, one per bucket, filled from the parameters' ranges; the inverse of `slice_views`.

    The slices are new tensors, with zeros as padding.

    Args:
        plan: Plan of the buffer.
        rank: Data-parallel rank.
        tree: Elements of each parameter on the rank, by name: a 1-D tensor, or a shard or factory with data. It is
            empty for a rank without parameters.
        dtype: Dtype of the slices and of all tensors in `tree`.
        device: Device of the slices.

    Raises:
        MetadataError: There is no such rank.
        KeyMismatch: Names are missing, or belong to parameters without elements on the rank.
        ShapeError: Tensors have another shape or dtype, or no memory; the error names each.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> plan = plan_buffers({"w": (2, 3), "b": (3,)}, data_parallel=2)
        >>> buffer_slices(plan, 1, {"w": torch.ones(1), "b": torch.ones(3)})
        [tensor([1., 1., 1., 1., 0.])]
    """
    check_plan(plan, "buffer_slices")
    check_dtype(dtype, "buffer_slices")
    ranges = plan.ranges(rank)
    tensors = _checked_tree(rank, tree, {part.name: part.taken.stop - part.taken.start for part in ranges}, dtype)
    # Slices are made as integers, since torch has no fill for some dtypes; zero bits are zeros of every dtype.
    slices = [as_integers(empty_data((length,), dtype, device)).zero_() for length in plan.slice_lengths]
    for part in ranges:
        slices[part.bucket][part.taken].copy_(as_integers(tensors[part.name]))
    return [bucket_slice.view(dtype) for bucket_slice in slices]


def _check_slices(plan: BufferPlan, rank: int, slices: Sequence[Any]) -> None:
    lengths = plan.slice_lengths
    subject = f"slice_views: rank {checked_rank(plan, rank)} of {plan.data_parallel}"
    if isinstance(slices, (Mapping, torch.Tensor)) or not isinstance(slices, Sequence) or len(slices) != len(lengths):
        is_list = isinstance(slices, Sequence) and not isinstance(slices, (str, Mapping))
        found = plural(len(slices), "tensor") if is_list else type(slices).__name__
        expected = f"a list of {plural(len(lengths), 'tensor')}, one per bucket"
        fix = "Pass a list with a tensor for each of `plan.slice_lengths`, even if there is only one bucket."
        raise ShapeError(
            error_text(f"{subject}: slices do not fit the buckets", found=found, expected=expected, fix=fix)
        )
    wrong = [
        f"bucket {bucket}: {_kind(part)}, not ({length},)"
        for bucket, (part, length) in enumerate(zip(slices, lengths, strict=True))
        if tuple(getattr(part, "shape", ())) != (length,) or not hasattr(part, "narrow")
    ]
    if wrong:
        fix = "Pass the rank's 1-D slice of each bucket, padding included: its length is in `plan.slice_lengths`."
        raise ShapeError(error_text(f"{subject}: slices whose shapes differ from the plan's", offenders=wrong, fix=fix))
    if len({part.dtype for part in slices}) > 1:
        of_each = [f"bucket {bucket}: {part.dtype}" for bucket, part in enumerate(slices)]
        fix = "Pass the slices of one kind of state at a time."
        raise ShapeError(error_text(f"{subject}: slices of several dtypes", offenders=of_each, fix=fix))


def _checked_tree(rank: int, tree: Any, lengths: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors in a tree, after checking that they are the ranges of the rank's parameters.

    Args:
        rank: Data-parallel rank, for errors.
        tree: Tensors, shards or factories by name.
        lengths: Length of each parameter's range on the rank, by name.
        dtype: Expected dtype.
    """
    subject = f"buffer_slices: rank {rank}"
    if not isinstance(tree, Mapping):
        found, fix = type(tree).__name__, "Pass {name: tensor}, such as `load` returns for `flat_targets`."
        raise ShapeError(error_text(f"{subject}: tree is not a mapping", found=found, expected="a mapping", fix=fix))
    wrong = [f"{name!r} is missing" for name in lengths if name not in tree]
    wrong += [f"{name!r}: the rank has no elements of it" for name in tree if name not in lengths]
    if wrong:
        fix = "Pass one tensor, such as exp_avg, for each name in `plan.ranges(rank)`, and no other names."
        raise KeyMismatch(error_text(f"{subject}: wrong names in tree", offenders=wrong, fix=fix))
    tensors = {name: _tensor(tree[name]) for name in lengths}
    wrong = [
        f"{name!r}: {_kind(tensor)}, not ({length},) {dtype}"
        for name, length in lengths.items()
        if not isinstance(tensor := tensors[name], torch.Tensor)
        or (tensor.dtype, tuple(tensor.shape)) != (dtype, (length,))
    ]
    if wrong:
        fix = "Pass each range as a 1-D tensor, and the dtype of these tensors as dtype= (default: torch.float32)."
        raise ShapeError(error_text(f"{subject}: ranges of wrong shapes or dtypes", offenders=wrong, fix=fix))
    empty = [repr(name) for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        fix = "Load these targets first, and pass what `load` returns."
        raise ShapeError(error_text(f"{subject}: meta tensors, which have no elements", offenders=empty, fix=fix))
    return tensors


def _tensor(value: Any) -> Any:
    return value.data if isinstance(value, (ShardedTensor, ShardedTensorFactory)) else value


def _kind(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{tuple(shape)} {dtype}"


ReplicaFunction = Callable[[ReplicaId], ReplicaId]


def flat_shards(
    plan: BufferPlan,
    rank: int,
    slices: Sequence[Any],
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    replica_id: ReplicaFunction | None = None,
) -> dict[str, Parameter]:
    """Return a rank's slices of a buffer as shards that can be saved, one per parameter, by name.

    Each shard is the parameter's shard or factory, with the `flattened_range` that the rank has, and with a view of the
    slice as data. Any layout can load what was saved: another number of ranks, or boxes. Parameters without elements on
    the rank are left out.

    Args:
        plan: Plan of the buffer.
        rank: Data-parallel rank.
        slices: The rank's slice of each bucket, of any dtype: main parameters, or one kind of state.
        parameters: Box shards or factories for which the buffer was planned, by name; other names are ignored.
        prefix: Prefix of the keys, joined by a dot, such as "optimizer.state.exp_avg".
        replica_id: Function from a parameter's replica id to the replica id of its ranges. Data-parallel ranks hold
            copies of a parameter, but different ranges of it. So the data-parallel index in the replica id must become
            0. By default, the last index of a tuple becomes 0, as in Megatron-Core, whose tuples are (pipeline, tensor,
            data parallel); a replica id that is a single int must be 0 already. If the replica ids have no
            data-parallel index, pass ``lambda replica: replica``.

    Raises:
        MetadataError: There is no such rank; or `replica_id` is None, and a replica id is a single int that isn't 0.
        KeyMismatch: Some parameters are missing.
        ShapeError: The number, length or dtype of slices is wrong, or parameters have another shape.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3).bfloat16(), (0, 0, 4), replica_id=(0, 0, 1))
        >>> plan = plan_buffers({"w": weight}, data_parallel=2)
        >>> moment = flat_shards(plan, 1, [torch.ones(3)], {"w": weight}, prefix="optimizer.state.exp_avg")["w"]
        >>> moment.key, moment.dtype, moment.global_shape, moment.flattened_range, moment.replica_id
        ('optimizer.state.exp_avg.w', torch.float32, (8, 3), slice(3, 6, None), (0, 0, 0))
    """
    check_plan(plan, "flat_shards")
    check_parameters(plan, parameters, "flat_shards")
    views = slice_views(plan, rank, slices)
    return _shards(plan, rank, parameters, prefix, replica_id, lambda part: views[part.name])


def flat_targets(
    plan: BufferPlan,
    rank: int,
    parameters: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    replica_id: ReplicaFunction | None = None,
) -> dict[str, Parameter]:
    """Return the shards that `flat_shards` would return, with meta tensors as data, as targets of a load.

    Args:
        plan: Plan of the buffer.
        rank: Data-parallel rank.
        parameters: Box shards or factories for which the buffer was planned, by name; other names are ignored.
        dtype: Dtype of the state.
        prefix: Prefix of the keys, joined by a dot, such as "optimizer.state.exp_avg".
        replica_id: Function from a parameter's replica id to the replica id of its ranges, as for `flat_shards`.

    Raises:
        MetadataError: There is no such rank; or `replica_id` is None, and a replica id is a single int that isn't 0.
        KeyMismatch: Some parameters are missing.
        ShapeError: Parameters have another shape.

    Examples:
        >>> from shardtree.buffers import plan_buffers
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
        >>> plan = plan_buffers({"w": weight}, data_parallel=4)
        >>> [target.flattened_range for rank in range(4) for target in flat_targets(plan, rank, {"w": weight}).values()]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    check_plan(plan, "flat_targets")
    check_parameters(plan, parameters, "flat_targets")
    check_dtype(dtype, "flat_targets")

    # Data are meta tensors instead of None: most factories look at their data's shape.
    def empty(part: BufferRange) -> torch.Tensor:
        return empty_data((part.taken.stop - part.taken.start,), dtype, "meta")

    return _shards(plan, rank, parameters, prefix, replica_id, empty)


def _shards(
    plan: BufferPlan,
    rank: int,
    parameters: Mapping[str, Parameter],
    prefix: str,
    replica_id: ReplicaFunction | None,
    data: Callable[[BufferRange], Any],
) -> dict[str, Parameter]:
    if not isinstance(prefix, str):
        raise MetadataError(
            error_text("flat_shards: prefix is not a string", found=type(prefix).__name__, expected="a string")
        )
    if replica_id is not None and not callable(replica_id):
        heading, fix = "flat_shards: replica_id is not a function", "Pass a function from a replica id to another."
        raise MetadataError(error_text(heading, found=type(replica_id).__name__, expected="a function", fix=fix))
    # Data-parallel ranks hold copies of a parameter, but different ranges, so each range is the main replica, and the
    # only one.
    change = _without_data_parallel if replica_id is None else replica_id
    ranges = plan.ranges(rank)
    _check_replicas(parameters, ranges, replica_id)
    return {part.name: _shard(parameters[part.name], part, data(part), prefix, change) for part in ranges}


def _shard(parameter: Parameter, part: BufferRange, data: Any, prefix: str, change: ReplicaFunction) -> Parameter:
    key = f"{prefix}.{parameter.key}" if prefix else parameter.key
    replica, flat = change(parameter.replica_id), part.flattened_range
    # A factory has no dtype of its own: it takes that of its data.
    if isinstance(parameter, ShardedTensor):
        return replace(parameter, key=key, data=data, dtype=data.dtype, replica_id=replica, flattened_range=flat)
    return replace(parameter, key=key, data=data, replica_id=replica, flattened_range=flat)


def _without_data_parallel(replica: ReplicaId) -> ReplicaId:
    return (*replica[:-1], 0) if isinstance(replica, tuple) else replica


def _check_replicas(
    parameters: Mapping[str, Parameter], ranges: Sequence[BufferRange], replica_id: ReplicaFunction | None
) -> None:
    """Raise an error if `replica_id` is None and a parameter's replica id is a single number other than 0.

    Whether such a number counts data-parallel ranks is unknown.
    """
    if replica_id is not None:
        return
    # In pure data parallelism the number should become 0; beside tensor parallelism it may have to stay. A wrong guess
    # would be found only by the next save, on other ranks.
    unclear = [part.name for part in ranges if isinstance(number := parameters[part.name].replica_id, int) and number]
    if unclear:
        lines = [f"{name!r}: replica_id {parameters[name].replica_id}" for name in unclear]
        heading = "flat_shards: unclear whether these replica ids number the copies on data-parallel ranks"
        fix = (
            "If these ids number data-parallel ranks only, pass `replica_id=lambda replica: 0`.\n"
            "  If they number other ranks only, such as tensor-parallel, pass `replica_id=lambda replica: replica`.\n"
            "  If they number both, make each replica id a tuple with the data-parallel rank last."
        )
        raise MetadataError(error_text(heading, offenders=lines, fix=fix))
