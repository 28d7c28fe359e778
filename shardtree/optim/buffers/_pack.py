"""plan_buffers: parameters packed one after another into buckets, each of which is cut into one range per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import lcm, prod
from typing import Any

from ...core.geometry import integer, integers, refuse
from ...core.mapping import ShardedTensor, ShardedTensorFactory, check_has_shape
from ...errors import KeyMismatch, MetadataError, ShapeError, error_text
from ._plan import BufferPlace, BufferPlan

# Names and shapes of parameters, from shapes, tensors or shards.

Parameter = ShardedTensor | ShardedTensorFactory


def parameter_shapes(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters, by name.

    Args:
        parameters: Shapes, tensors, shards or factories, by name.

    Raises:
        MetadataError: A value has no shape or is a flat range, or dtypes differ (a buffer has only one).

    Examples:
        >>> import torch
        >>> parameter_shapes({"w": (2, 3), "b": torch.zeros(3)})
        {'w': (2, 3), 'b': (3,)}
    """
    if not isinstance(parameters, Mapping):
        fix = "Pass {name: shape, tensor or shard}, such as dict(module.named_parameters())."
        heading, found = "plan_buffers: parameters is not a mapping", type(parameters).__name__
        raise MetadataError(error_text(heading, found=found, expected="a mapping", fix=fix))
    wrong = [text for name, value in parameters.items() if (text := _problem(name, value))]
    if wrong:
        fix = "For each name, pass a shape, a tensor, a shard or a factory with data, but none with flattened_range."
        raise MetadataError(error_text("plan_buffers: unusable parameters", offenders=wrong, fix=fix))
    _check_dtypes(parameters)
    return {name: _shape(value) or () for name, value in parameters.items()}


def _problem(name: Any, value: Any) -> str | None:
    """Return the reason why a parameter can't be part of a buffer; None if it can."""
    if not isinstance(name, str) or not name:
        return f"{name!r}: not a name"
    if isinstance(value, Parameter) and value.flattened_range is not None:
        return f"{name!r}: already has flattened_range={value.flattened_range}"
    try:
        shape = _shape(value)
    except MetadataError as error:
        return f"{name!r}: {error}".replace("\n", " ")
    if shape is None:
        has_none = isinstance(value, ShardedTensorFactory) and value.data is None
        return f"{name!r}: {type(value).__name__}" + (" without data" if has_none else "")
    return f"{name!r}: shape {shape}" if any(size < 0 for size in shape) else None


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return a value's shape; None for a value without one."""
    if isinstance(value, ShardedTensor):
        return value.local_shape
    source = value.data if isinstance(value, ShardedTensorFactory) else value
    check_has_shape("a parameter", source)
    shape = source if isinstance(source, (tuple, list)) else getattr(source, "shape", None)
    return None if shape is None else integers("shape", "size", shape)


def _check_dtypes(parameters: Mapping[str, Any]) -> None:
    names: dict[Any, list[str]] = {}
    for name, value in parameters.items():
        source = value.data if isinstance(value, ShardedTensorFactory) else value
        names.setdefault(getattr(source, "dtype", None), []).append(name)
    # Shapes have no dtype, and fit any.
    names.pop(None, None)
    if len(names) > 1:
        of_each = [f"{dtype}: {', '.join(map(repr, own[:3]))}, {len(own)} in all" for dtype, own in names.items()]
        fix = "Plan a buffer for each dtype; or, if one buffer holds fp32 copies of all parameters, pass {name: shape}."
        raise MetadataError(error_text("plan_buffers: parameters of several dtypes", offenders=of_each, fix=fix))


def check_parameters(plan: BufferPlan, parameters: Mapping[str, Any], doing: str) -> None:
    """Raise an error unless each parameter of a plan is present as a shard or factory of the planned shape.

    Args:
        plan: Plan of the buffer.
        parameters: Shards or factories by name; names that aren't in the plan are ignored.
        doing: Name of the operation in error messages.

    Raises:
        KeyMismatch: Some parameters are missing.
        ShapeError: Some are neither shards nor factories, or have another shape; the error names each.

    Examples:
        >>> check_parameters(BufferPlan(2, (), ()), {}, "flat_shards")
    """
    if not isinstance(parameters, Mapping):
        found, fix = type(parameters).__name__, "Pass {name: shard}, with the plan's names."
        heading = f"{doing}: parameters is not a mapping"
        raise ShapeError(error_text(heading, found=found, expected="a mapping", fix=fix))
    missing = [repr(place.name) for place in plan.places if place.name not in parameters]
    if missing:
        fix = "Pass the shards that the buffer was planned for."
        raise KeyMismatch(error_text(f"{doing}: parameters of the plan are missing", offenders=missing, fix=fix))
    wrong = [
        f"{place.name!r}: {text}"
        for place in plan.places
        if (text := _misfit(parameters[place.name], place.shape)) is not None
    ]
    if wrong:
        fix = "Pass the shards or factories for which the buffer was planned, without flattened_range."
        raise ShapeError(error_text(f"{doing}: parameters that do not fit the plan", offenders=wrong, fix=fix))


def _misfit(value: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(value, Parameter):
        return f"{type(value).__name__}, not a ShardedTensor or ShardedTensorFactory"
    if value.flattened_range is not None:
        return f"already has flattened_range={value.flattened_range}"
    actual = None if isinstance(value, ShardedTensorFactory) and value.data is None else _shape(value)
    if actual is None or actual == shape:
        return None
    return f"shape {actual}, {prod(actual)} elements; the plan has {shape}, {prod(shape)} elements"


def plan_buffers(
    parameters: Mapping[str, Any],
    *,
    data_parallel: int,
    bucket_size: int | None = None,
    align: int = 1,
    bucket_align: int = 1,
    order: Iterable[str] | None = None,
    alone: Collection[str] = (),
) -> BufferPlan:
    """Return the plan of a contiguous ZeRO-1 buffer: the position of each parameter, and each rank's range of a bucket.

    Parameters are placed one after another, each within one bucket. A bucket is closed after the parameter that brings
    it to `bucket_size` elements or more. Each bucket is cut into equal ranges, one per data-parallel rank.

    Args:
        parameters: Parameters of the model on a rank, by name: a shape, a tensor, a ShardedTensor, or a
            ShardedTensorFactory with data. Those that have a dtype must have the same one.
        data_parallel: Number of ranks that share the buffer.
        bucket_size: Number of elements at which a bucket is closed; None for one bucket.
        align: Alignment of parameters: each one's offset in the buffer is a multiple of it.
        bucket_align: Alignment of buckets: each one's end is a multiple of it and of `data_parallel`.
        order: Names of all parameters in the buffer's order; by default the order of `parameters`.
        alone: Names of parameters that get a bucket of their own.

    Raises:
        MetadataError: A number is too small, a value has no shape or is a flat range, or dtypes are mixed.
        KeyMismatch: `order` isn't a permutation of all names, or `alone` has unknown names.

    Examples:
        >>> plan = plan_buffers({"w": (2, 3), "b": (3,), "norm": (2,)}, data_parallel=2, bucket_size=8, align=4)
        >>> [(place.name, place.start, place.stop, place.bucket) for place in plan.places]
        [('w', 0, 6, 0), ('b', 8, 11, 0), ('norm', 12, 14, 1)]
        >>> print(plan)
        3 parameters of 11 elements, 3 of padding (21.4 %): 2 buckets, cut for 2 ranks
        bucket  from  to  parameters  elements  padding  a rank's slice
             0     0  12           2         9        3               6
             1    12  14           1         2        0               1
        rank  parameters  elements  padding
           0           2         7        0
           1           2         4        3

    References:
        Megatron-Core 0.16, `_ParamAndGradBuffer`: with its distributed optimizer it has align=64, bucket_align=128 (or
        2**16 with `pad_buckets_for_high_nccl_busbw`) and order=reversed(parameters), and shared embeddings alone.
    """
    # Shapes alone decide, so that each rank of the group computes the same plan, with or without data.
    shapes = parameter_shapes(parameters)
    ranks = _count("data_parallel", data_parallel, "Pass the size of the data-parallel group.")
    fix = "Pass 1 for no alignment."
    # The least common multiple: the end of a bucket must suit the collective's alignment and divide into equal ranges.
    start_at, end_at = _count("align", align, fix), lcm(ranks, _count("bucket_align", bucket_align, fix))
    limit = None if bucket_size is None else _count("bucket_size", bucket_size, "Pass None for one bucket.")
    names = _names_in_order(shapes, order)
    groups = set(_checked_names("alone", alone, shapes))
    places: list[BufferPlace] = []
    buckets: list[tuple[int, int]] = []
    begin = position = 0
    for number, name in enumerate(names):
        start = _round_up(position, start_at)
        places.append(BufferPlace(name, shapes[name], len(buckets), start))
        position = places[-1].stop
        is_full = limit is not None and position - begin >= limit
        following = names[number + 1 : number + 2]
        # A parameter with a bucket of its own also closes the bucket before it.
        if is_full or not following or name in groups or following[0] in groups:
            position = _round_up(position, end_at)
            buckets.append((begin, position))
            begin = position
    return BufferPlan(ranks, tuple(places), tuple(buckets))


def _round_up(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple


def _count(field: str, value: Any, fix: str) -> int:
    number = integer("plan_buffers", field, value)
    if number < 1:
        refuse("plan_buffers", field, number, "at least 1", fix, error=MetadataError)
    return number


def _names_in_order(shapes: Mapping[str, Any], order: Iterable[str] | None) -> list[str]:
    if order is None:
        return list(shapes)
    names = _checked_names("order", order, shapes)
    counts = Counter(names)
    wrong = [f"{name!r} is missing" for name in shapes if name not in counts]
    wrong += [f"{name!r} occurs {count} times" for name, count in counts.items() if count > 1]
    if wrong:
        fix = "Pass all names of `parameters`, each once, such as reversed(parameters)."
        raise KeyMismatch(error_text("plan_buffers: order is not a permutation of all names", offenders=wrong, fix=fix))
    return names


def _checked_names(field: str, names: Iterable[str], shapes: Mapping[str, Any]) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        refuse("plan_buffers", field, repr(names)[:100], "names", "Pass a list of names.", error=MetadataError)
    texts = list(names)
    unknown = [repr(name)[:200] for name in texts if not isinstance(name, str) or name not in shapes]
    if unknown:
        heading = f"plan_buffers: unknown names in {field}"
        raise KeyMismatch(error_text(heading, offenders=unknown, fix="Pass names of `parameters`."))
    return texts
