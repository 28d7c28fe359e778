"""What all lenses ask of the shard that they are given, and the small changes to shapes that they share."""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

import torch

from ...errors import MetadataError, ShapeError, UnsupportedValue, error_text
from ...geometry import integer, refuse
from ...mapping import ShardedTensor
from ...trees import as_integers, empty_data

Shape = tuple[int, ...]
T = TypeVar("T")
DESCRIBE = "Describe what the model holds with `ShardedTensor.from_rank_offsets`, say."


def check_box(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box.

    Raises:
        MetadataError: it isn't a ShardedTensor.
        ShapeError: it is a flat range.
    """
    if not isinstance(shard, ShardedTensor):
        refuse(doing, "shard", type(shard).__name__, "a ShardedTensor", DESCRIBE, error=MetadataError)
    if shard.flattened_range is not None:
        found, fix = f"the flat range {shard.flattened_range}", "Use `as_factory`, which takes flat ranges apart."
        raise ShapeError(error_text(f"{doing}: {shard.key!r} isn't a box", found=found, expected="a box", fix=fix))


def check_exact(doing: str, shard: ShardedTensor) -> None:
    """Raise unless a shard is a box of a tensor whose stored shape is known, since places follow from the shape.

    Raises:
        ShapeError: it is a flat range, or its `allow_shape_mismatch` is set.
    """
    check_box(doing, shard)
    if shard.allow_shape_mismatch:
        what = f"{doing}: where {shard.key!r} is stored follows from its global shape"
        fix = "Leave out allow_shape_mismatch. For a padded axis there is `padded_axis`."
        raise ShapeError(error_text(what, found="allow_shape_mismatch=True", expected="the exact shape", fix=fix))


def checked_axis(doing: str, shard: ShardedTensor, axis: int) -> int:
    """Return an axis of the shard's own tensor, counted from the front.

    Raises:
        MetadataError: it isn't an integer.
        ShapeError: there is no such axis.
    """
    axes, number = len(shard.local_shape), integer(doing, "axis", axis)
    if not -axes <= number < axes:
        found, expected = f"axis {number}", f"one of {axes} axes"
        raise ShapeError(error_text(f"{doing}: {shard.key!r} has no such axis", found=found, expected=expected))
    return number % axes


def positive(doing: str, field: str, value: int) -> int:
    """Return a number of things, of which there is at least one.

    Raises:
        MetadataError: it isn't an integer, or is less than 1.
    """
    number = integer(doing, field, value)
    if number < 1:
        refuse(doing, field, number, "1 or more", "Count them in what all ranks hold together.", error=MetadataError)
    return number


def with_values(values: tuple[T, ...], at: int, new: tuple[T, ...], count: int = 1) -> tuple[T, ...]:
    """Return a tuple with some values, from a place on, replaced by others.

    Examples:
        >>> with_values((2, 3, 4), 1, (5, 6))
        (2, 5, 6, 4)
    """
    return (*values[:at], *new, *values[at + count :])


def reshaped(tensor: Any, shape: Shape) -> Any:
    """Return a tensor with another shape: a view where it can be, else a copy, bit for bit, of any dtype."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.reshape(shape)
    return as_integers(tensor).reshape(shape).view(tensor.dtype)


def flat_axes(tensor: Any, at: int, count: int) -> Any:
    """Return a tensor with some axes beside each other as one, row-major.

    Where they can't be one in a lazy tensor, as after a transposition, it is described as its rows joined.
    """
    shape = tuple(tensor.shape)
    flat = with_values(shape, at, (prod(shape[at : at + count]),), count)
    try:
        return reshaped(tensor, flat)
    except UnsupportedValue:
        rows = [flat_axes(tensor.select(at, number), at, count - 1) for number in range(shape[at])]
        return torch.cat(rows, dim=at)


def nothing(shard: ShardedTensor, shape: Shape) -> torch.Tensor:
    """Return a tensor without elements, as the shard would hold it."""
    return empty_data(shape, shard.dtype, device_of(shard.data))


def device_of(data: Any) -> torch.device:
    """Return where a shard's tensor is; the CPU where there is none, or none in memory, as in targets of a load."""
    device = getattr(data, "device", None)
    return device if isinstance(device, torch.device) and device.type != "meta" else torch.device("cpu")
