"""The parameters of a buffer: their names and shapes, told from whatever describes them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ...errors import KeyMismatch, MetadataError, ShapeError, error_text
from ...geometry import integers
from ...mapping import ShardedTensor, ShardedTensorFactory
from ...mapping.memory import check_has_shape
from ._plan import BufferPlan

Parameter = ShardedTensor | ShardedTensorFactory


def parameter_shapes(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, by name.

    Args:
        parameters: shapes, or what has one, by name.

    Raises:
        MetadataError: something has no shape, is a flat range, or dtypes are mixed; names each of them.

    Examples:
        >>> parameter_shapes({"w": (2, 3), "b": torch.zeros(3)})
        {'w': (2, 3), 'b': (3,)}
    """
    if not isinstance(parameters, Mapping):
        fix = "Pass {name: shape, tensor or shard}; dict(module.named_parameters()), say."
        what, found = "plan_buffers: not parameters by name", type(parameters).__name__
        raise MetadataError(error_text(what, found=found, expected="a mapping", fix=fix))
    wrong = [text for name, value in parameters.items() if (text := _wrong(name, value))]
    if wrong:
        fix = "Pass shapes, tensors, or shards of whole boxes; of a factory without data its tensor's shape."
        raise MetadataError(error_text("plan_buffers: parameters that have no place", offenders=wrong, fix=fix))
    _check_dtypes(parameters)
    return {name: _shape(value) or () for name, value in parameters.items()}


def _wrong(name: Any, value: Any) -> str | None:
    """Return what is wrong with a parameter."""
    if not isinstance(name, str) or not name:
        return f"{name!r}: not a name"
    if isinstance(value, Parameter) and value.flattened_range is not None:
        return f"{name!r}: a flat range already, {value.flattened_range}"
    try:
        shape = _shape(value)
    except MetadataError as error:
        return f"{name!r}: {error}".replace("\n", " ")
    if shape is None:
        has_none = isinstance(value, ShardedTensorFactory) and value.data is None
        return f"{name!r}: {type(value).__name__}" + (" without data" if has_none else "")
    return f"{name!r}: shape {shape}" if any(size < 0 for size in shape) else None


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of what has one, None for what hasn't."""
    if isinstance(value, ShardedTensor):
        return value.local_shape
    held = value.data if isinstance(value, ShardedTensorFactory) else value
    check_has_shape("a parameter", held)
    shape = held if isinstance(held, (tuple, list)) else getattr(held, "shape", None)
    return None if shape is None else integers("shape", "size", shape)


def _dtype(value: Any) -> torch.dtype | None:
    held = value.data if isinstance(value, ShardedTensorFactory) else value
    return getattr(held, "dtype", None)


def _check_dtypes(parameters: Mapping[str, Any]) -> None:
    names: dict[Any, list[str]] = {}
    for name, value in parameters.items():
        names.setdefault(_dtype(value), []).append(name)
    names.pop(None, None)
    if len(names) > 1:
        of_each = [f"{dtype}: {', '.join(map(repr, own[:3]))}, {len(own)} in all" for dtype, own in names.items()]
        fix = "Plan a buffer for each dtype; or pass shapes, where one buffer holds fp32 copies of all of them."
        raise MetadataError(error_text("plan_buffers: parameters of several dtypes", offenders=of_each, fix=fix))


def check_parameters(plan: BufferPlan, parameters: Mapping[str, Any], doing: str) -> None:
    """Raise unless each parameter of a plan is there as a shard or factory, of the shape that the plan has.

    Args:
        plan: the buffer's.
        parameters: shards by name; others may be among them.
        doing: for the error.

    Raises:
        KeyMismatch: some aren't there.
        ShapeError: some are something else, or have another shape; names each of them.

    Examples:
        >>> check_parameters(BufferPlan(2, (), ()), {}, "flat_shards")
    """
    if not isinstance(parameters, Mapping):
        found, fix = type(parameters).__name__, "Pass {name: shard}, with the plan's names."
        what = f"{doing}: not parameters by name"
        raise ShapeError(error_text(what, found=found, expected="a mapping", fix=fix))
    missing = [repr(place.name) for place in plan.places if place.name not in parameters]
    if missing:
        fix = "Pass the shards that the buffer was planned for."
        raise KeyMismatch(error_text(f"{doing}: parameters that aren't there", offenders=missing, fix=fix))
    wrong = [
        f"{place.name!r}: {text}"
        for place in plan.places
        if (text := _misfit(parameters[place.name], place.shape)) is not None
    ]
    if wrong:
        fix = "Pass box shards or factories, those that the buffer was planned for."
        raise ShapeError(error_text(f"{doing}: parameters that don't fit the plan", offenders=wrong, fix=fix))


def _misfit(value: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(value, Parameter):
        return f"{type(value).__name__}, not a ShardedTensor or ShardedTensorFactory"
    if value.flattened_range is not None:
        return f"a flat range already, {value.flattened_range}"
    found = None if isinstance(value, ShardedTensorFactory) and value.data is None else _shape(value)
    if found is None or found == shape:
        return None
    return f"shape {found}, {prod(found)} elements; the plan has {shape}, {prod(shape)} elements"
